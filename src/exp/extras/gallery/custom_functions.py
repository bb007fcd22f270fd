"""Custom autograd Functions with a backward: Exp, Cube, MulConstant, Linear and StraightThrough.

They support double backward, torch.func (with generated vmap rules) and torch.compile. A forward program calls them by
a name in `functions`; models use the layers below. They follow the examples of
https://docs.pytorch.org/docs/stable/notes/extending.html: `setup_context` saves tensors of `forward`, and `backward`
consists of differentiable operators.
"""

from __future__ import annotations

import math
from typing import Annotated, Literal, Protocol

import torch
from annotated_types import Gt
from torch import Tensor, nn

from exp.functions.identities import apply_function
from exp.models.inference import LAZY_CLASSES

Step = Literal["round", "sign", "floor", "ceil"]


class Context(Protocol):
    """The context of these Functions, with the values that they save for the backward."""

    constant: float
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Exp(torch.autograd.Function):
    """Exponential of `[...]`. It saves its result, which is also its derivative."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x.exp()

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(output)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        (result,) = ctx.saved_tensors
        return gradient * result


class Cube(torch.autograd.Function):
    """Third power of `[...]`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor) -> Tensor:
        return x * x * x

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor], output: Tensor) -> None:
        ctx.save_for_backward(*inputs)

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> Tensor:
        (x,) = ctx.saved_tensors
        return gradient * (3 * x * x)


class MulConstant(torch.autograd.Function):
    """Product of `[...]` and a constant without a gradient."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, constant: float) -> Tensor:
        return x * constant

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, float], output: Tensor) -> None:
        ctx.constant = inputs[1]

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient * ctx.constant, None


class Linear(torch.autograd.Function):
    """x `[..., in]` times the transpose of weight `[out, in]`, plus bias `[out]` or None: `[..., out]`."""

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
        return torch.nn.functional.linear(x, weight, bias)

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Tensor, Tensor | None], output: Tensor) -> None:
        ctx.save_for_backward(*inputs[:2])

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor | None, Tensor | None, Tensor | None]:
        x, weight = ctx.saved_tensors
        of_x, of_weight, of_bias = ctx.needs_input_grad
        rows, inputs = (part.flatten(end_dim=-2) if part.dim() > 1 else part[None] for part in (gradient, x))
        return (
            gradient @ weight if of_x else None,
            rows.T @ inputs if of_weight else None,
            rows.sum(0) if of_bias else None,
        )


class StraightThrough(torch.autograd.Function):
    """Step function of `[...]` with the identity as backward, because its derivative is 0 almost everywhere.

    Bengio, Leonard and Courville 2013, "Estimating or Propagating Gradients Through Stochastic Neurons",
    arXiv:1308.3432. With a limit, the gradient is 0 outside [-limit, limit], as in Hubara et al. 2016, "Binarized
    Neural Networks", arXiv:1602.02830, equation 4, for a limit of 1.
    """

    generate_vmap_rule = True

    @staticmethod
    def forward(x: Tensor, step: Step, limit: float) -> Tensor:
        stepped: Tensor = getattr(torch, step)(x)
        return stepped

    @staticmethod
    def setup_context(ctx: Context, inputs: tuple[Tensor, Step, float], output: Tensor) -> None:
        ctx.constant = inputs[2]
        ctx.save_for_backward(inputs[0])

    @staticmethod
    def backward(ctx: Context, gradient: Tensor) -> tuple[Tensor, None, None]:
        (x,) = ctx.saved_tensors
        return torch.where(x.abs() <= ctx.constant, gradient, 0), None, None


def exp(x: Tensor) -> Tensor:
    """Return the exponential of `[...]`."""
    return apply_function(Exp, x)


def cube(x: Tensor) -> Tensor:
    """Return the third power of `[...]`."""
    return apply_function(Cube, x)


def mul_constant(x: Tensor, constant: float) -> Tensor:
    """Return the product of `[...]` and a constant."""
    return apply_function(MulConstant, x, constant)


def straight_through(x: Tensor, step: Step = "round", limit: float = math.inf) -> Tensor:
    """Return a step function of `[...]`. The gradient passes unchanged within the limit."""
    return apply_function(StraightThrough, x, step, limit)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return `[..., out]` for x `[..., in]`, weight `[out, in]` and bias `[out]`.

    Under autocast, forward and backward use the dtype of autocast, as in torch.nn.functional.linear.
    """
    kind = x.device.type
    # The meta device has no autocast.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return apply_function(Linear, x, weight, bias)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return apply_function(Linear, x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class ExpLayer(nn.Module):
    """Exponential layer."""

    def forward(self, x: Tensor) -> Tensor:
        return exp(x)


class CubeLayer(nn.Module):
    """Third power layer."""

    def forward(self, x: Tensor) -> Tensor:
        return cube(x)


class MulConstantLayer(nn.Module):
    """Product with a constant that is not trained."""

    def __init__(self, *, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return mul_constant(x, self.constant)


class LinearLayer(nn.Linear):
    """torch.nn.Linear with the custom backward: the same parameters, and a bitwise equal forward."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class LazyLinearLayer(nn.LazyLinear):
    """Lazy LinearLayer, whose in_features are inferred from its first input."""

    cls_to_become = LinearLayer

    forward = LinearLayer.forward


LAZY_CLASSES[LinearLayer] = (LazyLinearLayer, "in_features")


class StraightThroughLayer(nn.Module):
    """Step function in the forward, identity in the backward.

    Args:
        step: Step function.
        limit: Absolute value above which the gradient is 0. `step=sign, limit=1` is the layer of binarized networks.
    """

    def __init__(self, *, step: Step = "round", limit: Annotated[float, Gt(0)] = math.inf) -> None:
        super().__init__()
        self.step, self.limit = step, limit

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x, self.step, self.limit)
