"""Gradients multiplied on their way back: by a number, by one in a tensor, differentiated, transformed and compiled."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.functions.identities import gradient_reversal, progressive_weight, scale_gradient

pytestmark = pytest.mark.numeric


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


@pytest.mark.parametrize("function", [scale_gradient, gradient_reversal])
def test_gradcheck(function) -> None:
    # With a factor its gradient is not the derivative, on purpose; undone by a second one it is.
    assert torch.autograd.gradcheck(lambda t: function(function(t.sin(), 4.0), 0.25), x(3, 2))
    for factor in (0.7, torch.tensor(0.7, dtype=torch.float64)):
        assert torch.autograd.gradgradcheck(lambda t, factor=factor: function(t, factor), x(3, 2))


@pytest.mark.parametrize("factor", [0.3, 0.0, -2.0, torch.tensor(0.3, dtype=torch.float64)])
def test_the_gradient_is_multiplied_and_the_numbers_are_not(factor) -> None:
    value = x(3, 4)
    output = scale_gradient(value, factor)
    assert torch.equal(output, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), value)
    torch.testing.assert_close(gradient, float(factor) * 2 * value, rtol=0, atol=0)


@pytest.mark.parametrize("function", [scale_gradient, gradient_reversal])
def test_what_stands_behind_may_work_in_place(function) -> None:
    value = x(5)
    output = nn.ReLU(inplace=True)(function(value * 1, 0.5))
    output.sum().backward()
    sign = -1 if function is gradient_reversal else 1
    torch.testing.assert_close(value.grad, sign * 0.5 * (value > 0).double())


def test_torch_func_may_transform_it() -> None:
    value = x(5, 3).detach()
    for factor in (2.0, torch.tensor(2.0, dtype=torch.float64)):
        one = torch.func.grad(lambda t, factor=factor: scale_gradient(t, factor).pow(3).sum())
        torch.testing.assert_close(torch.func.vmap(one)(value), 2.0 * 3 * value**2)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
@pytest.mark.parametrize("factor", [2.0, torch.tensor(2.0), torch.tensor(2.0, dtype=torch.float64)])
def test_every_dtype_keeps_its_own(dtype: torch.dtype, factor) -> None:
    value = torch.ones(3, dtype=dtype, requires_grad=True)
    scale_gradient(value, factor).sum().backward()
    assert value.grad.dtype == dtype
    assert value.grad.tolist() == [2.0, 2.0, 2.0]


def test_a_number_that_changes_between_forward_and_backward_is_an_error() -> None:
    factor = torch.tensor(2.0, dtype=torch.float64)
    output = scale_gradient(x(3), factor)
    factor.fill_(3.0)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        output.sum().backward()


def test_the_schedule_is_the_papers() -> None:
    # 2 / (1 + exp(-10 p)) - 1 at p = 0, 0.1, 0.5, 1, by hand to 6 digits.
    found = [round(progressive_weight(p), 6) for p in (0.0, 0.1, 0.5, 1.0)]
    assert found == [0.0, 0.462117, 0.986614, 0.999909]
    assert progressive_weight(1.0, steepness=1e6) == 1.0
