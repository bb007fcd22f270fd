"""The hook `confusion`, which draws the confusion matrix of an evaluation."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image as Pillow
from torch import Tensor

from exp.extras.evaluation.class_counts import EVALUATIONS, ClassCounts, count_at, predict_classes
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
    """Hook that draws the confusion matrix of each evaluation, with the tag `confusion/<stage>`.

    The rows of the matrix are targets, and its columns are predictions. The samples of all ranks count once. If targets
    are texts or maps of pixels, every position counts. Targets outside 0 to V - 1, such as -100, are ignored. The cells
    show their counts if there are at most 45 classes. If there are more classes, the cells have only a color.

    Args:
        num_classes: Number of classes V, from 2 to 1000.
        stages: Splits for which a matrix is drawn: `val`, `test`. Default: `val` and `test`.
        threshold: Limit for a network with one output for two classes: a larger output predicts class 1. Default: 0,
            which is correct for scores. Set 0.5 for probabilities.
        output: Name of the scores in the outputs of the network. Default: `output`.
        target: Name of the class numbers in the batch. Default: `target`.
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
    """Panel that draws a confusion matrix on the host.

    Args:
        counts: Counts `[V, V]`, int64. Rows are targets, columns are predictions.
        names: Names of the classes. Default: no names.
    """

    counts: Tensor
    names: Sequence[str] = ()

    def draw(self) -> Image:
        counts = self.counts.numpy()
        samples, hits = int(counts.sum()), int(np.trace(counts))
        right = f", {100 * hits / samples:.1f} % correct" if samples else ""
        picture = matrix(counts, title=f"{samples:,} samples{right}", names=self.names)
        return Image(torch.from_numpy(picture).permute(2, 0, 1)[None])


def counts(predictions: Tensor, classes: Tensor, *, num_classes: int) -> Tensor:
    """Return the confusion matrix of a batch, int64 `[V, V]`. Rows are targets, columns are predictions.

    The function does not synchronize with the device.

    Args:
        predictions: Predicted class numbers `[N]`, int64.
        classes: Targets `[N]`, int64. Values outside 0 to V - 1 are ignored.
        num_classes: Number of classes V.
    """
    counted = (classes >= 0) & (classes < num_classes)
    places = classes * num_classes + predictions
    return count_at(places, counted=counted, size=num_classes**2).reshape(num_classes, num_classes)


# Widths in pixels. A cell of width CELL_WITH_NUMBER has space for three characters. A matrix of ten classes with cells
# of width WIDEST_CELL has space in a card of TensorBoard.
CELL_WITH_NUMBER, WIDEST_CELL = 20, 30
PALEST = 0.2


def matrix(counts: np.ndarray, *, title: str, names: Sequence[str] = ()) -> np.ndarray:
    """Return a picture of a confusion matrix. Rows are targets, columns are predictions.

    Correct predictions are blue, and wrong predictions are orange. The intensity of a cell is the square root of its
    fraction of the row's samples. A cell that is not 0 has at least the intensity PALEST, so that one error among
    thousands is visible. Cells that are large enough show their counts.

    Args:
        counts: Counts `[V, V]`, integers.
        title: Text above the matrix.
        names: Names of the classes, which are written at the rows. Default: no names. The numbers of classes without a
            name are written instead.

    Returns:
        Pixels `[H, W, 3]`, uint8, at most about 1,200 pixels high.
    """
    classes = len(counts)
    shares = counts / np.maximum(counts.sum(1, keepdims=True), 1)
    cell = max(1, min(WIDEST_CELL, 900 // classes))
    side = cell * classes
    labels = [shorten(name, LONGEST_NAME) for name in (*names, *map(str, range(len(names), classes)))]
    left, top = widest(labels) + 3 * MARGIN, 3 * LINE + 2 * MARGIN
    sheet, pen, font = blank(left + side + 2 * MARGIN, top + side + 2 * MARGIN, title)
    pen.text((MARGIN, MARGIN + LINE), "rows: targets, columns: predictions", fill=INK, font=font)
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
    """Return an integer as text of at most four characters, such as 999, 1.2k, 45k or 3.1M."""
    power = min(int(math.log10(max(count, 1))) // 3, 4)
    scaled = count / 1000**power
    digits = 1 if power and scaled < 9.95 else 0
    return f"{scaled:.{digits}f}{('', 'k', 'M', 'G', 'T')[power]}"
