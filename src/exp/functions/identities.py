"""Identities whose gradient goes back changed: scaled, reversed, or clipped by its norm or number by number.

The number that a gradient is changed by is plain, or a 0-d tensor that may change between steps.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32

Total = Callable[[Tensor], Tensor]


class Context(Protocol):
    """What a Function of these keeps for its backward: torch's context, and what it may hold."""

    number: float | None
    total: Total | None
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def keep_number(ctx: Context, number: float | Tensor) -> None:
    """In `setup_context`. A tensor goes the way of saved tensors: one that changes before the backward is an error."""
    if isinstance(number, Tensor):
        ctx.save_for_backward(number)
        ctx.number = None
    else:
        ctx.number = number


def kept_number(ctx: Context, gradient: Tensor) -> float | Tensor:
    """In `backward`: the number, where the gradient is. Layers may lie on several devices, and it on one."""
    return ctx.saved_tensors[0].to(gradient.device) if ctx.number is None else ctx.number


class CopyWithNumber(torch.autograd.Function):
    """Forward a copy of x, with a number for the backward that a subclass gives.

    A copy, because what stands behind it may work in place, which autograd refuses on a view that a Function made.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, number: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        keep_number(ctx, inputs[1])


class ScaleGradient(CopyWithNumber):
    """Forward a copy of x, backward factor times the gradient.

    It can be differentiated again, torch.func may transform it, and torch.compile traces it.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return kept_number(ctx, gradient) * gradient, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """x, `[...]`, with a gradient that is multiplied by factor on its way back.

    factor: a number, or one in a tensor, 0-d, which a compiled network reads anew at every call. It may not change
        between a forward and its backward.
    """
    return applied(ScaleGradient, x, factor)


class GradientReversal(CopyWithNumber):
    """Forward a copy of x, backward -weight times the gradient.

    Ganin and Lempitsky 2015, "Unsupervised Domain Adaptation by Backpropagation", arXiv:1409.7495, equations 15 and 16.
    It can be differentiated again, torch.func may transform it, and torch.compile traces it.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return -kept_number(ctx, gradient) * gradient, None


def gradient_reversal(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """x, `[...]`, with a gradient that is reversed and multiplied by weight on its way back.

    weight: a number, or one in a tensor, 0-d, which a compiled network reads anew at every call. It may not change
        between a forward and its backward.
    """
    return applied(GradientReversal, x, weight)


def progressive_weight(progress: float) -> float:
    """The weight that grows with training from 0 to almost 1: 2 / (1 + exp(-10 * progress)) - 1.

    Ganin and Lempitsky 2015, section 4, lambda_p. progress: p, from 0 to 1.
    """
    # tanh(x / 2) is the same number, and overflows nowhere.
    return math.tanh(5 * progress)


def clipped_by_value(gradient: Tensor, limit: float | Tensor) -> Tensor:
    """Each number between -limit and limit, `[...]`.

    What is not finite stays so: clipped, an overflow would pass for a gradient, and no loss scale would see it.
    """
    if isinstance(limit, Tensor):
        limit = limit.to(gradient.dtype)
        clipped = gradient.clamp(-limit, limit)
    else:
        clipped = gradient.clamp(-limit, limit)
    return torch.where(gradient.isfinite(), clipped, gradient)


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
    def setup_context(ctx: Context, inputs: tuple[Tensor, float | Tensor, Total | None], output: Tensor) -> None:
        keep_number(ctx, inputs[1])
        ctx.total = inputs[2]

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        norm = torch.linalg.vector_norm(gradient, dtype=at_least_float32(gradient.dtype))
        if ctx.total is not None:
            norm = ctx.total(norm.square()).sqrt()
        return norm_factor(norm, kept_number(ctx, gradient)) * gradient, None, None


class ClipGradientByValue(CopyWithNumber):
    """Forward a copy of x, backward the gradient with each number clipped between -limit and limit."""

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return clipped_by_value(gradient, kept_number(ctx, gradient)), None


def clip_gradient_by_norm(x: Tensor, limit: float | Tensor, *, total: Total | None = None) -> Tensor:
    """x, `[...]`, with a gradient whose 2-norm, over all of x, is at most limit on its way back.

    limit: above 0; a number, or one in a tensor, 0-d. total: makes of the square of this process's norm, 0-d, the sum
        over all processes that hold a share of the batch; None where there are no others.
    """
    return applied(ClipGradientByNorm, x, limit, total)


def clip_gradient_by_value(x: Tensor, limit: float | Tensor) -> Tensor:
    """x, `[...]`, with a gradient each number of which is between -limit and limit on its way back.

    limit: above 0; a number, or one in a tensor, 0-d.
    """
    return applied(ClipGradientByValue, x, limit)


def applied(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """What a Function of one output gives; torch says nothing of its type."""
    result: Tensor = function.apply(*arguments)
    return result
