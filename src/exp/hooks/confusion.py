"""The hook `confusion`: the confusion matrix of an evaluation."""

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

    Every sample of every rank counts once; a text or a map of pixels by its places. Targets outside 0 to V - 1, such as
    an ignored -100, do not count. Cells show their count up to 45 classes, and colors alone beyond.

    Args:
        num_classes: V, from 2 to 1000.
        stages: Evaluations that are drawn, of val and test.
        threshold: For one output and two classes: class 1 is above it. 0 for a score, 0.5 for a probability.
        output: Name of the scores among the outputs of the network.
        target: Name of the classes among the entries of the batch.
    """

    most_classes = 1000

    def __init__(
        self,
        *,
        num_classes: int | None,
        stages: Sequence[str] = EVALUATIONS,
        threshold: float = 0.0,
        output: str = "output",
        target: str = "target",
    ) -> None:
        super().__init__(num_classes=num_classes, stages=stages, output=output, target=target)
        self.threshold = threshold

    @property
    def shape(self) -> tuple[int, ...]:
        return self.classes, self.classes

    def counted(self, scores: Tensor, classes: Tensor) -> Tensor:
        return counts(predicted(scores, threshold=self.threshold), classes, num_classes=self.classes)

    def shown(self, stage: Stage, counts: Tensor) -> Values:
        return {f"confusion/{stage}": Matrix(counts, tuple(self._class_names.get(self.target, ())))}


@dataclass(frozen=True, slots=True, eq=False)
class Matrix(Panel):
    """A confusion matrix that is drawn on the host.

    Args:
        counts: `[V, V]`, int64, by target and prediction.
        names: Names of the classes, if they have any.
    """

    counts: Tensor
    names: Sequence[str] = ()

    def drawn(self) -> Image:
        from exp.hooks.figures import matrix

        counts = self.counts.numpy()
        samples, hits = int(counts.sum()), int(np.trace(counts))
        right = f", {100 * hits / samples:.1f} % right" if samples else ""
        picture = matrix(counts, title=f"{samples:,} samples{right}", names=self.names)
        return Image(torch.from_numpy(picture).permute(2, 0, 1)[None])


def counts(predictions: Tensor, classes: Tensor, *, num_classes: int) -> Tensor:
    """Return how often each prediction met each class: `[V, V]`, int64, by class and prediction.

    It does not wait for the device.

    Args:
        predictions: `[N]`, int64.
        classes: `[N]`, int64. A class outside 0 to V - 1 does not count.
        num_classes: V.
    """
    counted = (classes >= 0) & (classes < num_classes)
    # Ignored samples go to a place after the last one, because selecting the others would wait for the device.
    places = torch.where(counted, classes * num_classes + predictions, num_classes**2)
    found = torch.zeros(num_classes**2 + 1, dtype=torch.int64, device=classes.device)
    found.index_add_(0, places, torch.ones_like(places))
    return found[:-1].reshape(num_classes, num_classes)
