"""The hook `confusion`: which classes an evaluation takes for which others."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exp.hooks.class_counts import EVALUATIONS, ClassCounts, predicted
from exp.hooks.hook import Values
from exp.hooks.panels import Image, Panel
from exp.shared_types import Stage


class Confusion(ClassCounts):
    """Draws `confusion/<stage>`, the confusion matrix of each evaluation: a row a target, a column a prediction.

    Every sample of every rank counts once; a text or a map of pixels by its places. Targets that are no class from 0 to
    V - 1, such as an ignored -100, do not count. It counts on the device, and is drawn once a stage.

    num_classes: V, from 2 to 1000. Cells have figures up to 45 classes, and colours beyond.
    normalised: whether figures are per cent of their row, that is of the target's samples, instead of counts.
    threshold: of a network with one output for two classes: above it is class 1. 0 of a score, 0.5 of a probability.
    output, target: names among the batch's entries and the network's outputs.
    """

    most_classes = 1000

    def __init__(
        self,
        *,
        num_classes: int | None,
        stages: Sequence[str] = EVALUATIONS,
        normalised: bool = False,
        threshold: float = 0.0,
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(num_classes=num_classes, stages=stages, output=output, target=target)
        self.normalised, self.threshold = normalised, threshold

    @property
    def shape(self) -> tuple[int, ...]:
        return self.classes, self.classes

    def counted(self, scores: Tensor, classes: Tensor) -> Tensor:
        return counts(predicted(scores, threshold=self.threshold), classes, num_classes=self.classes)

    def shown(self, stage: Stage, counts: Tensor) -> Values:
        return {f"confusion/{stage}": Matrix(counts, self.normalised, tuple(self._class_names.get(self.target, ())))}


@dataclass(frozen=True, slots=True, eq=False)
class Matrix(Panel):
    """A confusion matrix that is drawn on the host.

    counts: `[V, V]`, int64, by target and prediction. normalised: see Confusion. names: of the classes; else none.
    """

    counts: Tensor
    normalised: bool
    names: Sequence[str] = ()

    def drawn(self) -> Image:
        from exp.hooks.figures import matrix

        counts = self.counts.numpy()
        samples, hits = int(counts.sum()), int(np.trace(counts))
        right = f", {100 * hits / samples:.1f} % right" if samples else ""
        figures = "per cent of each target's" if self.normalised else "counts"
        picture = matrix(
            counts, normalised=self.normalised, title=f"{samples:,} samples{right}; {figures}", names=self.names
        )
        return Image(torch.from_numpy(picture).permute(2, 0, 1)[None])


def counts(predictions: Tensor, classes: Tensor, *, num_classes: int) -> Tensor:
    """How often each prediction met each class: `[V, V]`, int64, by class and prediction; nothing waits for the device.

    predictions, classes: `[N]`, int64. A class that is none from 0 to V - 1 does not count.
    """
    counted = (classes >= 0) & (classes < num_classes)
    # What does not count goes to a place behind the last one, for to pick the others would wait for the device.
    places = torch.where(counted, classes * num_classes + predictions, num_classes**2)
    found = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=classes.device)
    found.index_add_(0, places, torch.ones_like(places))
    return found[:-1].reshape(num_classes, num_classes)
