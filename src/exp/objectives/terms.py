"""Losses with the classes on the last axis, which torch.nn expects on axis 1."""

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
    """Base of cross entropy and NLL: class weights, ignored targets and flattened axes."""

    def __init__(self, *, class_weights: Weights | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.class_weights: Tensor | None
        if class_weights is None:
            self.class_weights = None
        else:
            # Not in the state dict, because it is a setting of the config.
            weights = torch.tensor(class_weights, dtype=torch.float32)
            self.register_buffer("class_weights", weights, persistent=False)
        # If nothing is ignored, no class has this number, so that a -100 in the data is an error.
        self.ignore_index = NOTHING if ignore_index is None else ignore_index
        self.reduction = "mean"

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return `[..., V]` and `[...]` as `[N, V]` and `[N]`."""
        require_classes_last(self, output, target)
        if output.dim() == 2:
            return output, target
        return output.flatten(end_dim=-2), target.flatten()


class CrossEntropy(_ClassesLast):
    """Cross entropy of scores (logits) `[..., V]` against class numbers `[...]`, int64.

    The formula and the mean over weighted targets are torch.nn.functional.cross_entropy's.

    Args:
        label_smoothing: The share of the probability that is spread evenly over all classes, 0 (default) to 1.
        class_weights: V factors, one per class. None: equal weights.
        ignore_index: A class number to ignore. None: every target counts.
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
        """Return the loss. Raise RunError if the shapes do not fit or the targets are not integers."""
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

    For a model that ends in LogSoftmax. Use cross_entropy for raw scores.

    Args:
        class_weights: V factors, one per class. None: equal weights.
        ignore_index: A class number to ignore. None: every target counts.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss. Raise RunError if the shapes do not fit or the targets are not integers."""
        rows, classes = self._rows(output, target)
        return functional.nll_loss(
            rows, classes, weight=self.class_weights, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCEWithLogits(nn.BCEWithLogitsLoss):
    """torch's BCEWithLogitsLoss with a list of numbers for pos_weight.

    Args:
        pos_weight: Factors of the positive answers, one per position on the last axis. None: equal weights.
    """

    def __init__(self, *, pos_weight: Sequence[float] | None = None) -> None:
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))
