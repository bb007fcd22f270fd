"""Sizes that a config leaves out: layers built lazily, and given their shapes by one forward of a stand-in batch."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from exp.errors import ConfigError
from exp.models.containers import ProgramModel, config_key, with_forward
from exp.types import DataSpec

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
    nn.InstanceNorm1d: (nn.LazyInstanceNorm1d, "num_features"),
    nn.InstanceNorm2d: (nn.LazyInstanceNorm2d, "num_features"),
    nn.InstanceNorm3d: (nn.LazyInstanceNorm3d, "num_features"),
}


def lazy_class(cls: type, given: set[str]) -> type[nn.Module] | None:
    """The class that infers the size which `given`, the parameters that are given, leaves out; None where none does."""
    lazy, inferred = LAZY_CLASSES.get(cls, (None, ""))
    return None if inferred in given else lazy


def example_inputs(spec: DataSpec, *, batch_size: int = 2, device: torch.device | str = "cpu") -> tuple[Tensor, ...]:
    """A stand-in for the network's inputs: zeros `[batch_size, *input_shape]` of the declared dtype.

    Zeros are valid class and character numbers, too. The batch is of 2, for batch norm refuses one sample in training.
    """
    shape = (batch_size, *spec.input_shape)
    return (torch.zeros(shape, dtype=getattr(torch, spec.input_dtype), device=device),)


def materialise(network: nn.Module, inputs: Any) -> None:
    """Give every lazy layer its shape by one forward, then initialise and freeze as the containers were told.

    inputs: the arguments of `network`, or its only one. They are read only where a layer is lazy.

    The forward runs in evaluation mode and without gradients, so it changes no running statistics. Raises what the
    forward raises, and ConfigError, at the key below `model`, for an initialisation or a freeze that fits nothing.
    """
    if any(map(is_lazy, (*network.parameters(), *network.buffers()))):
        modes = {module: module.training for module in network.modules()}
        network.eval()
        try:
            with torch.no_grad():
                arguments = inputs if isinstance(inputs, tuple) else (inputs,)
                network(*arguments)
                # Layers that only a further program uses.
                for name in network.programs if isinstance(network, ProgramModel) else ():
                    with_forward(network, name)(*arguments)
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
                raise ConfigError([replace(fault, key=f"{key}.{fault.key}") for fault in error.faults]) from None
