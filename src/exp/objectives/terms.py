"""Losses with the classes on the last axis. The losses of torch.nn expect classes on axis 1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge, Interval
from torch import Tensor, nn
from torch.nn import functional

from exp.objectives.loss_inputs import require_classes_last

Weights = Sequence[Annotated[float, Ge(0)]]
NOTHING = torch.iinfo(torch.int64).min


class _ClassesLast(nn.Module):
    """Base class of CrossEntropy and NLL, with class weights, ignored targets and flattened axes."""

    def __init__(self, *, class_weights: Weights | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.class_weights: Tensor | None
        if class_weights is None:
            self.class_weights = None
        else:
            # The weights are not in the state dict, because they are set in the config.
            weights = torch.tensor(class_weights, dtype=torch.float32)
            self.register_buffer("class_weights", weights, persistent=False)
        # If no label is ignored, ignore_index is a number that no label has. torch's default would ignore a -100 in the
        # data.
        self.ignore_index = NOTHING if ignore_index is None else ignore_index
        self.reduction = "mean"

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[..., V]` as `[N, V]`, and the target `[...]` as `[N]`."""
        require_classes_last(self, output, target)
        if output.dim() == 2:
            return output, target
        return output.flatten(end_dim=-2), target.flatten()


class CrossEntropy(_ClassesLast):
    """Cross entropy of scores (logits) `[..., V]` against class numbers `[...]`, int64.

    The formula, and the mean over weighted targets, are those of torch.nn.functional.cross_entropy.

    Args:
        label_smoothing: The probability that is distributed evenly over all classes, 0 (default) to 1.
        class_weights: V factors, one for each class; None for equal weights.
        ignore_index: The label to ignore; None to ignore no label.
    """

    def __init__(
        self,
        *,
        label_smoothing: Annotated[float, Interval(ge=0, le=1)] = 0.0,
        class_weights: Weights | None = None,
        ignore_index: int | None = None,
    ) -> None:
        super().__init__(class_weights=class_weights, ignore_index=ignore_index)
        self.label_smoothing = label_smoothing

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-d. Raise RunError if the shapes do not match or the targets are not integers."""
        rows, classes = self._rows(output, target)
        return functional.cross_entropy(
            rows,
            classes,
            weight=self.class_weights,
            ignore_index=self.ignore_index,
            reduction=self.reduction,
            label_smoothing=self.label_smoothing,
        )


class NLL(_ClassesLast):
    """Negative log likelihood of log probabilities `[..., V]` against class numbers `[...]`, int64.

    This loss is for models that end in LogSoftmax. For scores, use CrossEntropy.

    Args:
        class_weights: V factors, one for each class; None for equal weights.
        ignore_index: The label to ignore; None to ignore no label.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss, 0-d. Raise RunError if the shapes do not match or the targets are not integers."""
        rows, classes = self._rows(output, target)
        return functional.nll_loss(
            rows, classes, weight=self.class_weights, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCEWithLogits(nn.BCEWithLogitsLoss):
    """torch's BCEWithLogitsLoss that accepts a list of numbers as pos_weight.

    Args:
        pos_weight: The factors of positive targets, one for each position of the last axis; None for equal weights.
    """

    def __init__(self, *, pos_weight: Sequence[float] | None = None) -> None:
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))
