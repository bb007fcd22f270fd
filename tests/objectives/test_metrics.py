"""Metrics over several batches, against scikit-learn and formulas on all of them at once."""

from __future__ import annotations

import math
from pathlib import Path

import pytest
import torch
from omegaconf import OmegaConf
from sklearn.metrics import accuracy_score, f1_score, roc_auc_score
from torchmetrics import Metric

from exp.errors import RunError
from exp.objectives.metrics import AUROC, F1, Accuracy, BitsPerCharacter, Perplexity

pytestmark = pytest.mark.numeric

CLASSES = 4
CONF = Path(__file__).parents[2] / "conf"


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


@pytest.mark.parametrize("inner", [(), (3,), (2, 3)], ids=["[B, V]", "[B, T, V]", "[B, H, W, V]"])
def test_classification_metrics_against_scikit_learn(inner: tuple[int, ...]) -> None:
    data = batches(*inner)
    scores = torch.cat([output.reshape(-1, CLASSES) for output, _ in data])
    labels = torch.cat([target.reshape(-1) for _, target in data])
    guesses = scores.argmax(-1)
    area = roc_auc_score(labels, scores.softmax(-1), multi_class="ovr", average="macro")
    assert value(Accuracy(num_classes=CLASSES, average="micro"), data) == pytest.approx(accuracy_score(labels, guesses))
    assert value(F1(num_classes=CLASSES), data) == pytest.approx(f1_score(labels, guesses, average="macro"))
    assert value(AUROC(num_classes=CLASSES), data) == pytest.approx(area)
    (option,) = OmegaConf.load(CONF / "metrics" / "auroc.yaml").values()
    assert option.thresholds is None  # exact where nobody says otherwise
    assert value(AUROC(num_classes=CLASSES, thresholds=200), data) == pytest.approx(area, abs=0.01)


@pytest.mark.parametrize("inner", [(), (7,)], ids=["[B, V]", "[B, T, V]"])
def test_bits_per_character_and_perplexity_are_their_formulas(inner: tuple[int, ...]) -> None:
    data = batches(*inner)
    scores = torch.cat([output.reshape(-1, CLASSES) for output, _ in data]).double()
    labels = torch.cat([target.reshape(-1) for _, target in data])
    nats = -(scores - scores.logsumexp(-1, keepdim=True))[torch.arange(len(labels)), labels]
    assert value(BitsPerCharacter(), data) == pytest.approx(nats.mean().item() / math.log(2), rel=1e-6)
    assert value(Perplexity(), data) == pytest.approx(math.exp(nats.mean().item()), rel=1e-5)
    kept = nats[labels != 0]
    assert value(BitsPerCharacter(ignore_index=0), data) == pytest.approx(kept.mean().item() / math.log(2), rel=1e-6)


def test_a_uniform_guess_costs_log2_of_the_classes() -> None:
    metric = BitsPerCharacter()
    metric.update(torch.zeros(2, 3, 8, dtype=torch.bfloat16), torch.zeros(2, 3, dtype=torch.int64))
    assert metric.compute().item() == pytest.approx(3.0)
    metric.reset()
    assert metric.count == 0


def test_a_shape_that_does_not_fit_is_said() -> None:
    with pytest.raises(RunError, match="Accuracy reads classes from the last axis"):
        Accuracy(num_classes=CLASSES).update(torch.zeros(5, CLASSES, 3), torch.zeros(5, 3, dtype=torch.int64))
