"""Functions with a custom backward equal torch's operators: first and second gradients, transforms, layers."""

from __future__ import annotations

import math
from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.extras.gallery import custom_functions

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]


def x(*shape: int, seed: int = 0) -> Tensor:
    return torch.randn(*shape, dtype=torch.float64, generator=torch.Generator().manual_seed(seed)).requires_grad_()


def rounded(value: Tensor) -> Tensor:
    """Return the straight-through estimate, written with torch's operators."""
    return value + (value.round() - value).detach()


OF_TORCH: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = {
    "Exp": (custom_functions.exp, torch.exp),
    "Cube": (custom_functions.cube, lambda t: t**3),
    "MulConstant": (lambda t: custom_functions.mul_constant(t, -0.3), lambda t: -0.3 * t),
    "StraightThrough": (custom_functions.straight_through, rounded),
}
CASES = pytest.mark.parametrize(("own", "torchs"), OF_TORCH.values(), ids=OF_TORCH)


@CASES
def test_value_and_gradients_equal_those_of_torch(own, torchs) -> None:
    value = x(3, 4)
    found = []
    for function in (own, torchs):
        output = function(value)
        (gradient,) = torch.autograd.grad(output.square().sum(), value, create_graph=True)
        (second,) = torch.autograd.grad(gradient.sin().sum(), value)
        found.append((output, gradient, second))
    for mine, wanted in zip(*found, strict=True):
        torch.testing.assert_close(mine, wanted, rtol=1e-13, atol=1e-14)


@pytest.mark.parametrize("name", ["Exp", "Cube", "MulConstant"])
def test_gradcheck(name) -> None:
    own = OF_TORCH[name][0]
    assert torch.autograd.gradcheck(own, x(3, 2), check_batched_grad=True)
    assert torch.autograd.gradgradcheck(own, x(3, 2), check_batched_grad=True)


@CASES
def test_torch_func_can_transform_it(own, torchs) -> None:
    value = x(5, 3).detach()
    mine, wanted = (
        torch.func.vmap(torch.func.jacrev(torch.func.grad(lambda t, function=function: function(t).pow(2).sum())))(
            value
        )
        for function in (own, torchs)
    )
    torch.testing.assert_close(mine, wanted, rtol=1e-12, atol=1e-13)


@pytest.mark.parametrize("shape", [(3,), (4, 3), (2, 2, 2, 3), (0, 3)])
@pytest.mark.parametrize("has_bias", [True, False])
def test_linear_equals_that_of_torch(shape, has_bias) -> None:
    given = (x(*shape), x(2, 3, seed=1), x(2, seed=2) if has_bias else None)
    assert torch.equal(custom_functions.linear(*given), nn.functional.linear(*given))
    if math.prod(shape):
        assert torch.autograd.gradcheck(custom_functions.linear, given)
        assert torch.autograd.gradgradcheck(custom_functions.linear, given)
    parameters = [one for one in given if one is not None]
    mine = torch.autograd.grad(custom_functions.linear(*given).sin().sum(), parameters)
    torchs = torch.autograd.grad(nn.functional.linear(*given).sin().sum(), parameters)
    torch.testing.assert_close(mine, torchs, rtol=1e-13, atol=1e-14)


def test_linear_has_per_sample_gradients_and_frozen_weights() -> None:
    weight, bias = x(2, 3, seed=1), x(2, seed=2)
    of_one = torch.func.grad(lambda w, b, one: custom_functions.linear(one, w, b).pow(2).sum(), argnums=(0, 1))
    mine = torch.func.vmap(of_one, in_dims=(None, None, 0))(weight, bias, x(5, 3).detach())
    of_torch = torch.func.grad(lambda w, b, one: nn.functional.linear(one, w, b).pow(2).sum(), argnums=(0, 1))
    torch.testing.assert_close(
        mine, torch.func.vmap(of_torch, in_dims=(None, None, 0))(weight, bias, x(5, 3).detach()), rtol=1e-13, atol=1e-14
    )
    frozen = weight.detach()
    (gradient,) = torch.autograd.grad(custom_functions.linear(x(4, 3), frozen, bias).sum(), bias)
    assert gradient.tolist() == [4.0, 4.0]


@pytest.mark.parametrize("step", ["round", "sign", "floor", "ceil"])
def test_a_step_function_passes_gradients_within_its_limit(step) -> None:
    value = torch.tensor([-2.5, -1.0, -0.4, 0.0, 0.6, 1.0, 1.5], dtype=torch.float64, requires_grad=True)
    output = custom_functions.straight_through(value, step, 1.0)
    assert torch.equal(output, getattr(torch, step)(value))
    (gradient,) = torch.autograd.grad(output, value, torch.arange(7, dtype=torch.float64))
    assert gradient.tolist() == [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 0.0]


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16, torch.float32])
def test_layers_keep_the_dtype(dtype) -> None:
    for layer in (custom_functions.MulConstantLayer(constant=2.0), custom_functions.StraightThroughLayer()):
        value = torch.ones(3, dtype=dtype, requires_grad=True)
        output = layer(value)
        output.sum().backward()
        assert output.dtype == value.grad.dtype == dtype


def test_autocast_applies_to_the_linear_layer() -> None:
    mine, torchs = custom_functions.LinearLayer(3, 2), nn.Linear(3, 2)
    torchs.load_state_dict(mine.state_dict())
    for layer in (mine, torchs):
        with torch.autocast("cpu", dtype=torch.bfloat16):
            output = layer(torch.linspace(0, 1, 12).reshape(4, 3))
        assert output.dtype == torch.bfloat16
        output.float().square().sum().backward()
    assert mine.weight.grad.dtype == torch.float32
    torch.testing.assert_close(mine.weight.grad, torchs.weight.grad, rtol=0.02, atol=0)


def test_a_run_trains_as_with_torchs_layer(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    common = [
        *("data=wine", "model=mlp", "precision=fp64", "trainer.max_steps=3", "optimizer=sgd", "hooks=[]", "metrics=[]"),
        *("test=false", "trainer.limit_val_batches=1", "logger=[]", "trainer.enable_progress_bar=false"),
    ]

    def loss(target: str) -> float:
        report = exp.fit(exp.compose([*common, f"model.layers.head={{_target_: {target}, out_features: 3}}"]))
        return report.metrics["loss/val"]

    assert loss("exp.extras.gallery.custom_functions.LinearLayer, in_features: 256") == pytest.approx(
        loss("torch.nn.Linear, in_features: 256"), rel=1e-12
    )
    kinds = "exp.extras.gallery.custom_functions"
    program = (
        "{_target_: exp.models.containers.ModuleDictModel, "
        f"functions: {{cube: {kinds}.Cube, exponential: {kinds}.Exp}}, "
        f"layers: {{halved: {{_target_: {kinds}.MulConstantLayer, constant: 0.5}}, "
        f"squash: {{_target_: {kinds}.StraightThroughLayer, step: sign, limit: 1.0}}, "
        f"head: {{_target_: {kinds}.LinearLayer, in_features: 13, out_features: 3}}}}, "
        "forward: 'return head(squash(cube(halved(x)) - exponential(-x)))'}"
    )
    exp.validate(exp.compose([*common, f"model={program}"]))
