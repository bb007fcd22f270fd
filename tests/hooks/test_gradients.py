"""The hook gradients: norms, histograms, shares and update ratios equal those by hand."""

from __future__ import annotations

import math

import pytest
import torch
from torch import nn

import exp
from exp.config.settings import settings_of
from exp.construct import plain_config
from exp.errors import ConfigError
from exp.hooks.gradients import Gradients
from exp.hooks.norms import norms, with_total
from exp.hooks.step import Step
from exp.strategies.placement import Machine, placement
from exp.strategies.strategy import Blueprint

pytestmark = pytest.mark.numeric

SMALL = ("model.layers.hidden.out_features=8", "model.layers.hidden2.out_features=8", "hooks=[gradients]")
CLIPPED = "hooks.gradients.clipped=total"
EACH = "hooks.gradients.each_parameter=true"


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.ModuleDict(
        {"encoder": nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 4)), "head": nn.Linear(4, 3)}
    )


def with_gradients(net: nn.Module, dtype: torch.dtype = torch.float32) -> nn.Module:
    inputs = torch.randn(32, 8, generator=torch.Generator().manual_seed(1)).to(dtype)
    net["head"](net["encoder"](inputs)).square().sum().backward()
    return net


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return net


def attached(net: nn.Module, **options) -> Gradients:
    hook = Gradients(**{"each_parameter": True, "heat_map_every_n_steps": None, "clipped": "total", **options})
    hook.attach(net)
    return hook


def norms_of(net: nn.Module, step, **options) -> dict[str, float]:
    """Return the norms that the hook logs by parameter."""
    hook = attached(net, histogram_every_n_steps=None, update_ratio_every_n_steps=None, **options)
    values = hook.after_backward(step(net)) or {}
    hook.detach()
    return {tag.removeprefix("gradients/norm/"): float(value) for tag, value in values.items()}


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_norms_equal_a_float64_reference(step, dtype):
    net = with_gradients(network().to(dtype), dtype)
    found = norms_of(net, step)
    exact = {name: one.grad.double().square().sum().item() for name, one in net.named_parameters()}
    total = math.sqrt(sum(exact.values()))
    assert found == pytest.approx({name: math.sqrt(one) for name, one in exact.items()} | {"total": total}, rel=1e-5)
    assert norms_of(net, step, each_parameter=False) == {"total": pytest.approx(total, rel=1e-5)}


def test_the_heat_map_holds_each_trained_parameter(step):
    net = network()
    net["encoder"][0].weight.requires_grad_(False)
    with_gradients(net)
    net["head"].bias.grad = None
    hook = Gradients(histogram_every_n_steps=None, update_ratio_every_n_steps=None)
    hook.attach(net)
    column = hook.after_backward(step(net))["gradients/norm"]
    known = {name: one.grad.double().norm().item() for name, one in net.named_parameters() if one.grad is not None}
    assert known.keys() == {"encoder.0.bias", "encoder.2.weight", "encoder.2.bias", "head.weight"}
    assert dict(zip(column.names, column.values.tolist(), strict=True)) == pytest.approx(known, rel=1e-5)
    assert norms_of(net, step).keys() == {*known, "total"}
    assert norms_of(network(), step) == {}, "without gradients nothing is logged"


def test_patterns_select_parameters_below_the_modules(step):
    names = norms_of(with_gradients(network()), step, modules=["encoder"])
    assert list(names) == ["total", "encoder.0.weight", "encoder.0.bias", "encoder.2.weight", "encoder.2.bias"]
    with pytest.raises(ConfigError, match=r"'decoder'; expected a pattern of module names, .*; there are encoder"):
        Gradients(modules=["decoder"]).attach(network())


def test_norms_are_float32_and_pass_on_nan():
    """hooks/norms.py uses the private foreach norm of torch 2.13."""
    tensors = [torch.randn(3, 5), torch.randn(7), torch.zeros(2)]
    for ours, tensor in zip(norms(tensors), tensors, strict=True):
        torch.testing.assert_close(ours, torch.linalg.vector_norm(tensor))
    assert norms([torch.full((4,), 300.0, dtype=torch.float16)])[0].item() == 600.0
    mixed = norms([torch.ones(4, dtype=torch.bfloat16), torch.ones(9)])
    assert [(one.item(), one.dtype) for one in mixed] == [(2.0, torch.float32), (3.0, torch.float32)]
    assert norms([]) == []
    each, total = with_total([torch.tensor(torch.inf), torch.tensor(torch.nan), torch.tensor(3.0)])
    assert math.isnan(total)
    assert each[2] == 3.0
    assert with_total([torch.tensor(3.0), torch.tensor(4.0)])[1] == 5.0
    assert with_total([]) == ([], 0.0)


def test_a_histogram_counts_the_finite_entries(step):
    net = nn.Linear(5, 4, bias=False)
    net.weight.grad = torch.ones(4, 5)
    net.weight.grad[0, :3] = 0.0
    net.weight.grad[1, 0], net.weight.grad[2, 0] = torch.inf, torch.nan
    counts = attached(net).after_backward(step(net))["gradients/histogram/weight"].counts
    assert (counts[0].item(), counts[-1].item(), counts.sum().item()) == (3, 15, 18)


def test_a_sparse_gradient_counts_like_its_dense_form(step):
    table = nn.Embedding(10, 4, sparse=True)
    (table(torch.tensor([1, 1, 3])) * torch.tensor([0.0, 1.0, 2.0, 3.0])).sum().backward()
    assert table.weight.grad.is_sparse
    dense = table.weight.grad.to_dense()
    values = attached(table).after_backward(step(table))
    assert float(values["gradients/norm/weight"]) == pytest.approx(dense.norm().item())
    torch.testing.assert_close(values["gradients/histogram/weight"].counts, torch.histc(dense, 64, 0.0, 6.0))


def test_the_update_ratio_is_change_over_weights_before(step):
    net = two_layers()
    nn.init.zeros_(net[1].bias)
    hook = attached(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net[0].bias.grad = None
    before = {name: parameter.detach().double().clone() for name, parameter in net.named_parameters()}
    hook.after_backward(step(net))
    optimizer.step()
    values = hook.after_step(step(net))
    moved = [name for name in before if name != "0.bias"]
    changes = {name: net.get_parameter(name).detach().double() - before[name] for name in moved}
    # A parameter that changed from all zeros has a ratio of 1.
    expected = {name: (changes[name].norm() / before[name].norm()).item() for name in moved} | {"1.bias": 1.0}
    whole = nn.utils.get_total_norm(changes.values()) / nn.utils.get_total_norm([before[name] for name in moved])
    column = values.pop("gradients/update_ratio")
    assert dict(zip(column.names, column.values.tolist(), strict=True)) == pytest.approx(expected, rel=1e-5)
    found = {tag.removeprefix("gradients/update_ratio/"): value.item() for tag, value in values.items()}
    assert found == pytest.approx(expected | {"total": whole.item()}, rel=1e-5)
    hook.after_backward(step(net))
    unmoved = hook.after_step(step(net))
    assert unmoved.pop("gradients/update_ratio").values.tolist() == [0.0] * 3
    assert [value.item() for value in unmoved.values()] == [0.0] * 4


def test_each_kind_of_value_has_its_period(step):
    net = two_layers()
    hook = attached(net, every_n_steps=2, histogram_every_n_steps=3, update_ratio_every_n_steps=5)
    seen = {}
    for index in range(1, 7):
        found = {}
        if hook.due(index):
            found |= hook.after_backward(step(net, index=index)) or {}
            found |= hook.after_step(step(net, index=index)) or {}
        seen[index] = {tag.split("/")[1] for tag in found}
    every = {"norm", "histogram", "update_ratio"}
    assert seen == {1: every, 2: {"norm"}, 3: {"histogram"}, 4: {"norm"}, 5: {"update_ratio"}, 6: {"norm", "histogram"}}


def test_norms_after_clipping_are_logged_only_when_clipping(step):
    net = two_layers()
    hook = attached(net)
    assert hook.after_clipping(step(net)) is None
    assert nn.utils.clip_grad_norm_(net.parameters(), 0.5) > 0.5
    values = hook.after_clipping(step(net, clips=True))
    assert values == {"gradients/norm_clipped/total": pytest.approx(0.5, rel=1e-4)}
    each = attached(net, clipped="each").after_clipping(step(net, clips=True))
    assert each["gradients/norm_clipped/0.weight"] == pytest.approx(net[0].weight.grad.norm().item(), rel=1e-5)
    assert attached(net, clipped=None).after_clipping(step(net, clips=True)) is None


def test_a_skipped_step_moves_nothing(fit):
    scale = ("precision=fp16", "precision.scaler.init_scale=1e30", "trainer.max_steps=1")
    found = {tag: steps[1] for tag, steps in fit(*SMALL, EACH, *scale).values.items()}
    assert found["precision/skipped_steps"] == 1.0
    assert [value for tag, value in found.items() if tag.startswith("gradients/update_ratio/")] == [0.0] * 7


def test_each_phase_has_its_own_tags(fit):
    values = fit(*SMALL, EACH, CLIPPED, "phases=[body_and_head]", "trainer.max_steps=2").values
    tags = {tag for tag in values if tag.startswith("gradients/")}
    assert {"gradients/norm/total/body", "gradients/norm/total/head", "gradients/norm/head.weight/head"} <= tags
    # Only the phase body clips.
    assert {tag for tag in tags if "norm_clipped" in tag} == {"gradients/norm_clipped/total/body"}
    assert "gradients/norm/head.weight/body" not in tags
    # Both phases update parameters in the same step, so the tag of the ratio has no phase.
    assert {"gradients/update_ratio/head.weight", "gradients/update_ratio/hidden.weight"} <= tags


def test_stage_3_of_deepspeed_refuses_gradient_values():
    config = exp.compose(["trainer.gradient_clip_val=1.0", "phases=[]"])
    planned = Blueprint(
        network=two_layers(),
        placement=placement("ddp", devices=2, accelerator="cpu", machine=Machine(gpus=0)),
        batch_size=8,
        precision="fp32",
        settings=settings_of(plain_config(config)),
        traits=frozenset({"owns_step", "shards_parameters"}),
    )
    keys = [error.key.removeprefix("hooks.gradients.") for error in Gradients(clipped="total").errors(planned)]
    assert keys == ["histogram_every_n_steps", "update_ratio_every_n_steps", "clipped"]


def test_methods_without_work_are_not_called_except_those_of_a_subclass():
    class Mine(Gradients):
        def after_step(self, step: Step):
            return {"mine": 1.0}

    assert Gradients().idle_at(3) == {"after_step", "after_clipping"}
    assert Gradients(clipped="total").idle_at(1) == frozenset()
    assert Mine().idle_at(3) == {"after_clipping"}


@pytest.mark.slow
def test_a_compiled_network_logs_the_same_values(fit):
    run = [*SMALL, EACH, "hooks=[gradients,memory]", "trainer.gradient_clip_val=0.1", CLIPPED, "trainer.max_steps=2"]
    plain = fit(*run).values
    found = fit(*run, "runtime.compile=true", "runtime.compile_backend=aot_eager").values
    torch.compiler.reset()
    assert found.keys() == plain.keys()
    for tag in (tag for tag in plain if tag.startswith("gradients/")):
        assert found[tag] == pytest.approx(plain[tag], rel=1e-4, abs=1e-9), tag
    for part in ("parameters", "gradients", "optimizer"):
        assert found[f"memory/{part}_mib"] == plain[f"memory/{part}_mib"]
    # A compiled network keeps other tensors for its backward.
    assert 0 < found["memory/activations_mib"][1] < 2 * plain["memory/activations_mib"][1]
