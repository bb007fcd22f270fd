"""The hook retain_gradients against torch's retain_grad in float64: scaled losses, ranks, micro-batches, repeats."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn
from torch.nn.functional import cross_entropy

import exp
from exp.check.plan import resolve
from exp.construct import build_data, build_network
from exp.hooks.retain_gradients import RetainGradients
from exp.hooks.step import Step

pytestmark = pytest.mark.numeric

EACH = "hooks.retain_gradients.each_module=true"
COMMAND = ["hooks=[retain_gradients]", "hooks.retain_gradients.every_n_steps=2", EACH, "test=false", "metrics=[]"]
COMMAND += ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "monitor=loss/train"]
COMMAND += ["trainer.limit_val_batches=0", "checkpoint.save_best=false", "trainer.max_steps=3", "data.batch_size=32"]
TWO = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"]
FP16, TWICE = ["precision=fp16", "precision.scaler.init_scale=65536.0"], ["trainer.accumulate_grad_batches=2"]
KINDS: dict[str, tuple[list[str], int]] = {
    "plain": ([], 1),
    "everything": ([*TWO, *FP16, *TWICE], 2),
    "fsdp": (["strategy=fsdp", *TWO[1:], *TWICE], 2),
}


def first_step(overrides: list[str]) -> dict[str, torch.Tensor]:
    """The gradients of the outputs of all modules in the first step, by torch's own means."""
    config = exp.compose(overrides)
    plain = resolve(config).plain
    data = build_data(plain)
    net = build_network(plain, data.spec).double()
    loader = data.loader("train")
    loader.set_position(0, 0)
    micro = plain["trainer"]["accumulate_grad_batches"]
    outputs: dict[str, list[torch.Tensor]] = {}

    def keep(name: str, output: torch.Tensor) -> None:
        if output.requires_grad:  # not what the data alone goes into
            output.retain_grad()
            outputs.setdefault(name, []).append(output)

    for name, module in net.named_modules():
        module.register_forward_hook(lambda _, __, output, name=name: keep(name or "network", output))
    for _, batch in zip(range(micro), loader, strict=False):
        (cross_entropy(net(batch.data[0].double()), batch.data[1]) / micro).backward()
    return {name: torch.cat([one.grad.flatten() for one in several]) for name, several in outputs.items()}


@pytest.mark.parametrize("kind", KINDS)
def test_norms_are_those_of_one_whole_batch(ranks: Any, kind: str) -> None:
    more, count = KINDS[kind]
    expected = first_step([*COMMAND, *more, "launch.devices=auto", "strategy=single"])
    found = ranks.train(*COMMAND, *more, "logger=[]", ranks=count).values
    tags = {tag for tag in found if tag.startswith("gradients/")}
    assert tags == {f"gradients/output_norm/{name}" for name in expected}
    assert set(expected) == {"network", "hidden", "activation", "hidden2", "activation2", "head"}
    for name, gradient in expected.items():
        norm = found[f"gradients/output_norm/{name}"]
        assert set(norm) == {1, 2}
        assert norm[1] == pytest.approx(gradient.norm().item(), rel=1e-2 if "precision=fp16" in more else 1e-5)


def test_histograms_are_of_true_gradients(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    overrides = [*COMMAND, *FP16, *TWICE, "hooks.retain_gradients.histogram=true"]
    directory = Path(exp.fit(exp.compose(overrides)).directory) / "tensorboard"
    read = EventAccumulator(str(directory), size_guidance={"histograms": 0}).Reload()
    for name, gradient in first_step(overrides).items():
        found = read.Histograms(f"gradients/output_histogram/{name}")[0].histogram_value
        assert found.num == gradient.numel()
        assert (found.min, found.max) == pytest.approx((gradient.min().item(), gradient.max().item()), rel=1e-2)
        norm = read.Scalars(f"gradients/output_norm/{name}")[0].value
        assert norm == pytest.approx(gradient.norm().item(), rel=1e-2)


def test_gradients_that_a_term_takes_and_earlier_repeats_are_left_out() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(3, 2), nn.Linear(2, 1)).double()
    hook = RetainGradients(modules=["0"], each_module=True)
    hook.attach(net)
    step = Step(index=1, network=net, optimizers=[], batch_size=4, device=torch.device("cpu"))
    hook.passed("batch", step)
    for repeat in range(2):
        inputs = torch.full((4, 3), repeat + 1.0, dtype=torch.float64)
        with hook.engaged():
            hidden = net[0](inputs)
            output = net[1](hidden)
            torch.autograd.grad(output.sum(), hidden, retain_graph=True)
        hook.passed("forward", step)
        hidden.retain_grad()
        output.square().sum().backward()
        hook.passed("backward", step)
    values = hook.after_backward(step)
    assert values is not None
    assert values["gradients/output_norm/0"].item() == pytest.approx(hidden.grad.norm().item())
    assert math.isfinite(hidden.grad.norm().item())


def test_a_module_that_no_gradient_reaches_has_no_value() -> None:
    net = nn.ModuleDict({"used": nn.Linear(3, 2), "unused": nn.Linear(3, 2)})
    hook = RetainGradients(modules=["used", "unused"], each_module=True)
    hook.attach(net)
    step = Step(index=1, network=net, optimizers=[], batch_size=4, device=torch.device("cpu"))
    hook.passed("batch", step)
    with hook.engaged():
        output = net["used"](torch.ones(4, 3))
    hook.passed("forward", step)
    output.sum().backward()
    values = hook.after_backward(step)
    assert values is not None
    column = values.pop("gradients/output_norm")
    assert column.names == ("used",)
    assert {tag: value.item() for tag, value in values.items()} == {
        "gradients/output_norm/used": pytest.approx(math.sqrt(8))
    }
    assert column.values.tolist() == pytest.approx([math.sqrt(8)])
