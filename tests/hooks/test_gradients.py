"""Gradient norms against a float64 reference, and for which parameters there are any."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.hooks.gradients import Gradients
from exp.hooks.norms import norms, with_total
from exp.hooks.step import Step

pytestmark = pytest.mark.numeric


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "head": nn.Linear(4, 3)}
    )


def backward(net: nn.Module, dtype: torch.dtype = torch.float32) -> None:
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    net["head"](net["encoder"](inputs)).square().sum().backward()


def step(net: nn.Module) -> Step:
    return Step(index=1, network=net, optimizers=[], batch_size=32, device=torch.device("cpu"))


def only_norms(**options) -> Gradients:
    periods = ("heat_map_every_n_steps", "histogram_every_n_steps", "update_ratio_every_n_steps")
    return Gradients(**dict.fromkeys(periods), **{"each_parameter": True, **options})


def logged(hook: Gradients, net: nn.Module) -> dict[str, float]:
    hook.attach(net)
    values = hook.after_backward(step(net))
    hook.detach()
    return {tag: float(value) for tag, value in (values or {}).items()}


def test_norms_equal_a_float64_reference():
    net, exact = network(), network().double()
    backward(net)
    backward(exact, torch.float64)
    values = logged(only_norms(), net)
    squares = 0.0
    for name, parameter in exact.named_parameters():
        square = sum(value * value for value in parameter.grad.flatten().tolist())
        assert values.pop(f"gradients/norm/{name}") == pytest.approx(math.sqrt(square), rel=1e-5)
        squares += square
    assert values == {"gradients/norm/total": pytest.approx(math.sqrt(squares), rel=1e-5)}
    assert logged(only_norms(each_parameter=False), net) == values


def test_the_norms_of_all_parameters_are_one_column_of_a_heat_map():
    net = network()
    backward(net)
    net["head"].bias.grad = None
    hook = Gradients(histogram_every_n_steps=None, update_ratio_every_n_steps=None)
    hook.attach(net)
    column = hook.after_backward(step(net))["gradients/norm"]
    known = {name: one.grad.double().norm().item() for name, one in net.named_parameters() if one.grad is not None}
    assert dict(zip(column.names, column.values.tolist(), strict=True)) == pytest.approx(known, rel=1e-5)


def test_patterns_choose_the_parameters_below_the_modules_they_match():
    net = network()
    backward(net)
    tags = logged(only_norms(modules=["encoder"]), net).keys()
    parts = ("total", "encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias")
    assert list(tags) == [f"gradients/norm/{part}" for part in parts]


def test_frozen_and_unused_parameters_have_no_value():
    net = network()
    net["encoder"][0].weight.requires_grad_(False)
    backward(net)
    net["head"].bias.grad = None
    tags = logged(only_norms(), net).keys()
    assert "gradients/norm/encoder.0.weight" not in tags
    assert "gradients/norm/head.bias" not in tags
    assert "gradients/norm/head.weight" in tags


def test_without_any_gradient_nothing_is_logged():
    assert logged(only_norms(), network()) == {}


def test_a_pattern_without_a_module_is_refused_before_the_first_step():
    with pytest.raises(ConfigError, match=r"'decoder'; expected a pattern of module names, .*; there are encoder"):
        Gradients(modules=["decoder"]).attach(network())


def test_half_precision_gradients_have_norms_in_fp32():
    net = network().bfloat16()
    backward(net, torch.bfloat16)
    reference = net["head"].weight.grad.double().norm().item()
    assert logged(only_norms(), net)["gradients/norm/head.weight"] == pytest.approx(reference, rel=1e-5)
    assert norms([net["head"].weight.grad])[0].dtype == torch.float32


def test_a_sparse_gradient_has_the_norm_of_its_dense_form():
    table = nn.Embedding(10, 4, sparse=True)
    (table(torch.tensor([1, 1, 3])) * torch.arange(4.0)).sum().backward()
    assert table.weight.grad.is_sparse
    dense = table.weight.grad.to_dense().norm().item()
    assert logged(only_norms(), table)["gradients/norm/weight"] == pytest.approx(dense)


def test_a_total_with_a_nan_beside_an_infinity_is_a_nan():
    each, total = with_total([torch.tensor(torch.inf), torch.tensor(torch.nan), torch.tensor(3.0)])
    assert math.isnan(total)
    assert each[2] == 3.0
    assert with_total([torch.tensor(3.0), torch.tensor(4.0)])[1] == 5.0
    assert with_total([]) == ([], 0.0)


def test_torch_s_private_foreach_norm_takes_an_order_and_a_dtype():
    """Relied on in hooks/norms.py; seen in torch 2.13."""
    tensors = [torch.randn(3, 5), torch.randn(7), torch.zeros(2)]
    assert [one.shape for one in norms(tensors)] == [torch.Size([])] * 3
    for ours, tensor in zip(norms(tensors), tensors, strict=True):
        torch.testing.assert_close(ours, torch.linalg.vector_norm(tensor))
    assert norms([torch.full((4,), 300.0, dtype=torch.float16)])[0].item() == 600.0
    mixed = norms([torch.ones(4, dtype=torch.bfloat16), torch.ones(9)])
    assert [(one.item(), one.dtype) for one in mixed] == [(2.0, torch.float32), (3.0, torch.float32)]
    assert norms([]) == []
