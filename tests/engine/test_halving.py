"""runtime.out_of_memory=halve: a run whose micro-batches do not fit goes on in parts, and its steps stay the same."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import exp
from exp.errors import ConfigError

pytestmark = pytest.mark.numeric

NARROW = """
import torch
from torch import nn


class Refuse(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, limit):
        ctx.limit = limit
        return x.clone()

    @staticmethod
    def backward(ctx, gradient):
        if len(gradient) > ctx.limit:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return gradient, None


class Narrow(nn.Module):
    \"\"\"Has room for so many samples in training, and in the backward.\"\"\"

    def __init__(self, *, forward: int = 1000, backward: int = 1000, starved: int | None = None) -> None:
        super().__init__()
        self.limits, self.starved, self.calls = (forward, backward), starved, 0

    def forward(self, x):
        if not self.training:
            return x
        self.calls += 1
        limits = self.limits if self.starved is None or self.calls >= self.starved else (1000, 1000)
        if len(x) > limits[0]:
            raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
        return Refuse.apply(x, limits[1])
"""
SHORT = [
    "trainer.max_epochs=2",
    "trainer.limit_train_batches=7",
    "trainer.limit_val_batches=2",
    "data.batch_size=24",
    "metric_stages=[train,val,test]",
    "hooks=[gradients]",
    "security.allow=[narrow]",
    "trainer.log_every_n_steps=4",
]
HALVE = "runtime.out_of_memory=halve"


def narrow(**limits: int) -> str:
    given = "".join(f", {name}: {value}" for name, value in limits.items())
    return f"+model.layers.narrow={{_target_: narrow.Narrow{given}}}"


@pytest.fixture(autouse=True)
def module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "narrow.py").write_text(NARROW)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def compare(found: Any, expected: Any, *, tolerance: float) -> None:
    for name, tensor in expected.checkpoint()["state_dict"].items():
        torch.testing.assert_close(found.checkpoint()["state_dict"][name], tensor, rtol=tolerance, atol=tolerance)
    assert found.values.keys() == expected.values.keys()
    for tag, values in expected.values.items():
        assert found.values[tag] == pytest.approx(values, rel=100 * tolerance, abs=tolerance), tag
    assert found.report["steps"] == expected.report["steps"]


@pytest.mark.parametrize(
    ("limits", "more", "tolerance"),
    [
        ({"forward": 5}, [], 1e-9),
        ({"backward": 13}, ["trainer.accumulate_grad_batches=3"], 1e-9),
        # In the middle of a window, whose first micro-batch has left its gradients already.
        ({"backward": 1, "starved": 5}, ["trainer.accumulate_grad_batches=3", "+precision=fp64"], 1e-9),
        ({"backward": 7, "starved": 2}, ["optimizer=sgd", "optimizer.lr=0.01"], 1e-6),
    ],
    ids=["forward", "backward", "within a window", "float32"],
)
def test_the_run_is_that_of_whole_micro_batches(ranks, caplog, limits, more: list[str], tolerance: float) -> None:
    overrides = [*SHORT, *(["+precision=fp64"] if tolerance < 1e-8 else []), *more]
    overrides = list(dict.fromkeys(overrides))
    whole = ranks.train(*overrides, narrow())
    halved = ranks.train(*overrides, narrow(**limits), HALVE)
    compare(halved, whole, tolerance=tolerance)
    told = (halved.directory / "train.log").read_text()
    most = min(limit for name, limit in limits.items() if name != "starved")
    assert f"with {24} samples at a time (CUDA out of memory. Tried to allocate 2.00 GiB)" in told
    # Halved until it fits: 24, 12, 6, 3, 2, 1.
    assert f"at most {next(one for one in (12, 6, 3, 2, 1) if one <= most)} go through the network" in told


@pytest.mark.any_processor
def test_one_sample_that_is_too_much_ends_the_run(tmp_path: Path) -> None:
    with pytest.raises(exp.RunError, match="Tried to allocate"):
        exp.fit(exp.compose([*SHORT, narrow(backward=0), HALVE]))


@pytest.mark.any_processor
def test_stop_is_what_happens_where_nobody_chose(tmp_path: Path) -> None:
    with pytest.raises(exp.RunError, match="The hook memory says in which layer"):
        exp.fit(exp.compose([*SHORT, narrow(forward=12)]))


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["model=resnet"], "batch norm, whose result depends on the samples that it sees together"),
        (["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"], "over several ranks"),
        (["objective.cross_entropy.loss.ignore_index=3"], "divides by weights of a whole batch"),
        (["runtime.steps_per_execution=1"], "Lightning's own loop"),
        (["phases=[body_and_head]"], "phases, which run several passes"),
    ],
)
def test_what_is_not_the_same_in_parts_is_refused(overrides: list[str], says: str) -> None:
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*overrides, HALVE]))
    assert "runtime.out_of_memory: halve with" in str(caught.value)
    assert says in str(caught.value)
    assert "Write runtime.out_of_memory=stop" in str(caught.value)
