"""Tests of metrics over several batches, compared with scikit-learn and formulas."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch
from sklearn.metrics import (
    accuracy_score,
    average_precision_score,
    f1_score,
    mean_absolute_error,
    mean_squared_error,
    r2_score,
    roc_auc_score,
)
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import BinaryAUROC, BinaryAveragePrecision, MulticlassAUROC
from torchmetrics.regression import MeanAbsoluteError, MeanSquaredError

from exp.errors import RunError
from exp.objectives.measures import Measure, as_measure
from exp.objectives.metrics import AUROC, F1, R2, Accuracy, BitsPerCharacter, Perplexity

pytestmark = pytest.mark.numeric

CLASSES = 4


def batches(*inner: int) -> list[tuple[torch.Tensor, torch.Tensor]]:
    generator = torch.Generator().manual_seed(0)
    shapes = [(size, *inner) for size in (16, 16, 5)]
    return [
        (torch.randn(*shape, CLASSES, generator=generator), torch.randint(CLASSES, shape, generator=generator))
        for shape in shapes
    ]


def value(metric: Metric, data: list[tuple[torch.Tensor, torch.Tensor]]) -> float:
    for output, target in data:
        metric.update(output, target)
    return metric.compute().item()


@pytest.mark.parametrize("inner", [(), (2, 3)], ids=["[B, V]", "[B, H, W, V]"])
def test_classification_metrics_equal_those_of_scikit_learn(inner: tuple[int, ...]) -> None:
    data = batches(*inner)
    scores = torch.cat([output.reshape(-1, CLASSES) for output, _ in data])
    labels = torch.cat([target.reshape(-1) for _, target in data])
    guesses = scores.argmax(-1)
    area = roc_auc_score(labels, scores.softmax(-1), multi_class="ovr", average="macro")
    assert value(Accuracy(num_classes=CLASSES, average="micro"), data) == pytest.approx(accuracy_score(labels, guesses))
    assert value(F1(num_classes=CLASSES), data) == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert value(AUROC(num_classes=CLASSES), data) == pytest.approx(area)
    assert value(AUROC(num_classes=CLASSES, thresholds=200), data) == pytest.approx(area, abs=0.01)


@pytest.mark.parametrize("inner", [(), (7,)], ids=["[B, V]", "[B, T, V]"])
def test_bits_per_character_and_perplexity_follow_their_formulas(inner: tuple[int, ...]) -> None:
    data = batches(*inner)
    scores = torch.cat([output.reshape(-1, CLASSES) for output, _ in data]).double()
    labels = torch.cat([target.reshape(-1) for _, target in data])
    nats = -(scores - scores.logsumexp(-1, keepdim=True))[torch.arange(len(labels)), labels]
    assert value(BitsPerCharacter(), data) == pytest.approx(nats.mean().item() / math.log(2), rel=1e-6)
    assert value(Perplexity(), data) == pytest.approx(math.exp(nats.mean().item()), rel=1e-5)
    kept = nats[labels != 0]
    assert value(BitsPerCharacter(ignore_index=0), data) == pytest.approx(kept.mean().item() / math.log(2), rel=1e-6)


def of_parts(measure: Measure, columns: dict[str, torch.Tensor], sizes: Sequence[int] = (64, 31, 1, 104)) -> Any:
    """Return the value of a measure over batches of several sizes."""
    for start, size in zip(itertools.accumulate(sizes, initial=0), sizes, strict=False):
        measure.update({name: column[start : start + size] for name, column in columns.items()})
    (number,) = measure.compute().values()
    return number.item()


SHIFTS = [(0.0, 1.0), (3e5, 10.0), (-1e8, 0.5), (1e-3, 1e-7), (0.0, 1e12)]


@pytest.mark.parametrize(("offset", "scale"), SHIFTS)
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
def test_regression_metrics_equal_scikit_learn_at_any_offset(offset: float, scale: float, dtype: torch.dtype) -> None:
    draw = torch.Generator().manual_seed(0)
    target = (offset + scale * torch.randn(200, 2, generator=draw, dtype=torch.float64)).to(dtype)
    output = (target + scale * torch.randn(200, 2, generator=draw, dtype=torch.float64) / 10).to(dtype)
    given = {"output": output, "target": target}
    known = target.double().numpy(), output.double().numpy()
    for name, metric, theirs in (
        ("r2", R2(), r2_score),
        ("mae", MeanAbsoluteError(), mean_absolute_error),
        ("mse", MeanSquaredError(), mean_squared_error),
    ):
        wanted = theirs(*known)
        assert of_parts(as_measure(name, metric), given) == pytest.approx(wanted, rel=1e-12), name


def two_shares(rank: Any, *, offset: float) -> float:
    draw = torch.Generator().manual_seed(0)
    target = offset + torch.randn(50, generator=draw, dtype=torch.float64)
    output = target + torch.randn(50, generator=draw, dtype=torch.float64) / 10
    measure = as_measure("r2", R2())
    if rank.global_rank < 2:  # the other ranks have no samples
        own = slice(0, 13) if rank.is_first else slice(13, 50)
        measure.update({"output": output[own], "target": target[own]})
    (number,) = measure.compute().values()
    return number.item()


def test_r2_over_ranks_is_that_of_all_samples(ranks: Any) -> None:
    draw = torch.Generator().manual_seed(0)
    target = 1e7 + torch.randn(50, generator=draw, dtype=torch.float64)
    output = target + torch.randn(50, generator=draw, dtype=torch.float64) / 10
    wanted = r2_score(target.numpy(), output.numpy())
    assert ranks.call(two_shares, ranks=3, offset=1e7) == pytest.approx([wanted] * 3, rel=1e-12)


@pytest.mark.parametrize(("offset", "scale"), [(0.0, 1.0), (20.0, 1.0), (-300.0, 5.0), (0.5, 1e-4)])
@pytest.mark.parametrize("are_scores", [True, False])
def test_areas_of_large_scores_equal_scikit_learn(offset: float, scale: float, are_scores: bool) -> None:
    draw = torch.Generator().manual_seed(0)
    target = torch.randint(2, (200,), generator=draw)
    scores = (offset + scale * (target + torch.randn(200, generator=draw))).float()
    given = {"output": scores, "target": target}
    for metric, theirs in ((BinaryAUROC(), roc_auc_score), (BinaryAveragePrecision(), average_precision_score)):
        measure = replace(as_measure("area", metric), are_scores=are_scores)
        assert of_parts(measure, given) == pytest.approx(theirs(target, scores), rel=1e-6)
    # Scores of classes that are far apart, of which all except one are far below the others.
    classes = torch.randint(CLASSES, (200,), generator=draw)
    scores = torch.randn(200, CLASSES, generator=draw).double() * scale + offset * functional.one_hot(classes, CLASSES)
    odds = scores - torch.stack(
        [scores[:, [d for d in range(CLASSES) if d != c]].logsumexp(1) for c in range(CLASSES)], 1
    )
    wanted = sum(roc_auc_score(classes == c, odds[:, c]) for c in range(CLASSES)) / CLASSES
    for metric in (AUROC(num_classes=CLASSES), MulticlassAUROC(num_classes=CLASSES)):
        measure = replace(as_measure("area", metric), are_scores=True)
        assert of_parts(measure, {"output": scores, "target": classes}) == pytest.approx(wanted, rel=1e-6)


def test_text_metrics_keep_the_digits_of_many_tokens() -> None:
    scores = torch.tensor([[1e6, 1e6 - 1, 1e6 + 0.5]]).expand(2**14, 3)
    metric = BitsPerCharacter()
    for _ in range(200):
        metric.update(scores, torch.zeros(2**14, dtype=torch.int64))
    wanted = -torch.tensor([0.0, -1.0, 0.5]).double().log_softmax(0)[0].item() / math.log(2)
    assert metric.compute().item() == pytest.approx(wanted, rel=1e-6)


def test_wrong_shapes_are_reported() -> None:
    with pytest.raises(RunError, match="Accuracy needs a target of shape"):
        Accuracy(num_classes=CLASSES).update(torch.zeros(5, CLASSES, 3), torch.zeros(5, 3, dtype=torch.int64))
