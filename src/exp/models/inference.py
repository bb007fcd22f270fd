"""Sizes that a config leaves out: layers built lazily, and given their shapes by one forward of a stand-in batch."""

from __future__ import annotations

import inspect
import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Protocol, TypeVar

import torch
from torch import Tensor, nn
from torch.nn.modules.lazy import LazyModuleMixin
from torch.nn.parameter import is_lazy

from exp.errors import ConfigError, RunError
from exp.models.containers import ProgramModel, config_key, with_forward
from exp.shared_types import INPUT, DataSpec

# The class, its lazy one, and the parameter that may be left out. torch has no lazy recurrent layers.
LAZY_CLASSES: dict[type[nn.Module], tuple[type[nn.Module], str]] = {
    nn.Linear: (nn.LazyLinear, "in_features"),
    nn.Conv1d: (nn.LazyConv1d, "in_channels"),
    nn.Conv2d: (nn.LazyConv2d, "in_channels"),
    nn.Conv3d: (nn.LazyConv3d, "in_channels"),
    nn.ConvTranspose1d: (nn.LazyConvTranspose1d, "in_channels"),
    nn.ConvTranspose2d: (nn.LazyConvTranspose2d, "in_channels"),
    nn.ConvTranspose3d: (nn.LazyConvTranspose3d, "in_channels"),
    nn.BatchNorm1d: (nn.LazyBatchNorm1d, "num_features"),
    nn.BatchNorm2d: (nn.LazyBatchNorm2d, "num_features"),
    nn.BatchNorm3d: (nn.LazyBatchNorm3d, "num_features"),
}


# What stands for a length that differs from batch to batch, where shapes are looked at.
STAND_IN_LENGTH = 16


Result = TypeVar("Result")
Value = TypeVar("Value")


class NetworkCall(Protocol):
    def __call__(self, run: Callable[..., Result], data: Mapping[str, Value]) -> Result:
        """What `run`, the network or what stands in its place, gives for a batch's entries."""


def lazy_class(cls: type, given: set[str], *, positional: int = 0) -> type[nn.Module] | None:
    """The class that infers the size which `given`, the parameters that are given, leaves out; None where none does.

    positional: how many arguments are given by place. The size comes first, so that it is then among them.
    """
    lazy, inferred = LAZY_CLASSES.get(cls, (None, ""))
    return None if inferred in given or positional else lazy


def example_inputs(spec: DataSpec, *, batch_size: int = 2, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """A stand-in for the network's inputs: zeros `[batch_size, *shape]` of the declared dtype, by name.

    Zeros are valid class and character numbers, too. The batch is of 2, for batch norm refuses one sample in training.
    A length that differs from batch to batch is STAND_IN_LENGTH.
    """
    return {
        name: torch.zeros(
            (batch_size, *(STAND_IN_LENGTH if size is None else size for size in one.shape)),
            dtype=getattr(torch, one.dtype),
            device=device,
        )
        for name, one in spec.inputs.items()
    }


def input_names(network: nn.Module) -> tuple[str, ...]:
    """The parameters of a network's forward that a batch's entries may fill by name."""
    return tuple(
        name
        for name, parameter in inspect.signature(network.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def network_call(network: nn.Module, inputs: Sequence[str] = INPUT) -> NetworkCall:
    """How a network is called with a batch's entries: with those that its forward names, in its own order.

    Where it names none of them, with the only input that the data declares; all of them where it takes any name.

    inputs: the names that the data declares, DataSpec.inputs.
    """
    parameters = list(inspect.signature(network.forward).parameters.values())
    names = input_names(network)
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = {one.name for one in by_place if one.default is one.empty}
    takes_one = bool(by_place) or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if any(one.kind is one.VAR_KEYWORD for one in parameters) and (len(inputs) > 1 or not takes_one):
        names = tuple(dict.fromkeys((*names, *inputs)))
    # The first parameters go by position, where hooks and graphs look for them.
    leading = [one.name for one in by_place]
    only = inputs[0] if len(inputs) == 1 else "input"

    def call(run: Callable[..., Result], data: Mapping[str, Value]) -> Result:
        given = {name: data[name] for name in names if name in data}
        if given and needed <= given.keys():
            return run(*[given.pop(name) for name in itertools.takewhile(given.__contains__, leading)], **given)
        if only in data:
            given.pop(only, None)
            return run(data[only], **given)
        raise RunError(
            f"the batch has {sorted(data)}, and the network's forward takes {list(names)}; expected a name in common, "
            "or one input alone in data.inputs"
        )

    return call


def example_arguments(network: nn.Module, spec: DataSpec) -> tuple[Tensor, ...]:
    """The stand-ins that the network's forward takes by position, on the meta device."""
    inputs = example_inputs(spec, device="meta")
    found: tuple[Tensor, ...] = network_call(network, tuple(inputs))(lambda *given, **_: given, inputs)
    return found


def materialise(network: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Give every lazy layer its shape by one forward, then initialise and freeze as the containers were told.

    inputs: entries of a batch, by name. They are read only where a layer is lazy.

    The forward runs in evaluation mode and without gradients, so it changes no running statistics. Raises what the
    forward raises, and ConfigError, at the key below `model`, for an initialisation or a freeze that fits nothing.
    """
    lazy = [module for module in network.modules() if isinstance(module, LazyModuleMixin)]
    if lazy or any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        modes = {module: module.training for module in network.modules()}
        network.eval()
        try:
            with torch.no_grad():
                network_call(network, tuple(inputs))(network, inputs)
                # Layers that only a further program uses.
                for name in network.programs if isinstance(network, ProgramModel) else ():
                    view = with_forward(network, name)
                    network_call(view, tuple(inputs))(view, inputs)
        finally:
            for module in network.modules():
                # A lazy layer changes its class in place, so every module is one of those before.
                module.training = modes[module]
    # Innermost first, so that a pattern of the outer model has the last word.
    for path, module in reversed(list(network.named_modules())):
        if isinstance(module, ProgramModel):
            try:
                module.apply_options()
            except ConfigError as error:
                key = config_key(network, path)
                raise ConfigError([replace(error, key=f"{key}.{error.key}") for error in error.errors]) from None
