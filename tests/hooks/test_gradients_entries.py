"""Histograms, shares and update ratios of gradients, and norms after clipping, against counts by hand."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exp
from exp.construct import plain_config
from exp.errors import ConfigError
from exp.hooks.gradients import Gradients
from exp.hooks.step import Step
from exp.strategies.placement import Machine, placement
from exp.strategies.strategy import Blueprint

pytestmark = pytest.mark.numeric

SHORT = (
    *("model=sequential", "model.layers.hidden.out_features=8", "model.layers.hidden2.out_features=8"),
    *("hooks=[gradients]", "metrics=[]", "test=false", "trainer.limit_val_batches=0", "monitor=loss/train"),
    *("trainer.max_epochs=null", "trainer.max_steps=2", "checkpoint.save_last=false", "checkpoint.save_best=false"),
)

CLIPPED = "hooks.gradients.clipped=total"
EACH = ("hooks.gradients.each_parameter=true", "hooks.gradients.shares_every_n_steps=1")


def step(net: nn.Module, *, index: int = 1, clips: bool = False) -> Step:
    return Step(index=index, network=net, optimizers=[], batch_size=1, device=torch.device("cpu"), clips=clips)


def attached(net: nn.Module, **options) -> Gradients:
    hook = Gradients(**{"each_parameter": True, "heat_map_every_n_steps": None, "clipped": "total", **options})
    hook.attach(net)
    return hook


def two_layers() -> nn.Module:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 4), nn.Linear(4, 2))
    for parameter in net.parameters():
        parameter.grad = torch.randn_like(parameter)
    return net


def test_shares_of_zeros_and_of_what_is_not_finite():
    net = nn.Linear(5, 4, bias=False)
    net.weight.grad = torch.ones(4, 5)
    net.weight.grad[0, :3] = 0.0
    net.weight.grad[1, 0], net.weight.grad[2, 0] = torch.inf, torch.nan
    values = attached(net, shares_every_n_steps=1).after_backward(step(net))
    assert values["gradients/zeros/weight"].item() == pytest.approx(3 / 20)
    assert values["gradients/non_finite/weight"].item() == pytest.approx(2 / 20)
    counts = values["gradients/histogram/weight"].counts
    assert (counts[0].item(), counts[-1].item(), counts.sum().item()) == (3, 15, 18)


def test_a_sparse_gradient_has_the_shares_and_the_histogram_of_its_dense_form():
    table = nn.Embedding(10, 4, sparse=True)
    (table(torch.tensor([1, 1, 3])) * torch.tensor([0.0, 1.0, 2.0, 3.0])).sum().backward()
    dense = table.weight.grad.to_dense()
    values = attached(table, shares_every_n_steps=1).after_backward(step(table))
    assert values["gradients/zeros/weight"].item() == pytest.approx((dense == 0).float().mean().item())
    histogram = values["gradients/histogram/weight"]
    torch.testing.assert_close(histogram.counts, torch.histc(dense, 64, 0.0, 6.0))


def test_the_update_ratio_is_the_change_over_the_parameter_before():
    net = two_layers()
    nn.init.zeros_(net[1].bias)
    hook = attached(net)
    optimizer = torch.optim.Adam(net.parameters(), lr=0.1)
    net[0].bias.grad = None
    before = {name: parameter.detach().double().clone() for name, parameter in net.named_parameters()}
    hook.after_backward(step(net))
    optimizer.step()
    values = hook.after_step(step(net))
    for name in ("0.weight", "1.weight"):
        change = (net.get_parameter(name).detach().double() - before[name]).norm()
        expected = (change / before[name].norm()).item()
        assert values[f"gradients/update_ratio/{name}"].item() == pytest.approx(expected, rel=1e-5)
    # It was all zeros, and moved.
    assert values["gradients/update_ratio/1.bias"].item() == 1.0
    assert "gradients/update_ratio/0.bias" not in values
    moved = [name for name in before if name != "0.bias"]
    changes = [net.get_parameter(name).detach().double() - before[name] for name in moved]
    whole = nn.utils.get_total_norm(changes) / nn.utils.get_total_norm([before[name] for name in moved])
    assert values["gradients/update_ratio/total"].item() == pytest.approx(whole.item(), rel=1e-5)
    column = values["gradients/update_ratio"]
    assert dict(zip(column.names, column.values.tolist(), strict=True)) == pytest.approx(
        {name: values[f"gradients/update_ratio/{name}"].item() for name in moved}
    )


def test_a_step_that_changes_nothing_has_ratios_of_zero():
    net = two_layers()
    nn.init.zeros_(net[1].bias)
    hook = attached(net)
    hook.after_backward(step(net))
    values = hook.after_step(step(net))
    assert values.pop("gradients/update_ratio").values.tolist() == [0.0] * 4
    assert [value.item() for value in values.values()] == [0.0] * 5


def test_each_has_a_period_of_its_own():
    net = two_layers()
    hook = attached(
        net, every_n_steps=2, histogram_every_n_steps=3, update_ratio_every_n_steps=5, shares_every_n_steps=None
    )
    seen = {}
    for index in range(1, 7):
        kinds = set()
        if hook.due(index):
            found = {
                **(hook.after_backward(step(net, index=index)) or {}),
                **(hook.after_step(step(net, index=index)) or {}),
            }
            kinds = {tag.split("/")[1] for tag in found}
        seen[index] = kinds
    every = {"norm", "histogram", "update_ratio"}
    assert seen == {1: every, 2: {"norm"}, 3: {"histogram"}, 4: {"norm"}, 5: {"update_ratio"}, 6: {"norm", "histogram"}}


def test_norms_after_clipping_are_there_only_where_the_run_clips():
    net = two_layers()
    hook = attached(net)
    assert hook.after_clipping(step(net)) is None
    total = nn.utils.clip_grad_norm_(net.parameters(), 0.5)
    assert total > 0.5
    values = hook.after_clipping(step(net, clips=True))
    assert {tag: pytest.approx(value, rel=1e-4) for tag, value in values.items()} == {
        "gradients/norm_clipped/total": 0.5
    }
    each = attached(net, clipped="each").after_clipping(step(net, clips=True))
    assert each["gradients/norm_clipped/0.weight"] == pytest.approx(net[0].weight.grad.norm().item(), rel=1e-5)
    assert attached(net, clipped=None).after_clipping(step(net, clips=True)) is None


def test_of_a_run_that_clips_and_of_one_that_does_not(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    plain = exp.fit(exp.compose([*SHORT, CLIPPED, "hydra.run.dir=plain"])).metrics
    assert not any(tag.startswith("gradients/norm_clipped/") for tag in plain)
    clipped = exp.fit(exp.compose([*SHORT, CLIPPED, "hydra.run.dir=clipped", "trainer.gradient_clip_val=0.01"])).metrics
    assert clipped["gradients/norm/total"] > 0.1
    assert clipped["gradients/norm_clipped/total"] == pytest.approx(0.01, rel=1e-3)


def test_a_step_that_the_loss_scale_skips_moves_nothing(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    overrides = ("precision=fp16", "precision.scaler.init_scale=1e30", "trainer.max_steps=1", *EACH)
    values = exp.fit(exp.compose([*SHORT, *overrides, "hydra.run.dir=run"])).metrics
    assert values["precision/skipped_steps"] == 1.0
    ratios = [value for tag, value in values.items() if tag.startswith("gradients/update_ratio/")]
    assert ratios == [0.0] * 7
    shares = [value for tag, value in values.items() if tag.startswith("gradients/non_finite/")]
    assert max(shares) > 0.0


def test_with_phases_each_has_tags_of_its_own(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    values = exp.fit(exp.compose([*SHORT, *EACH, CLIPPED, "phases=[body_and_head]", "hydra.run.dir=run"])).metrics
    tags = {tag for tag in values if tag.startswith("gradients/")}
    assert {"gradients/norm/total/body", "gradients/norm/total/head", "gradients/norm/head.weight/head"} <= tags
    # body clips, head does not.
    assert {tag for tag in tags if "norm_clipped" in tag} == {"gradients/norm_clipped/total/body"}
    assert "gradients/norm/head.weight/body" not in tags
    # A parameter moves once a step, by whichever phase.
    assert {"gradients/update_ratio/head.weight", "gradients/update_ratio/hidden.weight"} <= tags


def test_wrong_options_are_told_before_the_run():
    def told(*overrides: str) -> str:
        with pytest.raises(ConfigError) as caught:
            exp.validate(exp.compose(["hooks=[gradients]", *overrides]))
        return str(caught.value)

    assert "hooks.gradients.clipped: 'all'; expected one of total, each, or null" in told("hooks.gradients.clipped=all")
    assert "hooks.gradients.histogram_every_n_steps: 0" in told("hooks.gradients.histogram_every_n_steps=0")


def test_stage_3_of_deepspeed_has_no_gradients_to_look_at():
    config = exp.compose(["strategy=deepspeed", "strategy.stage=3", "trainer.gradient_clip_val=1.0", "phases=[]"])
    planned = Blueprint(
        network=two_layers(),
        placement=placement("ddp", devices=2, accelerator="cpu", machine=Machine(gpus=0)),
        batch_size=8,
        precision="fp32",
        config=plain_config(config),
        traits=frozenset({"owns_step", "shards_parameters"}),
    )
    keys = [fault.key for fault in Gradients(clipped="total").faults(planned)]
    assert keys == [
        "hooks.gradients.histogram_every_n_steps",
        "hooks.gradients.update_ratio_every_n_steps",
        "hooks.gradients.clipped",
    ]


def test_a_subclass_is_asked_for_what_it_has_of_its_own():
    class Mine(Gradients):
        def after_step(self, step: Step):
            return {"mine": 1.0}

    assert Gradients().idle_at(3) == {"after_step", "after_clipping"}
    assert Gradients(clipped="total").idle_at(1) == frozenset()
    assert Mine().idle_at(3) == {"after_clipping"}
