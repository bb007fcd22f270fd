"""Losses for scores with the classes on the last axis. The losses of torch.nn expect the classes on axis 1."""

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
    """Base class of CrossEntropy and NLL. It stores the class weights and the ignored label."""

    def __init__(self, *, class_weights: Weights | None = None, ignore_index: int | None = None) -> None:
        super().__init__()
        self.class_weights: Tensor | None
        if class_weights is None:
            self.class_weights = None
        else:
            # Checkpoints do not contain the weights, because the config contains them.
            weights = torch.tensor(class_weights, dtype=torch.float32)
            self.register_buffer("class_weights", weights, persistent=False)
        # If no label is ignored, ignore_index is an impossible label. The default of torch would ignore labels of -100
        # in the data.
        self.ignore_index = NOTHING if ignore_index is None else ignore_index
        self.reduction = "mean"

    def _rows(self, output: Tensor, target: Tensor) -> tuple[Tensor, Tensor]:
        """Return the output `[..., V]` as rows `[N, V]`, and the target `[...]` as `[N]`."""
        require_classes_last(self, output, target)
        if output.dim() == 2:
            return output, target
        return output.flatten(end_dim=-2), target.flatten()


class CrossEntropy(_ClassesLast):
    """Cross entropy of scores (logits) `[..., V]` for V classes against class numbers `[...]`, int64.

    The loss equals torch.nn.functional.cross_entropy, including the mean over weighted targets.

    Args:
        label_smoothing: The part of the target probability that is distributed evenly over all classes, from 0 to 1.
            Default: 0.
        class_weights: A factor for each of the V classes. None (default): equal weights.
        ignore_index: The label to ignore. None (default): all labels count.
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
        """Return the loss as a 0-d tensor.

        Raises:
            RunError: The shapes do not match, or the targets are not integers.
        """
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
    """Negative log likelihood of log probabilities `[..., V]` for V classes against class numbers `[...]`, int64.

    Use this loss for models that end in LogSoftmax. For scores, use CrossEntropy.

    Args:
        class_weights: A factor for each of the V classes. None (default): equal weights.
        ignore_index: The label to ignore. None (default): all labels count.
    """

    def forward(self, output: Tensor, target: Tensor) -> Tensor:
        """Return the loss as a 0-d tensor.

        Raises:
            RunError: The shapes do not match, or the targets are not integers.
        """
        rows, classes = self._rows(output, target)
        return functional.nll_loss(
            rows, classes, weight=self.class_weights, ignore_index=self.ignore_index, reduction=self.reduction
        )


class BCEWithLogits(nn.BCEWithLogitsLoss):
    """torch's BCEWithLogitsLoss with a list of numbers as pos_weight.

    Args:
        pos_weight: A factor of positive targets for each position on the last axis. None (default): equal weights.
    """

    def __init__(self, *, pos_weight: Sequence[float] | None = None) -> None:
        super().__init__(pos_weight=None if pos_weight is None else torch.tensor(pos_weight, dtype=torch.float32))
