"""The identity whose gradient goes back reversed: what is below learns the opposite of what is above."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor


class GradientReversal(torch.autograd.Function):
    """Forward x, backward -weight times the gradient.

    Ganin and Lempitsky 2015, "Unsupervised Domain Adaptation by Backpropagation", arXiv:1409.7495, equations 15 and 16.
    It can be differentiated again, and torch.func may transform it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: float) -> Tensor:
        return x.view_as(x)

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float], output: Tensor) -> None:
        _, ctx.weight = inputs

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return -ctx.weight * gradient, None


def gradient_reversal(x: Tensor, weight: float = 1.0) -> Tensor:
    """x itself, `[...]`, with a gradient that is reversed and multiplied by weight on its way back."""
    return GradientReversal.apply(x, weight)
