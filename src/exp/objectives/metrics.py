"""Metrics of scores with the classes on the last axis, and those that torchmetrics lacks."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from exp.functions.at_least_float32 import at_least_float32
from exp.objectives.loss_inputs import require_classes_last


class Accuracy(MulticlassAccuracy):
    """torchmetrics' MulticlassAccuracy, of scores `[..., V]` against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class F1(MulticlassF1Score):
    """torchmetrics' MulticlassF1Score, of scores `[..., V]` against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class AUROC(MulticlassAUROC):
    """torchmetrics' MulticlassAUROC, of scores or probabilities `[..., V]` against class numbers `[...]`.

    thresholds: None is exact, and keeps 4 * (V + 2) bytes of each sample until the stage ends; a number approximates by
        so many thresholds, in constant memory.
    """

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class BitsPerCharacter(Metric):
    """Mean cross entropy in bits of scores `[..., V]` against class numbers `[...]`: log2 of the perplexity.

    ignore_index: a class number that does not count.
    """

    full_state_update = False
    higher_is_better = False
    is_differentiable = False

    nats: Tensor
    count: Tensor

    def __init__(self, *, ignore_index: int = -100, **settings: Any) -> None:
        super().__init__(**settings)
        self.ignore_index = ignore_index
        self.add_state("nats", torch.zeros(()), dist_reduce_fx="sum")
        self.add_state("count", torch.zeros((), dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        """Adds the characters of a batch."""
        scores, classes = _rows(self, output, target)
        self.nats += functional.cross_entropy(scores, classes, ignore_index=self.ignore_index, reduction="sum")
        self.count += (classes != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Bits for a character, 0-d."""
        return self.nats / (self.count * math.log(2.0))


class Perplexity(BitsPerCharacter):
    """Exponential of the mean cross entropy in nats, of scores `[..., V]` against class numbers `[...]`."""

    def compute(self) -> Tensor:
        """The perplexity, 0-d, 1 or more."""
        return (self.nats / self.count).exp()


def _rows(metric: Metric, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    require_classes_last(metric, output, target)
    # AUROC sorts and cross entropy sums: both lose digits in half precision.
    return output.flatten(end_dim=-2).to(at_least_float32(output.dtype)), target.flatten()
