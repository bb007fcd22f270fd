"""The identity whose gradient goes back multiplied by a factor: what is below learns faster, slower or not at all."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from exp.functions.number import keep_number, kept_number


class ScaleGradient(torch.autograd.Function):
    """Forward a copy of x, backward factor times the gradient.

    A copy, because what stands behind it may work in place, which autograd refuses on a view that a Function made. It
    can be differentiated again, torch.func may transform it, and torch.compile traces it.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, factor: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        keep_number(ctx, inputs[1])

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return kept_number(ctx, gradient) * gradient, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """x, `[...]`, with a gradient that is multiplied by factor on its way back.

    factor: a number, or one in a tensor, 0-d, which a compiled network reads anew at every call. It may not change
        between a forward and its backward.
    """
    return ScaleGradient.apply(x, factor)
