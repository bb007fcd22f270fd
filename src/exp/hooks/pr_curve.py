"""The hook `pr_curve`: precision against recall over an evaluation, for each class against the rest."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from exp.errors import Fault
from exp.hooks.class_counts import EVALUATIONS, ClassCounts, probabilities
from exp.hooks.hook import Values
from exp.hooks.panels import THRESHOLDS, PrecisionRecallCurve
from exp.shared_types import Stage

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class PRCurve(ClassCounts):
    """Draws `pr_curve/<stage>/<class>`, one class against the rest; `pr_curve/<stage>` where one class alone is drawn.

    A sample is predicted to be of a class at a threshold where the class's probability is at least that; precision is
    the share of true ones among those, recall their share among all of the class. Every sample of every rank of the
    whole evaluation counts once; a text or a map of pixels by its places. Targets that are no class from 0 to V - 1 do
    not count. It counts on the device, in constant memory.

    num_classes: V, 2 or more.
    positive_class: the class that is drawn alone. null: of two classes the second, of more each.
    max_classes: so many are drawn at most, the first ones.
    thresholds: how many there are from 0 to 1.
    probabilities: whether the network's outputs are that already; else softmax makes them so, or sigmoid of one output.
    output, target: names among the batch's entries and the network's outputs.
    """

    most_classes = 1_000_000
    least = {"thresholds": 2, "max_classes": 1}

    def __init__(
        self,
        *,
        num_classes: int | None,
        stages: Sequence[str] = EVALUATIONS,
        positive_class: int | None = None,
        max_classes: int = 10,
        thresholds: int = THRESHOLDS,
        probabilities: bool = False,
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(num_classes=num_classes, stages=stages, output=output, target=target)
        self.positive_class, self.max_classes = positive_class, max_classes
        self.thresholds, self.probabilities = thresholds, probabilities
        # The classes that are drawn, on the device: a copy at each batch would wait for it.
        self._drawn: Tensor | None = None

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        last = (self.num_classes or 1) - 1
        if self.positive_class is not None and not 0 <= self.positive_class <= last:
            yield self.fault("positive_class", got=self.positive_class, expected=f"a class from 0 to {last}, or null")

    @property
    def drawn(self) -> tuple[int, ...]:
        """The classes that are drawn."""
        if self.positive_class is not None:
            return (self.positive_class,)
        return (1,) if self.classes == 2 else tuple(range(min(self.classes, self.max_classes)))

    @property
    def shape(self) -> tuple[int, ...]:
        return len(self.drawn), 2, self.thresholds + 1

    def counted(self, scores: Tensor, classes: Tensor) -> Tensor:
        shares = probabilities(scores, given=self.probabilities)
        if shares.dim() == 1:
            shares = torch.stack([1 - shares, shares], dim=1)
        if self._drawn is None or self._drawn.device != shares.device:
            self._drawn = torch.tensor(self.drawn, device=shares.device)
        return reached(
            shares.index_select(1, self._drawn),
            classes[:, None] == self._drawn,
            counted=(classes >= 0) & (classes < self.classes),
            thresholds=self.thresholds,
        )

    def shown(self, stage: Stage, counts: Tensor) -> Values:
        tags = [f"pr_curve/{stage}/{one}" for one in self.drawn] if len(self.drawn) > 1 else [f"pr_curve/{stage}"]
        return {tag: PrecisionRecallCurve(curve) for tag, curve in zip(tags, cases(counts), strict=True)}


def reached(shares: Tensor, positive: Tensor, *, counted: Tensor, thresholds: int) -> Tensor:
    """How many samples reach how many of T thresholds from 0 to 1: `[C, 2, T + 1]`, int64.

    The second axis is the samples of other classes and those of the class. Nothing waits for the device.

    shares: `[N, C]`, probabilities. positive: `[N, C]`, bool. counted: `[N]`, bool, whether a sample counts at all.
    """
    classes = shares.shape[1]
    limits = torch.linspace(0, 1, thresholds, device=shares.device, dtype=shares.dtype)
    # A nan reaches none, as in any comparison; searching would put it behind the last.
    bins = torch.searchsorted(limits, shares.nan_to_num(nan=-1.0).contiguous(), right=True)
    width = thresholds + 1
    rows = 2 * torch.arange(classes, device=shares.device) + positive
    places = torch.where(counted[:, None], rows * width + bins, 2 * classes * width).flatten()
    found = torch.zeros(2 * classes * width + 1, dtype=torch.int64, device=shares.device)
    found.index_add_(0, places, torch.ones_like(places))
    return found[:-1].reshape(classes, 2, width)


def cases(found: Tensor) -> Tensor:
    """`[C, 2, T + 1]` of `reached` as true and false positives, true and false negatives: `[C, 4, T]`."""
    # Whoever reaches more thresholds than t is predicted to be of the class at threshold t.
    predicted = found.flip(-1).cumsum(-1).flip(-1)[..., 1:]
    missed = found.sum(-1, keepdim=True) - predicted
    return torch.stack([predicted[:, 1], predicted[:, 0], missed[:, 0], missed[:, 1]], dim=1)
