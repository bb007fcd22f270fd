"""Losses that torch.nn lacks in the form needed here: classes on the last axis, as attention and tables give them."""

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
    """What cross entropy and NLL share."""

    def __init__(self, *, class_weights: Weights | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.class_weights: Tensor | None
        if class_weights is None:
            self.class_weights = None
        else:
            # Not in the state dict: it is a setting, and lives in the config.
            weights = torch.tensor(class_weights, dtype=torch.float32)
            self.register_buffer("class_weights", weights, persistent=False)
        # No class number where nothing is ignored, so that a stray -100 in the data is an error.
        self.ignore_index = NOTHING if ignore_index is None else ignore_index
        self.reduction = "mean"

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """`[..., V]` and `[...]` as `[N, V]` and `[N]`."""
        require_classes_last(self, output, target)
        if output.dim() == 2:
            return output, target
        return output.flatten(end_dim=-2), target.flatten()


class CrossEntropy(_ClassesLast):
    """Cross entropy of scores (logits) `[..., V]` against class numbers `[...]`, int64.

    The formula and the mean over weighted targets are torch.nn.functional.cross_entropy's.

    label_smoothing: share of the probability that is spread evenly over all classes, 0 to 1.
    class_weights: V factors, one a class; None weighs all alike.
    ignore_index: a class number that does not count; None counts every target.
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
        """Raises: RunError where the shapes do not fit or the target is not of integers."""
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

    For a model that ends in LogSoftmax; with raw scores take cross_entropy.

    class_weights: V factors, one a class; None weighs all alike.
    ignore_index: a class number that does not count; None counts every target.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Raises: RunError where the shapes do not fit or the target is not of integers."""
        rows, classes = self._rows(output, target)
        return functional.nll_loss(
            rows, classes, weight=self.class_weights, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCEWithLogits(nn.BCEWithLogitsLoss):
    """torch's BCEWithLogitsLoss, with numbers for pos_weight, as a config has them.

    pos_weight: a factor on the positive answers, one for each question on the last axis; None weighs all alike.
    """

    def __init__(self, *, pos_weight: Sequence[float] | None = None) -> None:
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))
