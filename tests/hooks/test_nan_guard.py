"""nan_guard ends the run before the bad step, and its error has the module."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from exp.errors import RunError
from exp.extras.debugging.step_trace import Tracer

MODEL = (
    "model={_target_: exp.models.containers.SequentialModel, layers: {flatten: {_target_: torch.nn.Flatten}, "
    "hidden: {_target_: torch.nn.LazyLinear, out_features: 16}, norm: {_target_: torch.nn.BatchNorm1d, "
    "num_features: 16}, fragile: {_target_: fragile.Fragile, at: 4, where: forward}, "
    "head: {_target_: torch.nn.LazyLinear, out_features: 10}}}"
)
BACKWARD = "model.layers.fragile.where=backward"
PARAMETERS = ("hidden.weight", "hidden.bias", "norm.weight", "norm.bias", "head.weight", "head.bias")
KEEP = "+callbacks.keeper={_target_: fragile.Keeper}"


class Run:
    """Run that may have failed."""

    def __init__(self, directory: Path, error: RunError | None) -> None:
        self.directory, self.error = directory, error

    def load(self, name: str) -> dict[str, Any]:
        return torch.load(self.directory / name, weights_only=True)

    def weights(self) -> dict[str, torch.Tensor]:
        state = self.load("checkpoints/last.ckpt")["state_dict"]
        return {name.removeprefix("network."): one for name, one in state.items()}


@pytest.fixture
def run(fit, in_tmp: Path, monkeypatch: pytest.MonkeyPatch):
    """A function that trains the fragile network."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    count = iter(range(100))

    def train(*overrides: str) -> Run:
        directory = in_tmp / f"guarded{next(count)}"
        given = ["hooks=[nan_guard]", MODEL, "security.allow=[fragile]", "data.batch_size=16"]
        error = None
        try:
            fit(*given, "trainer.max_steps=9", f"hydra.run.dir={directory}", *overrides)
        except RunError as raised:
            error = raised
        return Run(directory, error)

    return train


def equal(one: Any, other: Any) -> bool:
    if isinstance(one, torch.Tensor):
        return torch.equal(one, other)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(equal(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple):
        return len(one) == len(other) and all(map(equal, one, other))
    return one == other


@pytest.mark.parametrize("where", ["forward", "backward"])
def test_the_run_ends_before_the_bad_step(run, where: str) -> None:
    at = f"model.layers.fragile.where={where}"
    bad = run(at, KEEP)
    message = str(bad.error)
    if where == "forward":
        assert "step 4: the loss is nan; the run ends before the optimizer's step" in message
        assert (
            "The first module is `fragile` (Fragile), in the forward: its inputs were finite, its output is not."
            in message
        )
    else:
        assert "step 4: a gradient is not finite; the run ends before the optimizer's step" in message
        assert "The first module is `fragile` (Fragile), in the backward: SqrtBackward0 returned a gradient" in message
    report = json.loads((bad.directory / "report.json").read_text())
    assert report["status"] == "failed"
    assert "`fragile` (Fragile)" in report["error"]["message"]
    # The bad step has not changed parameters and optimizer.
    before = run(at, "trainer.max_steps=3", "hooks=[]")
    weights = before.weights()
    kept = bad.load("kept.pt")
    assert all(torch.equal(kept["network"][name], weights[name]) for name in PARAMETERS)
    state = before.load("checkpoints/last.ckpt")["optimizer_states"][0]["state"]
    assert equal(kept["optimizers"][0]["state"], state)


def test_the_bad_micro_batch_is_named(run) -> None:
    bad = run("trainer.accumulate_grad_batches=3", "model.layers.fragile.at=5")
    assert isinstance(bad.error, RunError)
    assert bad.error.exit_status == 1
    assert "step 2: the loss is nan" in str(bad.error)
    assert "It is micro-batch 2 of 3." in str(bad.error)


def test_the_phase_and_its_repeat_are_named(run) -> None:
    # Each step has the forwards head, head, body. So the fifth forward is the second one of head in step 2.
    phases = ["phases=[body_and_head]", "phases.head.repeats=2", "phases.body.every_n_steps=1"]
    bad = run(*phases, "phases.body.parameters=[hidden.*,norm.*]", "model.layers.fragile.at=5")
    assert "step 2: the loss is nan in phase head; the run ends" in str(bad.error)


def test_skipped_steps_are_no_error_until_scale_vanishes(run) -> None:
    assert run("precision=fp16", BACKWARD, "trainer.max_steps=6").error is None
    lost = run("precision=fp16")
    assert "step 4: the loss is nan" in str(lost.error)
    # Each step has infinite gradients: the scale falls from 2 to 1 and to 0.5, which is too small.
    falling = ["precision.scaler.init_scale=2", "+precision.keep={fragile: fp32}", "model.layers.fragile.at=99"]
    broken = run("precision=fp16", *falling, "+hooks.broken={_target_: fragile.Broken}")
    assert "step 3: a gradient is not finite" in str(broken.error)


@pytest.mark.slow
@pytest.mark.parametrize(
    "more", [["strategy=layer_split"], ["runtime.compile=true", "runtime.compile_backend=aot_eager"]]
)
def test_the_module_is_named_in_other_runs(run, more: list[str]) -> None:
    bad = run(*more, BACKWARD, "trainer.gradient_clip_val=1.0")
    assert "The first module is `fragile` (Fragile), in the backward: SqrtBackward0" in str(bad.error)


def test_the_bad_rank_is_named_by_all_ranks(ranks, tmp_path) -> None:
    # One sample overflows in the first layer, only on the rank that has this sample.
    inputs = torch.rand(64, 6, generator=torch.Generator().manual_seed(0))
    inputs[[7, 20, 40]] = 3e38
    torch.save({"input": inputs, "target": torch.arange(64) % 2}, tmp_path / "samples.pt")
    data = ["data=tensors", "data.dataset.path=samples.pt", "data.batch_size=8", f"data_dir={tmp_path}"]
    with pytest.raises(AssertionError) as caught:
        ranks.train("hooks=[nan_guard]", *data, "strategy=ddp", "launch.devices=2", "test=false", ranks=2)
    message = str(caught.value)
    named = [message.count(f"on rank {rank} of 2; the run ends") for rank in (0, 1)]
    assert min(named) == 0, "only one rank may report the bad step"
    assert max(named) >= 2, "the errors of both ranks must name the bad rank"
    assert "The first module is `hidden` (Linear), in the forward" in message


# --- the origin ---


class Log(nn.Module):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x.log()


class Masked(nn.Module):
    """Network with intended infinities: masked scores, as in attention, and an infinite logarithm that is not used."""

    def __init__(self) -> None:
        super().__init__()
        self.scores, self.softmax, self.log = nn.Identity(), nn.Softmax(-1), Log()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weights = self.softmax(self.scores(x.masked_fill(x > 0, -torch.inf)))
        return torch.where(x > 0, self.log(x.clamp(min=0)), weights)


class Residual(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.relu, self.identity = nn.Linear(3, 3), nn.ReLU(inplace=True), nn.Identity()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.relu(self.first(x))
        return self.identity(y) + y + (y * 0).sqrt()


@pytest.mark.parametrize(
    ("network", "x", "name", "operator"),
    [
        # The loss is finite. The logarithm of 0 is not used in the forward, and its gradient is infinite.
        (Masked(), [[1.0, -2.0, -3.0]], "`log` (Log)", "LogBackward0"),
        # The square root is in the forward of the network itself.
        (Residual(), [[1.0, 1.0, 1.0], [1.0, 1.0, 1.0]], "the network itself (Residual)", "SqrtBackward0"),
    ],
)
def test_the_origin_is_the_first_unintended_infinity(network, x, name: str, operator: str) -> None:
    inputs = torch.tensor(x, requires_grad=True)
    tracer = Tracer(network, nn.Identity())
    with tracer.forward():
        loss = network(inputs).sum()
    tracer.backward(loss)
    torch.autograd.grad(loss, inputs)
    first = tracer.first(is_lost=not loss.isfinite())
    assert first.startswith(f"The first module is {name}, in the backward: {operator} returned")
