"""Inference of layer sizes that the config omits. Lazy layers get their shapes in a forward pass of a placeholder
batch."""

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

# Layer class: its lazy class, and the parameter that the config may omit. torch has no lazy recurrent layers.
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


# The length of each axis of variable length in a placeholder batch.
STAND_IN_LENGTH = 16

Result = TypeVar("Result")
Value = TypeVar("Value")


class NetworkCall(Protocol):
    def __call__(self, run: Callable[..., Result], data: Mapping[str, Value]) -> Result:
        """Return the output of a network for the values of a batch.

        Args:
            run: The network, or a function with the same parameters.
            data: The values of the batch by name.
        """


def lazy_class(cls: type, given: set[str], *, positional: int = 0) -> type[nn.Module] | None:
    """Return the lazy class of a layer. Return None if the size is given, or if the layer has no lazy class.

    Args:
        cls: The layer's class.
        given: The names of the given parameters.
        positional: The number of positional arguments. The first argument is the size that a lazy class infers.
            Default: 0.
    """
    lazy, inferred = LAZY_CLASSES.get(cls, (None, ""))
    return None if inferred in given or positional else lazy


def example_inputs(spec: DataSpec, *, batch_size: int = 2, device: torch.device | str = "cpu") -> dict[str, Tensor]:
    """Return placeholders for the network's inputs by name: zeros `[batch_size, *shape]` of the declared dtypes.

    Zeros are also valid class numbers and character numbers. An axis of variable length has the length STAND_IN_LENGTH.

    Args:
        spec: Declaration of the inputs.
        batch_size: Number of samples. Default: 2, because batch norm rejects a single sample in training.
        device: Device of the tensors. Default: cpu.
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
    """Return the names of the parameters of a network's forward that accept an argument by name."""
    return tuple(
        name
        for name, parameter in inspect.signature(network.forward).parameters.items()
        if parameter.kind in (parameter.POSITIONAL_OR_KEYWORD, parameter.KEYWORD_ONLY)
    )


def network_call(network: nn.Module, inputs: Sequence[str] = INPUT) -> NetworkCall:
    """Return a function that calls a network with the values of a batch.

    The network receives the values that have the names of its forward's parameters. If no name matches, the network
    receives the only input that the data declares. If its forward has **kwargs, the network receives all declared
    inputs.

    Args:
        network: The network.
        inputs: The names of the declared inputs, as in DataSpec.inputs.
    """
    parameters = list(inspect.signature(network.forward).parameters.values())
    names = input_names(network)
    by_place = [one for one in parameters if one.kind in (one.POSITIONAL_ONLY, one.POSITIONAL_OR_KEYWORD)]
    needed = {one.name for one in by_place if one.default is one.empty}
    takes_one = bool(by_place) or any(one.kind is one.VAR_POSITIONAL for one in parameters)
    if any(one.kind is one.VAR_KEYWORD for one in parameters) and (len(inputs) > 1 or not takes_one):
        names = tuple(dict.fromkeys((*names, *inputs)))
    # The first parameters are passed by position, because hooks and graphs only receive positional arguments.
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
            f"the batch has inputs {sorted(data)}, and forward has parameters {list(names)}; expected a common name, "
            "or a single input in data.inputs"
        )

    return call


def example_arguments(network: nn.Module, spec: DataSpec) -> tuple[Tensor, ...]:
    """Return placeholders on the meta device for the positional arguments of the network's forward."""
    inputs = example_inputs(spec, device="meta")
    found: tuple[Tensor, ...] = network_call(network, tuple(inputs))(lambda *given, **_: given, inputs)
    return found


def materialise(network: nn.Module, inputs: Mapping[str, Tensor]) -> None:
    """Infer the shapes of all lazy layers in one forward pass, then initialize and freeze the parameters.

    The containers of the network declare how parameters are initialized and frozen.

    The forward pass runs in evaluation mode without gradients, so that it changes no running statistics. Its exceptions
    are raised unchanged.

    Args:
        network: The network.
        inputs: The values of a batch by name. They are used only if a layer is lazy.

    Raises:
        ConfigError: A pattern of `initialisation` or `freeze` matches no parameter. The keys of the errors begin with
            `model`.
    """
    lazy = [module for module in network.modules() if isinstance(module, LazyModuleMixin)]
    if lazy or any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        modes = {module: module.training for module in network.modules()}
        network.eval()
        try:
            with torch.no_grad():
                network_call(network, tuple(inputs))(network, inputs)
                # Some layers may be used only by an additional program.
                for name in network.programs if isinstance(network, ProgramModel) else ():
                    view = with_forward(network, name)
                    network_call(view, tuple(inputs))(view, inputs)
        finally:
            for module in network.modules():
                # `modes` contains every module, because a lazy layer changes its class in place.
                module.training = modes[module]
    # Inner models come first, so that the patterns of an outer model take precedence.
    for path, module in reversed(list(network.named_modules())):
        if isinstance(module, ProgramModel):
            try:
                module.apply_options()
            except ConfigError as error:
                key = config_key(network, path)
                raise ConfigError([replace(one, key=f"{key}.{one.key}") for one in error.errors]) from None
