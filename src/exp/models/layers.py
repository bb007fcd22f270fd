"""What stands below `layers` in a YAML model: what torch lacks, and lists and mappings of layers and parameters."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from exp.errors import config_error
from exp.models.initialisation import Scheme, fill

Shape = Sequence[Annotated[int, Ge(0)]]
# A value of `layers`.
Held = nn.Module | Tensor | Mapping[str, object] | Sequence[object]


class Parameter(nn.Module):
    """A parameter among a model's layers, such as a class token, a scale or learned positions.

    In a container of models/containers.py the parameter itself takes this layer's place: its key in the state dict is
    the layer's name alone, and a program uses the name as a tensor. `repeat` of it makes an nn.ParameterList.

    shape: of the parameter; [] makes a single number.
    initialisation: a scheme of models/initialisation.py.
    trainable: false makes a constant that is saved but does not learn.
    """

    def __init__(self, *, shape: Shape, initialisation: Scheme = "zeros", trainable: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(tuple(shape)), requires_grad=trainable)
        fill(self.value, initialisation)

    def forward(self) -> Tensor:
        """The parameter, of the shape given."""
        return self.value


class Noise(nn.Module):
    """Random numbers for each sample of a batch, such as a generator's input.

    They come from torch's own generator, which is set before each step, so that a resumed run draws the same ones.

    shape: of one sample's numbers. distribution: `normal` has mean 0 and variance 1, `uniform` runs from 0 to 1.
    """

    def __init__(self, *, shape: Shape, distribution: Literal["normal", "uniform"] = "normal") -> None:
        super().__init__()
        self.shape = tuple(shape)
        self.distribution = distribution

    def forward(self, like: Tensor) -> Tensor:
        """Noise `[B, *shape]` for a batch `[B, ...]`, on its device and in its dtype (for integers the default)."""
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        draw = torch.randn if self.distribution == "normal" else torch.rand
        return draw((like.shape[0], *self.shape), dtype=dtype, device=like.device)


def built(layer: object, key: str) -> nn.Module | nn.Parameter:
    """The module or parameter that the network registers for a value of `layers`."""
    if isinstance(layer, Parameter):
        return layer.value
    if isinstance(layer, nn.Module) and type(layer) is not nn.ModuleList:
        return layer
    if isinstance(layer, nn.Parameter):
        return layer
    if isinstance(layer, Mapping):
        parts = {str(name): built(part, f"{key}.{name}") for name, part in layer.items()}
        only_parameters = parts and all(isinstance(part, nn.Parameter) for part in parts.values())
        return nn.ParameterDict(parts) if only_parameters else nn.ModuleDict(_modules_only(parts, key))
    if isinstance(layer, nn.ModuleList | list | tuple):
        parts = {str(index): built(part, f"{key}.{index}") for index, part in enumerate(layer)}
        if parts and all(isinstance(part, nn.Parameter) for part in parts.values()):
            return nn.ParameterList(parts.values())
        modules = nn.ModuleList(_modules_only(parts, key).values())
        # `repeat` gives a ModuleList, a list in the config gives a list: their elements have different config keys.
        modules.__dict__["repeated"] = isinstance(layer, nn.ModuleList)
        return modules
    expected = "a layer, a parameter, or a list or mapping of them"
    raise config_error(key, got=f"a {type(layer).__name__}", expected=expected)


def _modules_only(parts: Mapping[str, nn.Module | nn.Parameter], key: str) -> dict[str, nn.Module]:
    modules = {name: part for name, part in parts.items() if isinstance(part, nn.Module)}
    for name in parts:
        if name not in modules:
            raise config_error(f"{key}.{name}", got="a parameter among layers", expected="all of one kind")
    return modules
