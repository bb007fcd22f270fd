"""A share of torchmetrics' metrics through configs; all of them: python tests/models/against_torch.py"""

from __future__ import annotations

import importlib.util
import random
import sys
from pathlib import Path
from typing import Any

import pytest
import torchmetrics

HERE = Path(__file__).parent
EVERY = [*torchmetrics.classification.__all__, *torchmetrics.regression.__all__]
# Whose states over ranks are of each kind: sums, lists, of each rank apart, of another shape than at first.
KINDS = ["MulticlassAccuracy", "MulticlassAUROC", "PearsonCorrCoef", "MeanSquaredError", "SpearmanCorrCoef"]


def share_of_torchmetrics(rank: Any, *, here: str, only: list[str], most: int) -> dict[str, Any]:
    spec = importlib.util.spec_from_file_location("measures", Path(here) / "measures.py")
    measures = sys.modules["measures"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(measures)
    rows = measures.seen(most=most, only=only)
    return {
        "wrong": [f"{row.name}: {line}" for row in rows for line in row.wrong],
        "equal": sum(row.equal for row in rows),
        "silent": [row.name for row in rows if not row.equal + row.refused.total() + row.by_torch.total()],
        "seen": len({row.name for row in rows}),
    }


@pytest.mark.numeric
def test_every_metric_is_that_of_torchmetrics_by_hand_or_refused_before_the_run(ranks) -> None:
    (found,) = ranks.call(share_of_torchmetrics, ranks=1, here=str(HERE), only=EVERY, most=1)
    assert found["wrong"] == []
    assert found["silent"] == []
    assert found["seen"] == len(EVERY)
    assert found["equal"] > 150


@pytest.mark.numeric
def test_two_ranks_measure_as_one_does_also_where_one_of_them_has_no_sample(ranks) -> None:
    only = sorted({*KINDS, *random.Random(2).sample(EVERY, 8)})
    both = ranks.call(share_of_torchmetrics, ranks=2, here=str(HERE), only=only, most=2)
    assert [found["wrong"] for found in both] == [[], []]
    assert both[0]["equal"] == both[1]["equal"] > 20
