"""Operators, layers, losses, optimizers, schedules, callbacks and metrics of torch, Lightning and torchmetrics in exp.

The cases are those of torch's tests (torch_databases.py). A run tests a share of them, and all with --share 1.
"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torchmetrics

HERE = Path(__file__).parent
pytestmark = [pytest.mark.slow, pytest.mark.numeric]
METRICS = sorted({*torchmetrics.classification.__all__, *torchmetrics.regression.__all__})
# Metrics with each kind of state over ranks: sums, lists, values of each rank, and values that change their shape.
KINDS = ["MulticlassAccuracy", "MulticlassAUROC", "PearsonCorrCoef", "MeanSquaredError", "SpearmanCorrCoef"]


def load(name: str, here: str) -> Any:
    spec = importlib.util.spec_from_file_location(name, Path(here) / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def share_of_torch(rank: int, *, here: str, seed: int, part: float) -> dict[str, Any]:
    """Compare in a separate process, because importing torch's databases freezes switches of torch."""
    steps = load("steps", here)
    layers = steps.layers
    losses, databases = layers.load("losses"), layers.operators.load("torch_databases")
    draw = random.Random(seed)

    def some(names: list[str], *always: str) -> list[str]:
        return [*draw.sample(names, max(1, round(part * len(names)))), *always]

    names = sorted({name for one in databases.operators() for name in one.names})
    kinds = sorted(one.kind.__name__ for one in databases.modules())
    optimizers = [kind.__name__ for kind, _ in databases.optimizers()]
    parts = (
        layers.operators.seen(most=2, only=some(names)),
        layers.seen(most=1, only=some(kinds, "Conv1d", "InstanceNorm1d")),
        losses.seen(most=2),
        steps.seen(most=2, only=[*some(optimizers), *some(list(steps.SCHEDULES))]),
        layers.load("lightning_callbacks").seen(only=["EarlyStopping", "ModelCheckpoint"]),
    )
    return {
        "wrong": [line for part in parts for row in part for line in row.wrong],
        "equal": [sum(row.equal for row in part) for part in parts],
    }


def test_torchs_own_cases_are_equal_or_left_out(ranks, share) -> None:
    (found,) = ranks.call(share_of_torch, ranks=1, here=str(HERE), seed=share.seed, part=share.part)
    assert found["wrong"] == [], f"seed {share.seed}"
    assert all(found["equal"]), found["equal"]


def share_of_torchmetrics(rank: Any, *, here: str, only: list[str], most: int) -> dict[str, Any]:
    rows = load("measures", here).seen(most=most, only=only)
    return {
        "wrong": [f"{row.name}: {line}" for row in rows for line in row.wrong],
        "equal": sum(row.equal for row in rows),
        "silent": [row.name for row in rows if not row.equal + row.refused.total() + row.by_torch.total()],
        "seen": len({row.name for row in rows}),
    }


@pytest.mark.parametrize("count", [1, 2])
def test_metrics_equal_torchmetrics_by_hand_or_are_refused(ranks, share, count) -> None:
    only = sorted({*KINDS, *share.random().sample(METRICS, share.count(len(METRICS)))})
    found = ranks.call(share_of_torchmetrics, ranks=count, here=str(HERE), only=only, most=count)
    assert [one["wrong"] for one in found] == [[]] * count, f"seed {share.seed}"
    assert [one["silent"] for one in found] == [[]] * count
    assert found[0]["seen"] == len(only)
    assert len({one["equal"] for one in found}) == 1
