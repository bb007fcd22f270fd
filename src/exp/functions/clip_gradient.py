"""The identity whose gradient goes back clipped: by the norm of the whole, or by the size of each number."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32
from exp.functions.number import CopyWithNumber, keep_number, kept_number

Total = Callable[[Tensor], Tensor]


def clipped_by_value(gradient: Tensor, limit: float | Tensor) -> Tensor:
    """Each number between -limit and limit, `[...]`.

    What is not finite stays so: clipped, an overflow would pass for a gradient, and no loss scale would see it.
    """
    if isinstance(limit, Tensor):
        limit = limit.to(gradient.dtype)
    return torch.where(gradient.isfinite(), gradient.clamp(-limit, limit), gradient)


def norm_factor(norm: Tensor, limit: float | Tensor) -> Tensor:
    """By what a gradient of this 2-norm, 0-d, is multiplied so that its norm is at most limit."""
    return (limit / norm).clamp(max=1.0)


class ClipGradientByNorm(torch.autograd.Function):
    """Forward a copy of x, backward the gradient times min(1, limit / its 2-norm); the norm in float32 at least.

    A copy, because what stands behind it may work in place, which autograd refuses on a view that a Function made. It
    can be differentiated again, torch.func may transform it, and torch.compile traces it where `total` is None.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, limit: float | Tensor, total: Total | None) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Any, inputs: tuple[Tensor, float | Tensor, Total | None], output: Tensor) -> None:
        keep_number(ctx, inputs[1])
        ctx.total = inputs[2]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        norm = torch.linalg.vector_norm(gradient, dtype=at_least_float32(gradient.dtype))
        if ctx.total is not None:
            norm = ctx.total(norm.square()).sqrt()
        return norm_factor(norm, kept_number(ctx, gradient)) * gradient, None, None


class ClipGradientByValue(CopyWithNumber):
    """Forward a copy of x, backward the gradient with each number clipped between -limit and limit."""

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return clipped_by_value(gradient, kept_number(ctx, gradient)), None


def clip_gradient_by_norm(x: Tensor, limit: float | Tensor, *, total: Total | None = None) -> Tensor:
    """x, `[...]`, with a gradient whose 2-norm, over all of x, is at most limit on its way back.

    limit: above 0; a number, or one in a tensor, 0-d. total: makes of the square of this process's norm, 0-d, the sum
        over all processes that hold a share of the batch; None where there are no others.
    """
    return ClipGradientByNorm.apply(x, limit, total)


def clip_gradient_by_value(x: Tensor, limit: float | Tensor) -> Tensor:
    """x, `[...]`, with a gradient each number of which is between -limit and limit on its way back.

    limit: above 0; a number, or one in a tensor, 0-d.
    """
    return ClipGradientByValue.apply(x, limit)
