"""Metrics of scores with the classes on the last axis, and metrics that are missing in torchmetrics."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torchmetrics import Metric
from torchmetrics.classification import MulticlassAccuracy, MulticlassAUROC, MulticlassF1Score

from exp.functions.at_least_float32 import at_least_float32, summing_dtype
from exp.objectives.loss_inputs import require_classes_last


class Accuracy(MulticlassAccuracy):
    """torchmetrics' MulticlassAccuracy of scores `[..., V]` for V classes against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class F1(MulticlassF1Score):
    """torchmetrics' MulticlassF1Score of scores `[..., V]` for V classes against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class AUROC(MulticlassAUROC):
    """torchmetrics' MulticlassAUROC of scores or probabilities `[..., V]` against class numbers `[...]`.

    Args:
        thresholds: The number of thresholds of an approximation, which needs constant memory. None computes the exact
            value, which needs 8 * (V + 1) bytes per sample until the end of the stage.
    """

    def update(self, output: Tensor, target: Tensor) -> None:
        rows, classes = _rows(self, output, target)
        super().update(rows.to(summing_dtype(rows.device)), classes)


class R2(Metric):
    """Coefficient of determination of outputs and targets, both `[B]` or `[B, D]`. The result is the mean over D.

    The metric sums the deviations of the targets from one of the targets, in float64. Sums of squares of large targets
    would be too inexact.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = True

    moments: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Rows of `[5, D]`: count, origin, sum of deviations from the origin, sum of squared deviations, sum of squared
        # residuals.
        self.add_state("moments", torch.zeros(5, 1), dist_reduce_fx=_join_moments)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch to the metric.

        Raises:
            ValueError: The shapes are neither both `[B]` nor both `[B, D]`.
        """
        if output.shape != target.shape or output.dim() not in (1, 2):
            raise ValueError(f"R2 needs equal shapes [B] or [B, D], not {list(output.shape)} and {list(target.shape)}")
        dtype = summing_dtype(target.device)
        output, target = (values.reshape(len(values), -1).to(dtype) for values in (output, target))
        origin, away = target[0], target - target[0]
        sums = away.sum(0), away.square().sum(0), (target - output).square().sum(0)
        batch = torch.stack([torch.full_like(origin, len(target)), origin, *sums])
        self.moments = _join_moments(torch.stack([self.moments.to(dtype).expand_as(batch), batch]))

    def compute(self) -> Tensor:
        """Return the coefficient of determination as a 0-d tensor, averaged over the D columns.

        If all targets in a column are equal, the value is 1 if all outputs are exact, and otherwise 0.

        Raises:
            ValueError: The metric has fewer than two samples.
        """
        count, _, first, second, residual = self.moments
        if count[0] < 2:
            raise ValueError("R2 needs at least two samples")
        total = second - first.square() / count
        return torch.where(total > 0, 1 - residual / total, (residual == 0).to(total.dtype)).mean()


def _join_moments(moments: Tensor) -> Tensor:
    """Return the moments of R2 over several sets of samples, `[5, D]`.

    Args:
        moments: The moments of each set, `[R, 5, D]` for R sets.
    """
    counts, origins, firsts, seconds, residuals = moments.unbind(1)
    origin = origins[counts[:, 0].argmax()]
    away = torch.where(counts > 0, origins - origin, 0.0)
    first = (firsts + counts * away).sum(0)
    second = (seconds + 2 * away * firsts + counts * away.square()).sum(0)
    return torch.stack([counts.sum(0), origin, first, second, residuals.sum(0)])


class BitsPerCharacter(Metric):
    """Mean cross entropy in bits, which is log2 of the perplexity.

    The metric compares scores `[..., V]` for V classes with class numbers `[...]`.

    Args:
        ignore_index: The class number to ignore. Default: -100.
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
        """Add the characters of a batch to the metric."""
        scores, classes = _rows(self, output, target)
        each = functional.cross_entropy(scores, classes, ignore_index=self.ignore_index, reduction="none")
        self.nats = self.nats + each.sum(dtype=summing_dtype(each.device))
        self.count += (classes != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the bits per character as a 0-d tensor."""
        return self.nats / (self.count * math.log(2.0))


class Perplexity(BitsPerCharacter):
    """Perplexity, which is the exponential of the mean cross entropy in nats.

    The metric compares scores `[..., V]` for V classes with class numbers `[...]`.
    """

    def compute(self) -> Tensor:
        """Return the perplexity as a 0-d tensor. The value is at least 1."""
        return (self.nats / self.count).exp()


def _rows(metric: Metric, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    require_classes_last(metric, output, target)
    # AUROC sorts scores and cross entropy sums them, and both are inexact in half precision.
    return output.flatten(end_dim=-2).to(at_least_float32(output.dtype)), target.flatten()
