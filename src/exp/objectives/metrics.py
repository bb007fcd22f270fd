"""Metrics of scores with the classes on the last axis, and metrics that torchmetrics does not have."""

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
    """torchmetrics' MulticlassAccuracy of scores `[..., V]` against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class F1(MulticlassF1Score):
    """torchmetrics' MulticlassF1Score of scores `[..., V]` against class numbers `[...]`."""

    def update(self, output: Tensor, target: Tensor) -> None:
        super().update(*_rows(self, output, target))


class AUROC(MulticlassAUROC):
    """torchmetrics' MulticlassAUROC of scores or probabilities `[..., V]` against class numbers `[...]`.

    Args:
        thresholds: The number of thresholds of an approximation in constant memory. None computes the exact value, and
            needs 8 * (V + 1) bytes per sample until the stage ends.
    """

    def update(self, output: Tensor, target: Tensor) -> None:
        rows, classes = _rows(self, output, target)
        super().update(rows.to(summing_dtype(rows.device)), classes)


class R2(Metric):
    """Coefficient of determination of outputs and targets `[B]` or `[B, D]`. The result is the mean over D.

    The metric sums deviations from one of the targets, in float64, because sums of squares of large targets would lose
    the deviations to rounding.
    """

    full_state_update = False
    higher_is_better = True
    is_differentiable = True

    moments: Tensor

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        # Count, origin, sums of deviations from the origin, of their squares, and of squared residuals: `[5, D]`.
        self.add_state("moments", torch.zeros(5, 1), dist_reduce_fx=_join_moments)

    def update(self, output: Tensor, target: Tensor) -> None:
        """Add a batch. Raise ValueError unless both shapes are `[B]` or both are `[B, D]`."""
        if output.shape != target.shape or output.dim() not in (1, 2):
            raise ValueError(f"R2 needs equal shapes [B] or [B, D], not {list(output.shape)} and {list(target.shape)}")
        dtype = summing_dtype(target.device)
        output, target = (values.reshape(len(values), -1).to(dtype) for values in (output, target))
        origin, away = target[0], target - target[0]
        sums = away.sum(0), away.square().sum(0), (target - output).square().sum(0)
        batch = torch.stack([torch.full_like(origin, len(target)), origin, *sums])
        self.moments = _join_moments(torch.stack([self.moments.to(dtype).expand_as(batch), batch]))

    def compute(self) -> Tensor:
        """Return the mean over outputs, 0-d.

        If all targets are equal, the value of an output is 1 if it is exact, otherwise 0.
        """
        count, _, first, second, residual = self.moments
        if count[0] < 2:
            raise ValueError("R2 needs at least two samples")
        total = second - first.square() / count
        return torch.where(total > 0, 1 - residual / total, (residual == 0).to(total.dtype)).mean()


def _join_moments(moments: Tensor) -> Tensor:
    """Return the moments of R2 over all sets of samples, `[5, D]`.

    Args:
        moments: The moments of each of R sets, `[R, 5, D]`.
    """
    counts, origins, firsts, seconds, residuals = moments.unbind(1)
    origin = origins[counts[:, 0].argmax()]
    away = torch.where(counts > 0, origins - origin, 0.0)
    first = (firsts + counts * away).sum(0)
    second = (seconds + 2 * away * firsts + counts * away.square()).sum(0)
    return torch.stack([counts.sum(0), origin, first, second, residuals.sum(0)])


class BitsPerCharacter(Metric):
    """Mean cross entropy in bits of scores `[..., V]` against class numbers `[...]`. It is log2 of the perplexity.

    Args:
        ignore_index: The class number to ignore, default -100.
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
        """Add the characters of a batch."""
        scores, classes = _rows(self, output, target)
        each = functional.cross_entropy(scores, classes, ignore_index=self.ignore_index, reduction="none")
        self.nats = self.nats + each.sum(dtype=summing_dtype(each.device))
        self.count += (classes != self.ignore_index).sum()

    def compute(self) -> Tensor:
        """Return the bits per character, 0-d."""
        return self.nats / (self.count * math.log(2.0))


class Perplexity(BitsPerCharacter):
    """Exponential of the mean cross entropy in nats of scores `[..., V]` against class numbers `[...]`."""

    def compute(self) -> Tensor:
        """Return the perplexity, 0-d, 1 or more."""
        return (self.nats / self.count).exp()


def _rows(metric: Metric, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
    require_classes_last(metric, output, target)
    # AUROC sorts and cross entropy sums: both lose digits in half precision.
    return output.flatten(end_dim=-2).to(at_least_float32(output.dtype)), target.flatten()
