"""Functions with a backward of their own: Exp, Cube, MulConstant, Linear, and StraightThrough, whose forward is a step.

Each can be differentiated again, torch.func may transform it (a vmap rule is generated), and torch.compile traces it.
In a forward program they are called by a name of `functions`, in a model they are the layers below. Written
as https://docs.pytorch.org/docs/stable/notes/extending.html has its examples: what `forward` computes is kept by
`setup_context`, and `backward` is made of operators that autograd knows.
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
    """What these Functions keep for their backward: torch's context, and what it may hold."""

    constant: float
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Exp(torch.autograd.Function):
    """e to the power of each number, `[...]`. It keeps its result, which is its own derivative."""

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
    """The third power of each number, `[...]`; backward three times its square."""

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
    """Each number times a constant, `[...]`, which has no gradient."""

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
    """A step of each number, `[...]`, whose derivative is 0 almost everywhere; backward the gradient as it came.

    Bengio, Leonard and Courville 2013, "Estimating or Propagating Gradients Through Stochastic Neurons",
    arXiv:1308.3432. With a limit it passes where the number is between -limit and limit alone, as Hubara et al. 2016,
    "Binarized Neural Networks", arXiv:1602.02830, equation 4, has it for limit 1; inf is no limit.
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
    """e to the power of each number, `[...]`."""
    return apply_function(Exp, x)


def cube(x: Tensor) -> Tensor:
    """The third power of each number, `[...]`."""
    return apply_function(Cube, x)


def mul_constant(x: Tensor, constant: float) -> Tensor:
    """Each number times a constant, `[...]`."""
    return apply_function(MulConstant, x, constant)


def straight_through(x: Tensor, step: Step = "round", limit: float = math.inf) -> Tensor:
    """A step of each number, `[...]`, whose gradient comes back as it is where the number lies within the limit."""
    return apply_function(StraightThrough, x, step, limit)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """x `[..., in]`, weight `[out, in]`, bias `[out]`: `[..., out]`.

    In autocast the product is taken in autocast's dtype, forward and backward, as torch's own is.
    """
    kind = x.device.type
    # The meta device, of shapes without numbers, has no autocast.
    if not torch.amp.is_autocast_available(kind) or not torch.is_autocast_enabled(kind):
        return apply_function(Linear, x, weight, bias)
    dtype = torch.get_autocast_dtype(kind)
    with torch.autocast(kind, enabled=False):
        return apply_function(Linear, x.to(dtype), weight.to(dtype), None if bias is None else bias.to(dtype))


class ExpLayer(nn.Module):
    """e to the power of each number."""

    def forward(self, x: Tensor) -> Tensor:
        """The powers, `[...]` as x."""
        return exp(x)


class CubeLayer(nn.Module):
    """The third power of each number."""

    def forward(self, x: Tensor) -> Tensor:
        """The powers, `[...]` as x."""
        return cube(x)


class MulConstantLayer(nn.Module):
    """Each number times a constant, which does not learn."""

    def __init__(self, *, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        """The products, `[...]` as x."""
        return mul_constant(x, self.constant)


class LinearLayer(nn.Linear):
    """torch.nn.Linear with the backward above; the same parameters, and the same bits forward."""

    def forward(self, input: Tensor) -> Tensor:
        """`[..., out_features]` of `[..., in_features]`."""
        return linear(input, self.weight, self.bias)


class LazyLinearLayer(nn.LazyLinear):
    """A LinearLayer whose in_features are those of its first input."""

    cls_to_become = LinearLayer

    forward = LinearLayer.forward


LAZY_CLASSES[LinearLayer] = (LazyLinearLayer, "in_features")


class StraightThroughLayer(nn.Module):
    """A step forward, the identity backward: rounding and signs that a network learns by.

    limit: beyond it, on both sides of 0, no gradient passes; 1 with `sign` is the layer of binarized networks.
    """

    def __init__(self, *, step: Step = "round", limit: Annotated[float, Gt(0)] = math.inf) -> None:
        super().__init__()
        self.step, self.limit = step, limit

    def forward(self, x: Tensor) -> Tensor:
        """The steps, `[...]` as x."""
        return straight_through(x, self.step, self.limit)
