"""The hook `confusion`: the confusion matrix of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from exp.extras.evaluation.class_counts import EVALUATIONS, ClassCounts, counted_at, predict_classes
from exp.hooks.figures import (
    INK,
    LINE,
    LONGEST_NAME,
    MARGIN,
    PALE,
    PAPER,
    RIGHT,
    TEXT_SIZE,
    WRONG,
    blank,
    font_of,
    shorten,
    widest,
)
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

    def count(self, scores: Tensor, classes: Tensor) -> Tensor:
        return counts(predict_classes(scores, threshold=self.threshold), classes, num_classes=self.classes)

    def make_panels(self, stage: Stage, counts: Tensor) -> Values:
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

    def draw(self) -> Image:
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
    places = classes * num_classes + predictions
    return counted_at(places, counted=counted, size=num_classes**2).reshape(num_classes, num_classes)


# A cell of the first width holds a number of three characters; with the widest, ten classes fit a card.
CELL_WITH_NUMBER, WIDEST_CELL = 20, 30
PALEST = 0.2


def matrix(counts: np.ndarray, *, title: str, names: Sequence[str] = ()) -> np.ndarray:
    """Draw a confusion matrix: a row for each target, a column for each prediction, hits blue and misses orange.

    The color of a cell is the root of its share of its row, and PALEST at least, so that one miss among thousands is
    visible. A large cell shows its count.

    Args:
        counts: `[V, V]`, integers, by target and prediction.
        title: Text above the matrix.
        names: Names of the classes, shown at the rows; by default their numbers.

    Returns: uint8 `[H, W, 3]`, at most about 1,200 high.
    """
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(1, min(WIDEST_CELL, 900 // classes))
    side = cell * classes
    labels = [shorten(name, LONGEST_NAME) for name in (*names, *map(str, range(len(names), classes)))]
    left, top = widest(labels) + 3 * MARGIN, 3 * LINE + 2 * MARGIN
    sheet, pen, font = blank(left + side + 2 * MARGIN, top + side + 2 * MARGIN, title)
    pen.text((MARGIN, MARGIN + LINE), "a row a target, a column a prediction", fill=INK, font=font)
    hue = np.where(np.eye(classes, dtype=bool)[..., None], RIGHT, WRONG)
    depth = np.where(shares > 0, np.sqrt(shares).clip(min=PALEST), 0)[..., None]
    colours = (255 - (255 - hue) * depth).round().astype(np.uint8)
    sheet.paste(Pillow.fromarray(colours.repeat(cell, axis=0).repeat(cell, axis=1)), (left, top))
    for place in range(0, classes, -(-2 * TEXT_SIZE // cell)):
        middle = place * cell + cell // 2
        pen.text((left - MARGIN, top + middle), labels[place], fill=INK, font=font, anchor="rm")
        pen.text((left + middle, top - 4), str(place), fill=INK, font=font, anchor="ms")
    for at in range(0, side + 1, cell) if cell >= MARGIN else ():
        pen.line((left, top + at, left + side, top + at), fill=PALE)
        pen.line((left + at, top, left + at, top + side), fill=PALE)
    for row, column in np.argwhere(counts) if cell >= CELL_WITH_NUMBER else ():
        ink = PAPER if shares[row, column] > 0.4 else INK
        center = (left + column * cell + cell // 2, top + row * cell + cell // 2)
        small = font_of(TEXT_SIZE if cell == WIDEST_CELL else TEXT_SIZE - 2)
        pen.text(center, short(int(counts[row, column])), fill=ink, font=small, anchor="mm")
    return np.array(sheet)


def short(count: int) -> str:
    """Return an integer in a few characters: 999, 1.2k, 45k, 3.1M."""
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    scaled = count / 1000**power
    digits = 1 if power and scaled < 9.95 else 0
    return f"{scaled:.{digits}f}{('', 'k', 'M', 'G', 'T')[power]}"
