"""Tests of metrics over several batches, against scikit-learn and formulas."""

from __future__ import annotations

import math

import pytest
import torch
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torchmetrics import Metric

from exp.errors import RunError
from exp.objectives.metrics import AUROC, F1, Accuracy, BitsPerCharacter, Perplexity

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


def test_wrong_shapes_are_reported() -> None:
    with pytest.raises(RunError, match="Accuracy reads classes from the last axis"):
        Accuracy(num_classes=CLASSES).update(torch.zeros(5, CLASSES, 3), torch.zeros(5, 3, dtype=torch.int64))
