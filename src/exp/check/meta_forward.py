"""Forwards of the network on the meta device, where tensors have a shape and a dtype, but no numbers.

The trace of a forward contains the inputs and outputs of all modules.
"""

from __future__ import annotations

import contextlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exp.errors import ConfigError, config_error
from exp.models.containers import ProgramModel, forward_names, with_forward
from exp.models.forward_trace import SINGLE, Arithmetic, ForwardTrace, Recorder
from exp.models.inference import example_inputs, materialise
from exp.models.syntax import ProgramError
from exp.objectives.objective import Objective
from exp.optim.phase import Phase
from exp.shared_types import DataSpec
from exp.spelling import among, did_you_mean

# Words in torch's errors of operators that need the numbers of a tensor. After such an error, shapes are unknown.
UNDECIDABLE = ("meta", "same device", "data-dependent", "data dependent")


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The exception that ended a forward on the meta device.

    Attributes:
        error: The exception.
        network: Network of the forward. None if the network could not be built.
        recorder: Recorder of the forward. It contains the module calls in progress when the exception was raised.
    """

    error: BaseException
    network: nn.Module | None
    recorder: Recorder

    @property
    def is_undecidable(self) -> bool:
        """True if the exception shows that the network needs the numbers of a tensor.

        In that case, the shapes of the network cannot be checked.
        """
        is_explained = isinstance(self.error, ConfigError | ProgramError)
        return not is_explained and any(word in str(self.error).lower() for word in UNDECIDABLE)

    @property
    def message(self) -> str:
        """Type and first line of the exception."""
        return f"{type(self.error).__name__}: {self.error}".splitlines()[0]


@dataclass(frozen=True, kw_only=True)
class MetaForward:
    """The result of the forwards on the meta device.

    Attributes:
        network: Network with the sizes of all layers. None if the network cannot be built.
        traces: Trace of each forward without an error, by the name of the forward. The name None stands for the
            network's own forward. Other names are forwards that phases select.
        failure: Exception that ended the forwards. None (default) if all forwards ran.
    """

    network: nn.Module | None
    traces: Mapping[str | None, ForwardTrace]
    failure: Failure | None = None

    @property
    def notes(self) -> tuple[str, ...]:
        """A note if shapes were not checked because the network needs the numbers of a tensor. Otherwise empty."""
        if self.failure is None or not self.failure.is_undecidable:
            return ()
        return (f"the shapes of the model were not checked: {self.failure.message}",)

    @property
    def parameters(self) -> int | None:
        """Number of scalar parameters of the network. None if the network cannot be built."""
        return None if self.network is None else sum(parameter.numel() for parameter in self.network.parameters())


def run_on_meta(
    *,
    network_factory: Callable[[], nn.Module],
    spec: DataSpec,
    objective: Objective | None = None,
    phases: Sequence[Phase] = (),
    prepare: Callable[[nn.Module], None] = lambda network: None,
    arithmetic: Arithmetic = SINGLE,
) -> MetaForward:
    """Build the network on the meta device, and run its forwards on a batch with the shape of the data.

    The first forward also determines the sizes of lazy layers.

    Args:
        network_factory: Function that builds the network. The meta device is the default device during the call.
        spec: Shapes and dtypes of the data.
        objective: Objective of the run. If a term differentiates twice, the inputs require gradients. Default: None.
        phases: Phases of the run. The forwards that phases select also run. Default: no phases.
        prepare: Function that changes the network in place. It is called before the first forward, and again after the
            sizes of all lazy layers are known. Default: no change.
        arithmetic: Dtypes in which the run computes. Default: no autocast.

    Returns:
        The network and the traces of its forwards. If an exception ended the forwards, the result contains it.
    """
    traces: dict[str | None, ForwardTrace] = {}
    network = seen = None
    with Recorder(arithmetic=arithmetic) as recorder, torch.device("meta"):
        try:
            network = seen = _build(network_factory, prepare)
            named = [None, *dict.fromkeys(phase.forward for phase in phases if phase.forward in forward_names(network))]
            inputs, is_twice = example_inputs(spec, device="meta"), bool(objective and objective.differentiated_twice)
            for one in inputs.values():
                one.requires_grad_(is_twice and one.is_floating_point())
            for name in named:
                seen = network if name is None else with_forward(network, name)
                traces[name] = _trace(recorder, seen, inputs)
            seen = network
            materialise(network, inputs)
            prepare(network)
            if any(isinstance(module, ProgramModel) and module.reads_training for module in network.modules()):
                for name in named:  # trace the branches of a program that run only in evaluation mode
                    seen = network if name is None else with_forward(network, name)
                    recorder.trace(seen.eval(), inputs)
                network.train()
        except (Exception, SystemExit) as error:  # a user's layer may raise anything
            is_sized = network is not None and not any(map(nn.parameter.is_lazy, network.parameters()))
            failure = Failure(error=error, network=recorder.root if seen is None else seen, recorder=recorder)
            return MetaForward(network=network if is_sized else None, traces=traces, failure=failure)
    return MetaForward(network=network, traces=traces)


def _build(network_factory: Callable[[], nn.Module], prepare: Callable[[nn.Module], None]) -> nn.Module:
    """Return the network after its first preparation.

    Parameters are frozen before the forward, because hooks read which layers get gradients.

    Raises:
        ConfigError: `prepare` raised this error, and the network has no lazy parameters. If the network has lazy
            parameters, the error is ignored, because the caller runs `prepare` again.
    """
    network = network_factory()
    for module in network.modules():
        if isinstance(module, ProgramModel):
            with contextlib.suppress(ConfigError):  # materialise raises the same error later, with its key
                module.apply_freeze()
    try:
        prepare(network)
    except ConfigError:
        if not any(map(nn.parameter.is_lazy, network.parameters())):
            raise
    return network


def _trace(recorder: Recorder, network: nn.Module, inputs: Mapping[str, Tensor]) -> ForwardTrace:
    """Return the trace of a forward of the network.

    Raises:
        ConfigError: The forward needs an input that the data does not have.
    """
    parameters = inspect.signature(network.forward).parameters.values()
    needed = [
        one.name
        for one in parameters
        if one.default is one.empty and one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD, one.KEYWORD_ONLY)
    ]
    missing = [name for name in needed if name not in inputs]
    is_alone = len(inputs) == 1 or "input" in inputs
    # A single input of the data is passed by position, so the parameter may have another name.
    if not missing or (is_alone and missing == needed[:1]):
        return recorder.trace(network, inputs)
    got = f"{among(inputs)}, but the forward of {type(network).__name__} has the parameters {', '.join(needed)}"
    expected = f"an input named {' and one named '.join(missing)}"
    close = did_you_mean(missing[0], [name for name in inputs if name not in needed])
    fix = "Return samples as mappings with these names, or name the values of a tuple in data.inputs. Entries that a "
    fix += "batch transform adds are available to losses and metrics only"
    raise config_error("data.inputs", got=got, expected=expected, fix=close or fix)
