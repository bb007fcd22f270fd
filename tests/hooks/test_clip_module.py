"""The hook clip_module against clipping by hand in float64: scaled losses, ranks, micro-batches, phases, evaluation."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import exp
from exp.check.plan import resolve
from exp.construct import build_data, build_network
from exp.errors import ConfigError

pytestmark = pytest.mark.numeric

# The gradients of the hidden layer's output are about 0.03 in all, and 0.001 each.
LIMITS = {"norm": 0.004, "value": 0.0001}
STEPS = 3
SHORT = ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "logger=[]", "test=false"]
SHORT += ["metrics=[]", "monitor=loss/train", "trainer.limit_val_batches=0", "checkpoint.save_best=false"]
SHORT += ["optimizer=sgd", "optimizer.lr=0.5", "optimizer.momentum=0", "optimizer.weight_decay=0"]
SHORT += [f"trainer.max_steps={STEPS}", "data.batch_size=32"]
TWO = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"]
KINDS: dict[str, tuple[list[str], int]] = {
    "fp16": (["precision=fp16"], 1),
    "fsdp": (["strategy=fsdp", *TWO[1:]], 2),
    "everything": ([*TWO, "precision=fp16", "trainer.accumulate_grad_batches=2"], 2),
}


def command(at: str, algorithm: str, limit: float) -> list[str]:
    key = "hooks.clip_module"
    chosen = [f"{key}.modules=[hidden]", f"{key}.at={at}", f"{key}.algorithm={algorithm}", f"{key}.limit={limit}"]
    return [*SHORT, "hooks=[clip_module]", *chosen]


def clipped(gradient: torch.Tensor, algorithm: str, limit: float) -> torch.Tensor:
    if algorithm == "value":
        return gradient.clamp(-limit, limit)
    return gradient * min(1.0, limit / gradient.norm().item())


def by_hand(overrides: list[str], at: str, algorithm: str, limit: float, micro: int) -> dict[str, torch.Tensor]:
    """The weights after the same steps, with the clipping written out where the gradient of a layer is at hand."""
    config = exp.compose(overrides)
    plain = resolve(config).plain
    data = build_data(plain)
    net = build_network(plain, data.spec).double()
    layers = dict(net.named_children())
    loader = data.loader("train")
    loader.set_position(0, 0)
    batches = iter(loader)
    for _ in range(STEPS):
        net.zero_grad()
        for _ in range(micro):
            inputs, target = next(batches).data
            hidden = layers["hidden"](inputs.double().flatten(1))
            below = hidden.detach().requires_grad_()
            rest = [layers[name] for name in ("activation", "hidden2", "activation2", "head")]
            (cross_entropy(nn.Sequential(*rest)(below), target) / micro).backward()
            flowing = below.grad
            hidden.backward(clipped(flowing, algorithm, limit) if at == "output" else flowing)
        if at == "parameters":
            own = list(layers["hidden"].parameters())
            whole = torch.cat([parameter.grad.flatten() for parameter in own])
            parts = clipped(whole, algorithm, limit).split([parameter.numel() for parameter in own])
            for parameter, part in zip(own, parts, strict=True):
                parameter.grad = part.view_as(parameter)
        with torch.no_grad():
            for parameter in net.parameters():
                parameter -= 0.5 * parameter.grad
    return {name: parameter.detach() for name, parameter in net.named_parameters()}


@pytest.mark.parametrize(
    ("kind", "at", "algorithm"),
    [
        *[(kind, "output", "norm") for kind in KINDS],
        ("everything", "output", "value"),
        ("everything", "parameters", "norm"),
        ("everything", "parameters", "value"),
    ],
)
def test_the_weights_are_those_of_clipping_by_hand(ranks: Any, kind: str, at: str, algorithm: str) -> None:
    more, count = KINDS[kind]
    limit = LIMITS[algorithm] * (10 if at == "parameters" else 1)
    overrides = command(at, algorithm, limit)
    micro = 2 if "trainer.accumulate_grad_batches=2" in more else 1
    found = ranks.train(*overrides, *more, ranks=count).checkpoint()["state_dict"]
    expected = by_hand(overrides, at, algorithm, limit, micro)
    apart = by_hand(overrides, at, algorithm, 1e9, micro)
    tolerance = 5e-3 if "precision=fp16" in more else 1e-4
    for name, tensor in expected.items():
        if name.startswith("hidden."):
            moved = (apart[name] - tensor).norm()
            # What is compared is what the clipping did.
            assert (found[f"network.{name}"].double() - tensor).norm() < 0.05 * moved
        torch.testing.assert_close(found[f"network.{name}"].double(), tensor, rtol=tolerance, atol=tolerance)


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["hooks.clip_module.limit=0"], ["hooks.clip_module.limit: 0; expected a number above 0"]),
        (
            ["hooks.clip_module.at=parameters", "phases=[body_and_head]", "hooks.clip_module.modules=['*']"],
            ["Write phases.<name>.gradient_clip_val", "which lies in it"],
        ),
        (
            [*TWO, "runtime.compile=true", "runtime.compile_backend=aot_eager", "strategy.local_sgd.every_n_steps=2"],
            ["Or write algorithm=value", "ranks that step by themselves have no gradient in common"],
        ),
        (["strategy=pipeline", *TWO[1:]], ["ranks hold parts of one network"]),
        (["strategy=tensor_parallel", *TWO[1:]], ["Write at=parameters"]),
    ],
)
def test_what_cannot_be_is_told_before_the_run(
    tmp_path, monkeypatch, overrides: list[str], messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*command("output", "norm", 1.0), *overrides]))
    for message in messages:
        assert message in str(caught.value)
