"""The hook `pr_curve`: precision and recall over an evaluation, for each class against the rest."""

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
    """Logs a precision-recall curve of each class against all other classes, `pr_curve/<stage>/<class>`.

    With two classes there is one curve, `pr_curve/<stage>`, of class 1. At a threshold from 0 to 1, a class is
    predicted if its probability is at least the threshold. Each sample of each rank counts once. In texts and maps of
    pixels, each position counts. Targets outside 0 to V - 1 are ignored. The hook counts on the device, in constant
    memory.

    Args:
        num_classes: Number of classes V, 2 or more.
        stages: Evaluations that are logged: val, test.
        max_classes: Number of curves. Classes from this number on are not logged.
        probabilities: Whether the outputs are probabilities. If not, softmax is applied, or sigmoid to a single output.
        output: Key of the scores in the outputs of the network.
        target: Key of the class numbers in the batch.
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
        # A tensor on the device, because copying it for each batch would wait for the device.
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
    """Return a histogram of samples for each class, by the number of thresholds that the probability reaches.

    The call does not wait for the device.

    Args:
        shares: Probabilities `[N, C]`.
        positive: Mask `[N, C]`, bool. True if the sample belongs to the class.
        counted: Mask `[N]`, bool. Samples with False are ignored.

    Returns:
        Numbers of samples `[C, 2, T + 1]`, int64, for T thresholds. Index 0 of the second axis has samples of other
        classes, and index 1 samples of the class.
    """
    classes = shares.shape[1]
    limits = torch.linspace(0, 1, THRESHOLDS, device=shares.device, dtype=shares.dtype)
    # NaN reaches no threshold, but searchsorted would put it after the last one.
    bins = torch.searchsorted(limits, shares.nan_to_num(nan=-1.0).contiguous(), right=True)
    width = THRESHOLDS + 1
    rows = 2 * torch.arange(classes, device=shares.device) + positive
    found = count_at(rows * width + bins, counted=counted[:, None], size=2 * classes * width)
    return found.reshape(classes, 2, width)


def cases(found: Tensor) -> Tensor:
    """Return the numbers of cases at each threshold, `[C, 4, T]`.

    The second axis has true positives, false positives, true negatives and false negatives.

    Args:
        found: The result of `count_reached`.
    """
    # A sample that reaches more thresholds than t is predicted to be of the class at threshold t.
    predicted = found.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    missed = found.sum(-1, keepdim=True) - predicted
    return torch.stack([predicted[:, 1], predicted[:, 0], missed[:, 0], missed[:, 1]], dim=1)
