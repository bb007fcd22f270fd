"""The layers that YAML models need and torch does not have: a parameter on its own, a gradient reversed, noise."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import torch
from torch import Tensor, nn

from exp.functions.gradient_reversal import gradient_reversal
from exp.models.initialisation import Scheme, fill


class Parameter(nn.Module):
    """A parameter among a model's layers, such as a class token, a scale or learned positions.

    In a container of models/containers.py the parameter itself takes this layer's place: its key in the state dict is
    the layer's name alone, and a program uses the name as a tensor. `repeat` of it makes an nn.ParameterList.

    shape: of the parameter; [] makes a single number.
    initialisation: a scheme of models/initialisation.py.
    trainable: false makes a constant that is saved but does not learn.
    """

    def __init__(self, *, shape: Sequence[int], initialisation: Scheme = "zeros", trainable: bool = True) -> None:
        super().__init__()
        self.value = nn.Parameter(torch.empty(tuple(shape)), requires_grad=trainable)
        fill(self.value, initialisation)

    def forward(self) -> Tensor:
        """The parameter, of the shape given."""
        return self.value


class GradientReversal(nn.Module):
    """functions/gradient_reversal.py as a layer: what stands before it unlearns what stands behind it.

    weight: the factor on the reversed gradient, lambda in Ganin and Lempitsky 2015, arXiv:1409.7495; 0 or more.
    """

    def __init__(self, *, weight: float = 1.0) -> None:
        super().__init__()
        if weight < 0:
            raise ValueError(f"weight is {weight}; it must be 0 or more, for the reversal is the layer's own")
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """x itself, `[...]`."""
        return gradient_reversal(x, self.weight)


class Noise(nn.Module):
    """Random numbers for each sample of a batch, such as a generator's input.

    They come from torch's own generator, which is set before each step, so that a resumed run draws the same ones.

    shape: of one sample's numbers. distribution: `normal` has mean 0 and variance 1, `uniform` runs from 0 to 1.
    """

    def __init__(self, *, shape: Sequence[int], distribution: Literal["normal", "uniform"] = "normal") -> None:
        super().__init__()
        if distribution not in ("normal", "uniform"):
            raise ValueError(f"distribution is {distribution!r}; it must be normal or uniform")
        self.shape = tuple(shape)
        self.distribution = distribution

    def forward(self, like: Tensor) -> Tensor:
        """Noise `[B, *shape]` for a batch `[B, ...]`, on its device and in its dtype (for integers the default)."""
        dtype = like.dtype if like.is_floating_point() else torch.get_default_dtype()
        draw = torch.randn if self.distribution == "normal" else torch.rand
        return draw((like.shape[0], *self.shape), dtype=dtype, device=like.device)
