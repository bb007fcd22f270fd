"""runtime.out_of_memory=halve: a run computes micro-batches that do not fit in parts, with the same steps."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import exp

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
    \"\"\"Has memory for a limited number of samples in the forward and in the backward of training.\"\"\"

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
    "trainer.max_epochs=1",
    "test=false",
    "trainer.limit_train_batches=7",
    "trainer.limit_val_batches=2",
    "data.batch_size=24",
    "metric_stages=[train,val,test]",
    "hooks=[gradients]",
    "security.allow=[narrow]",
    "trainer.log_every_n_steps=4",
]
HALVE = "runtime.out_of_memory=halve"
ACCUMULATED = ["trainer.accumulate_grad_batches=3"]


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
        pytest.param({"forward": 5}, [], 1e-9, id="forward", marks=pytest.mark.slow),
        pytest.param({"backward": 13}, ACCUMULATED, 1e-9, id="backward", marks=pytest.mark.slow),
        # In the middle of a window, whose first micro-batch has added its gradients already.
        pytest.param({"backward": 1, "starved": 5}, ACCUMULATED, 1e-9, id="within a window"),
        pytest.param(
            {"backward": 7, "starved": 2}, ["optimizer=sgd", "optimizer.lr=0.01"], 1e-6, id="float32",
            marks=pytest.mark.slow,
        ),
    ],
)  # fmt: skip
def test_halves_make_the_same_steps(ranks, limits, more: list[str], tolerance: float) -> None:
    overrides = [*SHORT, *(["+precision=fp64"] if tolerance < 1e-8 else []), *more]
    whole = ranks.train(*overrides, narrow())
    halved = ranks.train(*overrides, narrow(**limits), HALVE)
    compare(halved, whole, tolerance=tolerance)
    told = (halved.directory / "train.log").read_text()
    most = min(limit for name, limit in limits.items() if name != "starved")
    assert f"with {24} samples at a time (CUDA out of memory. Tried to allocate 2.00 GiB)" in told
    # Halved until it fits: 24, 12, 6, 3, 2, 1.
    assert f"at most {next(one for one in (12, 6, 3, 2, 1) if one <= most)} go through the network" in told


@pytest.mark.slow
@pytest.mark.any_processor
def test_a_run_that_cannot_be_halved_fails(tmp_path: Path) -> None:
    with pytest.raises(exp.RunError, match="Tried to allocate"):
        exp.fit(exp.compose([*SHORT, narrow(backward=0), HALVE]))


@pytest.mark.any_processor
def test_a_run_without_halving_names_the_hook_memory(tmp_path: Path) -> None:
    with pytest.raises(exp.RunError, match="The hook memory says in which layer"):
        exp.fit(exp.compose([*SHORT, narrow(forward=12)]))
