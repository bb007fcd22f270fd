"""A seeded share of what torch's own databases hold through exp; all of it: python tests/models/against_torch.py"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest

from exp.models import vocabulary
from exp.models.left_out import reason_of

HERE = Path(__file__).parent


def share_of_torch(rank: int, *, here: str, seed: int) -> dict[str, Any]:
    """In a process of its own: the databases freeze switches of torch."""
    spec = importlib.util.spec_from_file_location("steps", Path(here) / "steps.py")
    steps = sys.modules["steps"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(steps)
    layers = steps.layers
    losses, databases = layers.load("losses"), layers.operators.load("torch_databases")
    names = sorted({name for one in databases.operators() for name in one.names})
    kinds = sorted(one.kind.__name__ for one in databases.modules())
    draw = random.Random(seed)
    rows = layers.operators.seen(most=2, only=draw.sample(names, 40))
    built = layers.seen(most=1, only=[*draw.sample(kinds, 10), "Conv1d", "InstanceNorm1d"])
    compared = losses.seen(most=2)
    optimizers = [kind.__name__ for kind, _ in databases.optimizers()]
    stepped = steps.seen(most=2, only=[*draw.sample(optimizers, 4), *draw.sample(list(steps.SCHEDULES), 4)])
    called = layers.load("lightning_callbacks").seen(
        only=["EarlyStopping", "StochasticWeightAveraging", "WeightAveraging"]
    )
    parts = (rows, built, compared, stepped, called)
    return {
        "names": names,
        "wrong": [line for part in parts for row in part for line in row.wrong],
        "equal": [sum(row.equal for row in part) for part in parts],
    }


@pytest.mark.numeric
def test_what_torchs_own_databases_hold_is_equal_or_left_out_with_a_reason(ranks) -> None:
    (found,) = ranks.call(share_of_torch, ranks=1, here=str(HERE), seed=3)
    assert found["wrong"] == []
    assert [count > least for count, least in zip(found["equal"], (40, 20, 40, 10, 2), strict=True)] == [True] * 5
    lasts = {name.rpartition(".")[2] for name in found["names"] if not name.startswith("torch.ops")}
    listed = set().union(*map(vocabulary.members, vocabulary.PREFIXES)) | vocabulary.METHODS | vocabulary.ATTRIBUTES
    assert sorted(name for name in lasts if name not in listed and reason_of(name) is None) == []
