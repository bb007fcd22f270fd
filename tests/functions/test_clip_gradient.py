"""Gradients clipped on their way back, by norm and by value, against the formula in float64."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from exp.functions.identities import clip_gradient_by_norm, clip_gradient_by_value

pytestmark = pytest.mark.numeric

BOTH = [clip_gradient_by_norm, clip_gradient_by_value]


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("function", BOTH)
@pytest.mark.parametrize("limit", [0.5, torch.tensor(0.5, dtype=torch.float64)])
def test_gradcheck(function, limit) -> None:
    # What is below the limit is the identity's; above it the gradient is not the derivative, on purpose, and the second
    # derivative is that of the clipping.
    assert torch.autograd.gradcheck(lambda t: function(t.sin(), 1e6), x(3, 2))
    assert torch.autograd.gradgradcheck(lambda t: function(t, limit), x(3, 2))


def test_the_norm_of_the_whole_is_at_most_the_limit() -> None:
    value = x(3, 4)
    for limit in (0.1, 2.0, 1e6, torch.tensor(0.1)):
        (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, limit).square().sum(), value)
        true = [2 * number for number in value.flatten().tolist()]
        factor = min(1.0, float(limit) / math.sqrt(sum(number**2 for number in true)))
        torch.testing.assert_close(gradient.flatten(), torch.tensor(true, dtype=torch.float64) * factor)


def test_each_number_is_at_most_the_limit() -> None:
    value = x(3, 4)
    (gradient,) = torch.autograd.grad(clip_gradient_by_value(value, 0.7).square().sum(), value)
    expected = [max(-0.7, min(0.7, 2 * number)) for number in value.flatten().tolist()]
    assert gradient.flatten().tolist() == pytest.approx(expected)


@pytest.mark.parametrize("function", BOTH)
def test_a_zero_gradient_stays_zero_and_what_is_not_finite_stays_so(function) -> None:
    value = x(4)
    (zero,) = torch.autograd.grad((function(value, 1.0) * 0).sum(), value)
    assert zero.tolist() == [0.0] * 4
    for wrong in (math.inf, -math.inf, math.nan):
        given = torch.tensor([1.0, wrong, 2.0, 3.0], dtype=torch.float64)
        (gradient,) = torch.autograd.grad(function(value, 1.0), value, given)
        assert not gradient.isfinite().all()


def test_half_precision_is_measured_in_float32_and_a_scaled_limit_may_be_larger_than_any_half() -> None:
    value = torch.zeros(1000, dtype=torch.float16, requires_grad=True)
    given = torch.full((1000,), 300.0, dtype=torch.float16)  # the square of one alone overflows
    (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, 65536.0), value, given)
    assert torch.equal(gradient, given)
    (gradient,) = torch.autograd.grad(clip_gradient_by_norm(value, torch.tensor(300.0)), value, given)
    assert gradient.double().norm().item() == pytest.approx(300.0, rel=1e-3)
    (gradient,) = torch.autograd.grad(clip_gradient_by_value(value, torch.tensor(1e6)), value, given)
    assert torch.equal(gradient, given)


def test_other_processes_are_asked_for_their_squares() -> None:
    value = x(3)
    given = torch.tensor([3.0, 0.0, 0.0], dtype=torch.float64)
    output = clip_gradient_by_norm(value, 2.5, total=lambda square: square + 16.0)
    (gradient,) = torch.autograd.grad(output, value, given)
    torch.testing.assert_close(gradient, given * 0.5)  # the whole norm is 5


@pytest.mark.parametrize("function", BOTH)
def test_torch_func_may_transform_it_and_what_stands_behind_may_work_in_place(function) -> None:
    value = x(5, 3)
    found = torch.func.vmap(torch.func.grad(lambda t: function(t, 0.5).square().sum()))(value.detach())
    for row, one in zip(value.detach(), found, strict=True):
        row = row.clone().requires_grad_()
        nn.ReLU(inplace=True)(function(row, 0.5)).sum()
        (alone,) = torch.autograd.grad(function(row, 0.5).square().sum(), row)
        torch.testing.assert_close(one, alone)
