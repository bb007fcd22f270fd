"""Identities that change the gradient: scale it, reverse it, or clip it by norm or by value.

The factor or limit is a number, or a 0-d tensor that may change between steps.
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
    """The context of a Function, with the values for its backward."""

    number: float | None
    total: Total | None
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def keep_number(ctx: Context, number: float | Tensor) -> None:
    """Keep the number for the backward. A tensor is saved, so that changing it before the backward is an error."""
    if isinstance(number, Tensor):
        ctx.save_for_backward(number)
        ctx.number = None
    else:
        ctx.number = number


def kept_number(ctx: Context, gradient: Tensor) -> float | Tensor:
    """Return the kept number, on the device of the gradient: layers may be on several devices."""
    return ctx.saved_tensors[0].to(gradient.device) if ctx.number is None else ctx.number


class CopyWithNumber(torch.autograd.Function):
    """Base of Functions that return a copy of x and use a number in the backward.

    It is a copy because a later operation may work in place, which autograd refuses on a view made by a Function.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, number: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        keep_number(ctx, inputs[1])


class ScaleGradient(CopyWithNumber):
    """Function that returns a copy of x, and factor times the gradient in the backward.

    It supports double backward, torch.func and torch.compile.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return kept_number(ctx, gradient) * gradient, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return x, `[...]`, with a gradient that is multiplied by factor.

    Args:
        x: The tensor.
        factor: A number or a 0-d tensor, which a compiled network reads at every call. It must not change between a
            forward and its backward.
    """
    return apply_function(ScaleGradient, x, factor)


class GradientReversal(CopyWithNumber):
    """Function that returns a copy of x, and -weight times the gradient in the backward.

    Ganin and Lempitsky 2015, "Unsupervised Domain Adaptation by Backpropagation", arXiv:1409.7495, equations 15 and 16.
    It supports double backward, torch.func and torch.compile.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return -kept_number(ctx, gradient) * gradient, None


def gradient_reversal(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """Return x, `[...]`, with a gradient that is multiplied by -weight.

    Args:
        x: The tensor.
        weight: A number or a 0-d tensor, see `scale_gradient`. Default 1.
    """
    return apply_function(GradientReversal, x, weight)


def progressive_weight(progress: float) -> float:
    """Return a weight that grows during training from 0 to almost 1: 2 / (1 + exp(-10 * progress)) - 1.

    Ganin and Lempitsky 2015, section 4, lambda_p. progress: p, from 0 to 1.
    """
    # tanh(x / 2) is the same number and never overflows.
    return math.tanh(5 * progress)


def clip_by_value(gradient: Tensor, limit: float | Tensor) -> Tensor:
    """Return the gradient, `[...]`, with each finite number clipped between -limit and limit.

    Other numbers stay, so that the loss scale sees an overflow.
    """
    if isinstance(limit, Tensor):
        limit = limit.to(gradient.dtype)
    clipped = gradient.clamp(-limit, limit)  # type: ignore[arg-type]  # both tensors, or both numbers
    return torch.where(gradient.isfinite(), clipped, gradient)


def norm_factor(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return the factor, 0-d, by which a gradient of this 2-norm gets a norm of at most limit."""
    return (limit / norm).clamp(max=1.0)


class ClipGradientByNorm(torch.autograd.Function):
    """Function that returns a copy of x, and the gradient times min(1, limit / its 2-norm) in the backward.

    The norm is computed in float32 or float64. It supports double backward, torch.func and, if `total` is None,
    torch.compile. It returns a copy for the reason given in CopyWithNumber.
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
    """Function that returns a copy of x, and the gradient clipped by value in the backward."""

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return clip_by_value(gradient, kept_number(ctx, gradient)), None


def clip_gradient_by_norm(x: Tensor, limit: float | Tensor, *, total: Total | None = None) -> Tensor:
    """Return x, `[...]`, with a gradient whose 2-norm over all of x is at most limit.

    Args:
        x: The tensor.
        limit: A number or a 0-d tensor, above 0.
        total: Returns the sum over all processes that share the batch, given the square of this process's norm, 0-d.
            None: a single process.
    """
    return apply_function(ClipGradientByNorm, x, limit, total)


def clip_gradient_by_value(x: Tensor, limit: float | Tensor) -> Tensor:
    """Return x, `[...]`, with a gradient that is clipped between -limit and limit.

    Args:
        x: The tensor.
        limit: A number or a 0-d tensor, above 0.
    """
    return apply_function(ClipGradientByValue, x, limit)


def apply_function(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Return the output of a Function with one output, which is untyped in torch."""
    result: Tensor = function.apply(*arguments)
    return result
