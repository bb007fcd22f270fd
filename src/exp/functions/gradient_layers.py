"""Layers for YAML models. The backward of these layers is not the derivative of their forward."""

from __future__ import annotations

from typing import Annotated

from annotated_types import Ge
from torch import Tensor, nn

from exp.functions.identities import gradient_reversal


class GradientReversal(nn.Module):
    """Layer that reverses the gradient, so that the layers before it maximize the loss of the layers after it.

    Args:
        weight: Factor of the reversed gradient, 0 or more: the gradient is multiplied by -weight. Default 1. The weight
            is lambda in Ganin and Lempitsky 2015, arXiv:1409.7495.
    """

    def __init__(self, *, weight: Annotated[float, Ge(0)] = 1.0) -> None:
        super().__init__()
        self.weight = weight

    def forward(self, x: Tensor) -> Tensor:
        """Return a copy of x, `[...]`."""
        return gradient_reversal(x, self.weight)
