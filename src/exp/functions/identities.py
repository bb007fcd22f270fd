"""Functions that return a copy of their input and change the gradient in the backward: scale, reverse or clip it.

The factor or limit of a function is a number, or a 0-d tensor that may change between steps.
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
    """The context of an autograd Function, which stores values for the backward."""

    number: float | None
    total: Total | None
    saved_tensors: tuple[Tensor, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


def keep_number(ctx: Context, number: float | Tensor) -> None:
    """Store a number in the context for the backward.

    A tensor is stored by save_for_backward. If the tensor is changed before the backward, autograd then raises an
    error.
    """
    if isinstance(number, Tensor):
        ctx.save_for_backward(number)
        ctx.number = None
    else:
        ctx.number = number


def kept_number(ctx: Context, gradient: Tensor) -> float | Tensor:
    """Return the number that `keep_number` stored.

    A tensor is moved to the device of the gradient, because layers may be on several devices.
    """
    return ctx.saved_tensors[0].to(gradient.device) if ctx.number is None else ctx.number


class CopyWithNumber(torch.autograd.Function):
    """Base class of autograd Functions that return a copy of x and use a number in the backward.

    x is copied because a later operation may change the result in place. Autograd does not allow in-place changes of a
    view that a Function returns.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, number: float | Tensor) -> Tensor:
        return x.clone()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, float | Tensor], output: Tensor) -> None:
        keep_number(ctx, inputs[1])


class ScaleGradient(CopyWithNumber):
    """Function that returns a copy of x, and multiplies the gradient by a factor in the backward.

    The Function supports double backward, torch.func and torch.compile.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return kept_number(ctx, gradient) * gradient, None


def scale_gradient(x: Tensor, factor: float | Tensor) -> Tensor:
    """Return a copy of x, `[...]`, with a gradient that is multiplied by `factor`.

    Args:
        x: The tensor.
        factor: A number or a 0-d tensor. A compiled network reads the tensor's value in every call. The tensor must not
            change between a forward pass and its backward pass.
    """
    return apply_function(ScaleGradient, x, factor)


class GradientReversal(CopyWithNumber):
    """Function that returns a copy of x, and multiplies the gradient by -weight in the backward.

    The Function supports double backward, torch.func and torch.compile. Reference: Ganin and Lempitsky 2015,
    "Unsupervised Domain Adaptation by Backpropagation", arXiv:1409.7495, equations 15 and 16.
    """

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return -kept_number(ctx, gradient) * gradient, None


def gradient_reversal(x: Tensor, weight: float | Tensor = 1.0) -> Tensor:
    """Return a copy of x, `[...]`, with a gradient that is multiplied by -weight.

    Args:
        x: The tensor.
        weight: A number or a 0-d tensor; see `scale_gradient`. Default 1.
    """
    return apply_function(GradientReversal, x, weight)


def progressive_weight(progress: float) -> float:
    """Return a weight that grows during training from 0 to almost 1: 2 / (1 + exp(-10 * progress)) - 1.

    The weight is lambda_p of Ganin and Lempitsky 2015, section 4.

    Args:
        progress: Completed fraction of the training, from 0 to 1. It is p in the paper.
    """
    # tanh(5 p) equals this formula, and never overflows.
    return math.tanh(5 * progress)


def clip_by_value(gradient: Tensor, limit: float | Tensor) -> Tensor:
    """Return the gradient, `[...]`, with each finite number clipped to the range from -limit to limit.

    Infinite numbers and nan are not changed, so that the gradient scaler detects an overflow.

    Args:
        gradient: The gradient.
        limit: A number or a 0-d tensor, above 0.
    """
    if isinstance(limit, Tensor):
        limit = limit.to(gradient.dtype)
    clipped = gradient.clamp(-limit, limit)  # type: ignore[arg-type]  # both tensors, or both numbers
    return torch.where(gradient.isfinite(), clipped, gradient)


def norm_factor(norm: Tensor, limit: float | Tensor) -> Tensor:
    """Return the factor that reduces the 2-norm of a gradient to at most `limit`: min(1, limit / norm), 0-d.

    Args:
        norm: The 2-norm of the gradient, 0-d.
        limit: A number or a 0-d tensor, above 0.
    """
    return (limit / norm).clamp(max=1.0)


class ClipGradientByNorm(torch.autograd.Function):
    """Function that returns a copy of x, and reduces the 2-norm of the gradient to at most `limit` in the backward.

    The gradient is multiplied by min(1, limit / norm). The norm is computed in float32 or float64. The Function
    supports double backward and torch.func. If `total` is None, it also supports torch.compile. CopyWithNumber states
    why x is copied.
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
    """Function that returns a copy of x, and clips the gradient by value in the backward."""

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return clip_by_value(gradient, kept_number(ctx, gradient)), None


def clip_gradient_by_norm(x: Tensor, limit: float | Tensor, *, total: Total | None = None) -> Tensor:
    """Return a copy of x, `[...]`. The 2-norm of the gradient of x is reduced to at most `limit` in the backward.

    Args:
        x: The tensor.
        limit: A number or a 0-d tensor, above 0.
        total: Function that sums a 0-d tensor over all processes that share the batch. Its argument is the squared norm
            on this process. Default: None, for a single process.
    """
    return apply_function(ClipGradientByNorm, x, limit, total)


def clip_gradient_by_value(x: Tensor, limit: float | Tensor) -> Tensor:
    """Return a copy of x, `[...]`, with a gradient that is clipped to the range from -limit to limit.

    Args:
        x: The tensor.
        limit: A number or a 0-d tensor, above 0.
    """
    return apply_function(ClipGradientByValue, x, limit)


def apply_function(function: type[torch.autograd.Function], *arguments: object) -> Tensor:
    """Return the output of an autograd Function as a Tensor.

    This function exists because torch's `apply` does not declare the type of its result.
    """
    result: Tensor = function.apply(*arguments)
    return result
