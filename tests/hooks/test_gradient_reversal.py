"""The hook gradient_reversal: what the layer and the Function do, in every kind of run; its schedule, its faults."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from torch import nn

import exp
from exp.errors import ConfigError, RunError
from exp.functions.identities import gradient_reversal
from exp.hooks.gradient_reversal import GradientReversal
from exp.hooks.step import Step
from exp.models.layers import GradientReversal as Layer

pytestmark = pytest.mark.numeric

SHORT = ["experiment=domain_adversarial", "metrics=[]", "logger=[]", "test=false", "monitor=loss/train", "mode=min"]
SHORT += ["trainer.limit_val_batches=0", "checkpoint.save_best=false", "trainer.max_steps=3", "data.batch_size=32"]
SHORT += ["optimizer=sgd", "optimizer.lr=0.1"]
SHORT += [f"model.layers.features.layers.{name}" for name in ("conv1.out_channels=4", "conv2.out_channels=4")]
LAYER = [*SHORT, "hooks=[]", "model.layers.reversal.weight=0.7"]
HOOK = [
    *SHORT, "hooks=[gradient_reversal]", "hooks.gradient_reversal.modules=[domain_hidden]",
    "hooks.gradient_reversal.weight=0.7", "model.layers.reversal={_target_: torch.nn.Identity}",
]  # fmt: skip
KINDS: dict[str, list[str]] = {
    "plain": [],
    "fp16, accumulated": ["precision=fp16", "trainer.accumulate_grad_batches=2"],
}
COMPILED = ["runtime.compile=true", "runtime.compile_backend=aot_eager"]


def weights(trained: Any) -> dict[str, torch.Tensor]:
    return trained.checkpoint()["state_dict"]


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.any_processor
def test_a_run_with_the_hook_is_bit_for_bit_one_with_the_layer(ranks: Any, kind: str) -> None:
    layer, hook = (ranks.train(*command, *KINDS[kind]) for command in (LAYER, HOOK))
    assert hook.losses == layer.losses
    found, expected = weights(hook), weights(layer)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def same_weights(found: Any, expected: Any) -> None:
    for name, tensor in weights(expected).items():
        torch.testing.assert_close(weights(found)[name], tensor, rtol=1e-4, atol=1e-6)


def test_several_ranks_change_nothing(ranks: Any) -> None:
    plain = ranks.train(*HOOK)
    shared = ranks.train(*HOOK, "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu", ranks=2)
    assert shared.losses == pytest.approx(plain.losses, rel=1e-5)
    same_weights(shared, plain)


def network() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 3), nn.Tanh(), nn.Linear(3, 2)).double()


def gradients(net: nn.Module, run: Any = None) -> list[torch.Tensor]:
    net.zero_grad()
    inputs = torch.randn(5, 4, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    (run or net)(inputs).square().sum().backward()
    return [parameter.grad.clone() for parameter in net.parameters()]


def test_hook_layer_and_function_have_one_gradient() -> None:
    net = network()
    plain = gradients(net)
    by_function = gradients(net, lambda x: net[2](gradient_reversal(net[1](net[0](x)), 0.3)))
    by_layer = gradients(net, nn.Sequential(net[0], net[1], Layer(weight=0.3), net[2]))
    hook = GradientReversal(modules=["2"], weight=0.3)
    hook.attach(net)
    by_hook = gradients(net)
    net.eval()
    with torch.no_grad():
        outputs = net(torch.ones(1, 4, dtype=torch.float64))
    hook.detach()
    assert torch.equal(outputs, net(torch.ones(1, 4, dtype=torch.float64)))
    for one, other in zip(by_function, by_layer, strict=True):
        assert torch.equal(one, other)
    for one, other in zip(by_function, by_hook, strict=True):
        assert torch.equal(one, other)
    for one, true in zip(by_hook[:2], plain[:2], strict=True):
        torch.testing.assert_close(one, -0.3 * true)
    for one, true in zip(by_hook[2:], plain[2:], strict=True):
        assert torch.equal(one, true)
    hook = GradientReversal(modules=["2"], weight=0.3, at="output")
    hook.attach(net)
    for one, true in zip(gradients(net), plain, strict=True):
        torch.testing.assert_close(one, -0.3 * true)


def step(index: int, net: nn.Module, total: int | None) -> Step:
    return Step(index=index, network=net, optimizers=[], batch_size=5, device=torch.device("cpu"), total_steps=total)


def test_the_schedule_sets_the_weight_of_each_step() -> None:
    net = network()
    plain = gradients(net)
    hook = GradientReversal(modules=["2"], weight=0.5, schedule="progressive")
    hook.attach(net)
    for index in (1, 2, 50, 100):
        hook.passed("batch", step(index, net, 100))
        weight = 0.5 * (2 / (1 + math.exp(-10 * (index - 1) / 100)) - 1)
        assert hook.after_step(step(index, net, 100)) == {"gradient_reversal/weight": pytest.approx(weight)}
        torch.testing.assert_close(gradients(net)[0], -weight * plain[0])
    hook.detach()
    hook.attach(net)
    with pytest.raises(RunError, match="the length of the run is not known"):
        hook.passed("batch", step(1, net, None))


@pytest.mark.any_processor
def test_a_compiled_run_with_the_schedule_is_a_plain_one(ranks: Any) -> None:
    scheduled = [*HOOK, "hooks.gradient_reversal.schedule=progressive"]
    plain, compiled = (ranks.train(*scheduled, *more) for more in ([], COMPILED))
    expected = {n: 0.7 * (2 / (1 + math.exp(-10 * (n - 1) / 3)) - 1) for n in (1, 2, 3)}
    assert plain.values["gradient_reversal/weight"] == pytest.approx(expected)
    assert compiled.losses == pytest.approx(plain.losses, rel=1e-6)
    same_weights(compiled, plain)


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (
            ["modules=[features]"],
            ["no gradient flows back through the input of features, for nothing before it learns"],
        ),
        (
            ["modules=[features,features.conv2]"],
            ["features and features.conv2, which lies in it"],
        ),
        (["modules=[domain_heads]"], ["Did you mean domain_head?"]),
        (["weight=-1"], ["weight: -1; expected a number, 0 or more"]),
        (["schedule=papers"], ["constant"]),
    ],
)
def test_what_cannot_be_is_told_before_the_run(
    tmp_path, monkeypatch, overrides: list[str], messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*HOOK, *(f"hooks.gradient_reversal.{one}" for one in overrides)]))
    for message in messages:
        assert message in str(caught.value)


def test_a_schedule_needs_a_run_with_an_end(tmp_path, monkeypatch) -> None:
    monkeypatch.chdir(tmp_path)
    endless = ["trainer.max_steps=-1", "trainer.max_epochs=-1", "trainer.max_time=10s"]
    with pytest.raises(ConfigError, match="progressive in a run without an end in steps"):
        exp.validate(exp.compose([*HOOK, *endless, "hooks.gradient_reversal.schedule=progressive"]))
