"""Functions that change only the gradient: scale, reverse, clip by norm, clip by value."""

from __future__ import annotations

import functools
import math

import pytest
import torch
from torch import nn

from exp.functions.gradient_layers import GradientReversal
from exp.functions.identities import (
    clip_gradient_by_norm,
    clip_gradient_by_value,
    gradient_reversal,
    progressive_weight,
    scale_gradient,
)
from exp.models.containers import ModuleDictModel, SequentialModel

pytestmark = pytest.mark.numeric

CLIPS = [clip_gradient_by_norm, clip_gradient_by_value]
SCALES = [(scale_gradient, 1.0), (gradient_reversal, -1.0)]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def in_double(number: float) -> torch.Tensor:
    return torch.tensor(number, dtype=torch.float64)


@pytest.mark.parametrize(("function", "sign"), SCALES)
@pytest.mark.parametrize("factor", [0.3, 0.0, in_double(0.3)])
def test_the_gradient_is_multiplied_and_the_value_kept(function, sign: float, factor) -> None:
    value = x(3, 4)
    output = function(value, factor)
    assert torch.equal(output, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), value)
    torch.testing.assert_close(gradient, sign * float(factor) * 2 * value, rtol=0, atol=0)


@pytest.mark.parametrize("function", [scale_gradient, gradient_reversal, *CLIPS])
def test_second_gradients_are_right(function) -> None:
    # These functions change the gradient, so gradcheck needs a combination without effect: a factor and its inverse,
    # or a clip with a high limit.
    undone = (1e6,) if function in CLIPS else (4.0, 0.25)
    assert torch.autograd.gradcheck(lambda t: functools.reduce(function, undone, t.sin()), x(3, 2))
    for number in (0.5, in_double(0.5)):
        assert torch.autograd.gradgradcheck(lambda t, number=number: function(t, number), x(3, 2))


@pytest.mark.parametrize("function", [scale_gradient, gradient_reversal, *CLIPS])
@pytest.mark.parametrize("number", [0.5, in_double(0.5)])
def test_torch_func_and_layers_in_place_work(function, number) -> None:
    value = x(5, 3).detach()
    found = torch.func.vmap(torch.func.grad(lambda t: function(t, number).square().sum()))(value)
    for row, one in zip(value, found, strict=True):
        row = row.clone().requires_grad_()
        nn.ReLU(inplace=True)(function(row * 1, number)).sum().backward()
        assert row.grad.count_nonzero() == (row > 0).sum()
        (alone,) = torch.autograd.grad(function(row, number).square().sum(), row)
        torch.testing.assert_close(one, alone)


@pytest.mark.parametrize(("function", "sign"), SCALES)
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0), in_double(2.0)])
def test_the_gradient_keeps_the_dtype_of_the_input(function, sign: float, dtype: torch.dtype, factor) -> None:
    value = torch.ones(3, dtype=dtype, requires_grad=True)
    function(value, factor).sum().backward()
    assert value.grad.dtype == dtype
    assert value.grad.tolist() == [sign * 2.0] * 3


def test_a_factor_changed_before_backward_is_an_error() -> None:
    factor = in_double(2.0)
    output = scale_gradient(x(3), factor)
    factor.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_progressive_schedule_is_that_of_the_paper() -> None:
    # Values of 2 / (1 + exp(-10 p)) - 1 for p = 0, 0.1, 0.5, 1, computed by hand to 6 digits.
    found = [round(progressive_weight(p), 6) for p in (0.0, 0.1, 0.5, 1.0)]
    assert found == [0.0, 0.462117, 0.986614, 0.999909]
    assert progressive_weight(1e5) == 1.0


def test_the_reversal_layer_works_in_both_containers() -> None:
    linear = nn.Linear(4, 2).double()
    layers = {"linear": linear, "reversal": GradientReversal(weight=0.25)}
    folded = SequentialModel(layers=layers)
    program = ModuleDictModel(layers=layers, forward="return {'plain': linear(x), 'reversed': reversal(linear(x))}")
    value = x(6, 4)
    expected = gradient_reversal(linear(value), 0.25)
    (wanted,) = torch.autograd.grad(expected.square().sum(), linear.weight)
    for output in (folded(value), program(value)["reversed"]):
        assert torch.equal(output, expected)
        assert torch.equal(torch.autograd.grad(output.square().sum(), linear.weight)[0], wanted)
    plain = program(value)["plain"]
    torch.testing.assert_close(torch.autograd.grad(plain.square().sum(), linear.weight)[0], -4 * wanted)


def test_clipping_limits_the_norm_or_each_number() -> None:
    value = x(3, 4)
    true = [2 * number for number in value.flatten().tolist()]
    for limit in (0.1, 2.0, 1e6, torch.tensor(0.1)):
        (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, limit).square().sum(), value)
        factor = min(1.0, float(limit) / math.hypot(*true))
        assert gradient.flatten().tolist() == pytest.approx([number * factor for number in true])
    (gradient,) = torch.autograd.grad(clip_gradient_by_value(value, 0.7).square().sum(), value)
    assert gradient.flatten().tolist() == pytest.approx([max(-0.7, min(0.7, number)) for number in true])


@pytest.mark.parametrize("function", CLIPS)
def test_clipping_keeps_zero_and_non_finite_gradients(function) -> None:
    value = x(4)
    (zero,) = torch.autograd.grad((function(value, 1.0) * 0).sum(), value)
    assert zero.tolist() == [0.0] * 4
    for wrong in (math.inf, -math.inf, math.nan):
        given = torch.tensor([1.0, wrong, 2.0, 3.0], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(function(value, 1.0), value, given)
        assert not gradient.isfinite().all()


def test_norms_of_half_precision_do_not_overflow() -> None:
    value = torch.zeros(1000, dtype=torch.float16, requires_grad=True)
    given = torch.full((1000,), 300.0, dtype=torch.float16)  # the square of one entry overflows
    (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, 65536.0), value, given)
    assert torch.equal(gradient, given)
    (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, torch.tensor(300.0)), value, given)
    assert gradient.double().norm().item() == pytest.approx(300.0, rel=1e-3)
    # With a loss scale, a limit may exceed the range of float16.
    (gradient,) = torch.autograd.grad(clip_gradient_by_value(value, torch.tensor(1e6)), value, given)
    assert torch.equal(gradient, given)


def test_the_norm_includes_the_squares_of_other_ranks() -> None:
    value = x(3)
    given = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    output = clip_gradient_by_norm(value, 2.5, total=lambda square: square + 16.0)
    (gradient,) = torch.autograd.grad(output, value, given)
    torch.testing.assert_close(gradient, given * 0.5)  # the norm of all gradients is 5
