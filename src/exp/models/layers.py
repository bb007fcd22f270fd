"""Layers for YAML models that torch lacks, and conversion of lists and mappings to layers."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor, nn

from exp.errors import config_error
from exp.models.initialisation import Scheme, fill

Shape = Sequence[Annotated[int, Ge(0)]]
# The type of a value in `layers`.
Held = nn.Module | Tensor | Mapping[str, object] | Sequence[object]


class Parameter(nn.Module):
    """A parameter in a model's `layers`, such as a class token, a scale or learned positions.

    A container of models/containers.py registers the tensor instead of this layer. The tensor's key in the state dict
    is its name in `layers`. A forward program uses this name as a tensor. A `repeat` of this layer becomes an
    nn.ParameterList.

    Args:
        shape: The shape; [] for a single number.
        initialisation: A scheme; see models/initialisation.py. Default: zeros.
        trainable: Whether the parameter is trained. If false, it is a constant in the state dict. Default: true.
    """

    def __init__(self, *, shape: Shape, initialisation: Scheme = "zeros", trainable: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(tuple(shape)), requires_grad=trainable)
        fill(self.value, initialisation)

    def forward(self) -> Tensor:
        """Return the parameter."""
        return self.value


class Noise(nn.Module):
    """Normally distributed random numbers for each sample of a batch, such as the input of a generator.

    torch's random number generator draws the numbers. exp seeds torch's generator before each step, so that a resumed
    run draws the same numbers.

    Args:
        shape: The shape of the numbers for one sample.
    """

    def __init__(self, *, shape: Shape) -> None:
        super().__init__()
        self.shape = tuple(shape)

    def forward(self, like: Tensor) -> Tensor:
        """Return random numbers `[B, *shape]` for a batch `[B, ...]`.

        The numbers have the dtype of the batch. If the batch has integers, they have torch's default dtype.
        """
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        return torch.randn((like.shape[0], *self.shape), dtype=dtype, device=like.device)


def build_layer(layer: object, key: str) -> nn.Module | nn.Parameter:
    """Convert a value in `layers` to a module or parameter, which the container registers.

    Args:
        layer: A module, a parameter, or a list or mapping of these.
        key: The config key of the value, for error messages.
    """
    if isinstance(layer, Parameter):
        return layer.value
    if isinstance(layer, nn.Module) and type(layer) is not nn.ModuleList:
        return layer
    if isinstance(layer, nn.Parameter):
        return layer
    if isinstance(layer, Mapping):
        parts = {str(name): build_layer(part, f"{key}.{name}") for name, part in layer.items()}
        only_parameters = parts and all(isinstance(part, nn.Parameter) for part in parts.values())
        return nn.ParameterDict(parts) if only_parameters else nn.ModuleDict(_modules_only(parts, key))
    if isinstance(layer, nn.ModuleList | list | tuple):
        parts = {str(index): build_layer(part, f"{key}.{index}") for index, part in enumerate(layer)}
        if parts and all(isinstance(part, nn.Parameter) for part in parts.values()):
            return nn.ParameterList(parts.values())
        modules = nn.ModuleList(_modules_only(parts, key).values())
        # config_key reads this flag, because elements of a `repeat` and of a list have different config keys.
        modules.__dict__["repeated"] = isinstance(layer, nn.ModuleList)
        return modules
    expected = "a layer, a parameter, or a list or mapping of them"
    raise config_error(key, got=f"a {type(layer).__name__}", expected=expected)


def _modules_only(parts: Mapping[str, nn.Module | nn.Parameter], key: str) -> dict[str, nn.Module]:
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for name in parts:
        if name not in modules:
            raise config_error(f"{key}.{name}", got="a parameter among layers", expected="layers only")
    return modules
