"""Custom autograd Functions: Exp, Cube, MulConstant, Linear and StraightThrough.

The Functions support double backward, torch.func (with generated vmap rules) and torch.compile. Models can use the
layers of this module, such as CubeLayer. A forward program can also call the functions, such as cube, by a name in
`functions`.

The Functions follow the examples of https://docs.pytorch.org/docs/stable/notes/extending.html: `setup_context` saves
tensors of `forward`, and `backward` consists of differentiable operators.
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
    """Type of `ctx` in the Functions of this module. The context stores the values that the backward needs."""

    constant: float
    saved_tensors: tuple[Tensor, ...]
    needs_input_grad: tuple[bool, ...]

    def save_for_backward(self, *tensors: Tensor) -> None: ...


class Exp(torch.autograd.Function):
    """Elementwise exponential. The output is saved for the backward, because it equals the derivative."""

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
    """Elementwise third power."""

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
    """Product of a tensor and a constant. The constant gets no gradient."""

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
    """Linear map: x `[..., in]` times the transpose of weight `[out, in]`, plus an optional bias `[out]`."""

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
    """Elementwise step function with the identity as its backward, because the true derivative is 0 almost everywhere.

    The method is from Bengio, Leonard and Courville 2013, "Estimating or Propagating Gradients Through Stochastic
    Neurons", arXiv:1308.3432. If a limit is set, the gradient is 0 for inputs outside [-limit, limit]. A limit of 1
    gives equation 4 of Hubara et al. 2016, "Binarized Neural Networks", arXiv:1602.02830.
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
    """Return the elementwise exponential."""
    return apply_function(Exp, x)


def cube(x: Tensor) -> Tensor:
    """Return the elementwise third power."""
    return apply_function(Cube, x)


def mul_constant(x: Tensor, constant: float) -> Tensor:
    """Return the product of a tensor and a constant."""
    return apply_function(MulConstant, x, constant)


def straight_through(x: Tensor, step: Step = "round", limit: float = math.inf) -> Tensor:
    """Return a step function of each entry, such as the rounded entry.

    The backward passes the gradient unchanged to entries with an absolute value of at most `limit`, and 0 to other
    entries.

    Args:
        x: Tensor of any shape.
        step: Name of the step function in torch. Default: round.
        limit: Limit of the absolute value. Default: infinity.
    """
    return apply_function(StraightThrough, x, step, limit)


def linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Return the linear map `[..., out]` of x `[..., in]`, with weight `[out, in]` and bias `[out]`.

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
    """Layer with the elementwise exponential."""

    def forward(self, x: Tensor) -> Tensor:
        return exp(x)


class CubeLayer(nn.Module):
    """Layer with the elementwise third power."""

    def forward(self, x: Tensor) -> Tensor:
        return cube(x)


class MulConstantLayer(nn.Module):
    """Layer that multiplies its input by a constant, which is not trained."""

    def __init__(self, *, constant: float) -> None:
        super().__init__()
        self.constant = constant

    def forward(self, x: Tensor) -> Tensor:
        return mul_constant(x, self.constant)


class LinearLayer(nn.Linear):
    """Linear layer with the custom backward. Parameters and forward equal those of torch.nn.Linear, bit for bit."""

    def forward(self, input: Tensor) -> Tensor:
        return linear(input, self.weight, self.bias)


class LazyLinearLayer(nn.LazyLinear):
    """LinearLayer that infers in_features from its first input."""

    cls_to_become = LinearLayer

    forward = LinearLayer.forward


LAZY_CLASSES[LinearLayer] = (LazyLinearLayer, "in_features")


class StraightThroughLayer(nn.Module):
    """Layer with a step function in the forward and the identity in the backward.

    Args:
        step: Name of the step function in torch. Default: round.
        limit: Absolute value of the input above which the gradient is 0. `step=sign, limit=1` is the layer of binarized
            networks. Default: infinity.
    """

    def __init__(self, *, step: Step = "round", limit: Annotated[float, Gt(0)] = math.inf) -> None:
        super().__init__()
        self.step, self.limit = step, limit

    def forward(self, x: Tensor) -> Tensor:
        return straight_through(x, self.step, self.limit)
