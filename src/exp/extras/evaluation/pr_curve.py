"""The hook `pr_curve`, which logs precision-recall curves of an evaluation, for each class against all others."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

import torch
from annotated_types import Ge
from torch import Tensor

from exp.extras.evaluation.class_counts import EVALUATIONS, ClassCounts, count_at, probabilities
from exp.hooks.hook import Values
from exp.hooks.panels import THRESHOLDS, PrecisionRecallCurve
from exp.shared_types import Stage


class PRCurve(ClassCounts):
    """Hook that logs a precision-recall curve of each class against all other classes.

    The tag of a curve is `pr_curve/<stage>/<class>`. If there are two classes, there is only the curve of class 1, with
    the tag `pr_curve/<stage>`.

    A class is predicted if its probability is at least the threshold. The thresholds of a curve are from 0 to 1. The
    samples of all ranks count once. If targets are texts or maps of pixels, every position counts. Targets outside 0 to
    V - 1 are ignored. The hook counts on the device. Its memory does not depend on the number of samples.

    Args:
        num_classes: Number of classes V, 2 or more.
        stages: Splits for which curves are logged: `val`, `test`. Default: `val` and `test`.
        max_classes: Maximum number of curves: the classes 0 to `max_classes` - 1 are logged. Default: 10.
        probabilities: Whether the outputs are probabilities. Default: False, which applies softmax to the outputs, or
            sigmoid to a single output.
        output: Name of the scores in the outputs of the network. Default: `output`.
        target: Name of the class numbers in the batch. Default: `target`.
    """

    most_classes = 1_000_000

    def __init__(
        self,
        *,
        num_classes: int | None,
        stages: Sequence[str] = EVALUATIONS,
        max_classes: Annotated[int, Ge(1)] = 10,
        probabilities: bool = False,
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(num_classes=num_classes, stages=stages, output=output, target=target)
        self.max_classes, self.probabilities = max_classes, probabilities
        # The numbers of the classes that are logged, on the device. Copying them for each batch would synchronize with
        # the device.
        self._drawn: Tensor | None = None

    @property
    def drawn_classes(self) -> tuple[int, ...]:
        """The numbers of the classes that are logged."""
        return (1,) if self.classes == 2 else tuple(range(min(self.classes, self.max_classes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.drawn_classes), 2, THRESHOLDS + 1

    def count(self, scores: Tensor, classes: Tensor) -> Tensor:
        shares = probabilities(scores, given=self.probabilities)
        if shares.dim() == 1:
            shares = torch.stack([1 - shares, shares], dim=1)
        if self._drawn is None or self._drawn.device != shares.device:
            self._drawn = torch.tensor(self.drawn_classes, device=shares.device)
        return count_reached(
            shares.index_select(1, self._drawn),
            classes[:, None] == self._drawn,
            counted=(classes >= 0) & (classes < self.classes),
        )

    def make_panels(self, stage: Stage, counts: Tensor) -> Values:
        tags = (
            [f"pr_curve/{stage}/{one}" for one in self.drawn_classes]
            if len(self.drawn_classes) > 1
            else [f"pr_curve/{stage}"]
        )
        return {tag: PrecisionRecallCurve(curve) for tag, curve in zip(tags, cases(counts), strict=True)}


def count_reached(shares: Tensor, positive: Tensor, *, counted: Tensor) -> Tensor:
    """Return a histogram of the samples for each class. A bin is the number of thresholds that a probability reaches.

    The function does not synchronize with the device.

    Args:
        shares: Probabilities of C classes, `[N, C]`.
        positive: Mask `[N, C]`, bool. True if the sample belongs to the class.
        counted: Mask `[N]`, bool. Samples are ignored if their mask is False.

    Returns:
        Numbers of samples, int64 `[C, 2, T + 1]`, for T thresholds. The second axis separates the samples of other
        classes (0) from the samples of the class (1). The last axis is the number of thresholds that the probability
        reaches.
    """
    classes = shares.shape[1]
    limits = torch.linspace(0, 1, THRESHOLDS, device=shares.device, dtype=shares.dtype)
    # A probability that is NaN must reach no threshold, but searchsorted returns the number of thresholds for NaN.
    bins = torch.searchsorted(limits, shares.nan_to_num(nan=-1.0).contiguous(), right=True)
    width = THRESHOLDS + 1
    rows = 2 * torch.arange(classes, device=shares.device) + positive
    found = count_at(rows * width + bins, counted=counted[:, None], size=2 * classes * width)
    return found.reshape(classes, 2, width)


def cases(found: Tensor) -> Tensor:
    """Return the numbers of correct and wrong predictions at each threshold, `[C, 4, T]`.

    The indices 0 to 3 of the second axis are true positives, false positives, true negatives and false negatives.

    Args:
        found: The result of `count_reached`, `[C, 2, T + 1]`.
    """
    # Thresholds are numbered from 0. The class is predicted at threshold t if the probability reaches more than t
    # thresholds.
    predicted = found.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    missed = found.sum(-1, keepdim=True) - predicted
    return torch.stack([predicted[:, 1], predicted[:, 0], missed[:, 0], missed[:, 1]], dim=1)
