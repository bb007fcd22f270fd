"""Gradient reversal: forward the identity, backward its opposite, alone, as a layer, differentiated and transformed."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from exp.functions.identities import gradient_reversal
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.models.layers import GradientReversal

pytestmark = pytest.mark.numeric


def x(*shape: int) -> torch.Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(0)).requires_grad_()


def test_the_gradient_is_the_opposite_times_the_weight() -> None:
    value = x(3, 4)
    output = gradient_reversal(value, 0.3)
    assert torch.equal(output, value)
    (gradient,) = torch.autograd.grad(output.square().sum(), value)
    torch.testing.assert_close(gradient, -0.3 * 2 * value, rtol=0, atol=0)


def test_gradcheck() -> None:
    # Reversed once its gradient is not the derivative, on purpose; reversed twice it is, and so is the second one.
    assert torch.autograd.gradcheck(lambda t: gradient_reversal(gradient_reversal(t.sin(), 2.0), 0.5), x(3, 2))
    assert torch.autograd.gradgradcheck(lambda t: gradient_reversal(gradient_reversal(t.sin(), 2.0), 0.5), x(3, 2))
    assert torch.autograd.gradgradcheck(lambda t: gradient_reversal(t, 0.7), x(3, 2))


def test_torch_func_may_transform_it() -> None:
    value = x(5, 3)
    gradients = torch.func.vmap(torch.func.grad(lambda t: gradient_reversal(t, 2.0).pow(3).sum()))(value)
    torch.testing.assert_close(gradients, -2.0 * 3 * value**2)


def test_the_layer_is_the_function_in_a_fold_and_in_a_program() -> None:
    linear = nn.Linear(4, 2).double()
    folded = SequentialModel(layers={"linear": linear, "reversal": GradientReversal(weight=0.25)})
    program = ModuleDictModel(
        layers={"linear": linear, "reversal": GradientReversal(weight=0.25)},
        forward="return {'plain': linear(x), 'reversed': reversal(linear(x))}",
    )
    value = x(6, 4)
    expected = gradient_reversal(linear(value), 0.25)
    (wanted,) = torch.autograd.grad(expected.square().sum(), linear.weight)
    for output in (folded(value), program(value)["reversed"]):
        assert torch.equal(output, expected)
        assert torch.equal(torch.autograd.grad(output.square().sum(), linear.weight)[0], wanted)
    plain = program(value)["plain"]
    torch.testing.assert_close(torch.autograd.grad(plain.square().sum(), linear.weight)[0], -4 * wanted)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_every_dtype_keeps_its_own(dtype: torch.dtype) -> None:
    value = torch.ones(3, dtype=dtype, requires_grad=True)
    gradient_reversal(value, 2.0).sum().backward()
    assert value.grad.dtype == dtype
    assert value.grad.tolist() == [-2.0, -2.0, -2.0]
