"""Figures that hooks draw on the host: captions below pictures, coloured cells, curves over an axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

# Told apart by those who see no red or no green, too (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)
SKY, AMBER, GREY = (86, 180, 233), (230, 159, 0), (190, 190, 190)
RIGHT, WRONG = BLUE, ORANGE
INK, PAPER, PALE = (30, 30, 30), (255, 255, 255), (225, 225, 225)
TEXT_SIZE = 11
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# TensorBoard's Images page stretches what is narrower, and leaves out lines of what is wider.
CARD = 350
# A cell of the first width holds a figure of three signs; with the widest, ten classes fit a card.
CELL_WITH_FIGURE, WIDEST_CELL = 20, 30
MARGIN = 6
PALEST = 0.2
STROKE = 14


@dataclass(frozen=True, kw_only=True)
class Caption:
    """Lines below a picture. right: whether the network was; None where that is not said."""

    lines: Sequence[str]
    right: bool | None = None


def blank(width: int, height: int) -> tuple[Image.Image, ImageDraw.ImageDraw, Font]:
    """An empty sheet, a pen for it, and the font."""
    sheet = Image.new("RGB", (width, height), PAPER)
    return sheet, ImageDraw.Draw(sheet), font_of(TEXT_SIZE)


@functools.cache
def font_of(size: int) -> Font:
    """Pillow's own font. Read once: that takes longer than most pictures."""
    return ImageFont.load_default(size)


def heights(
    pen: ImageDraw.ImageDraw, font: Font, marks: Iterable[tuple[float, str]], *, left: float, right: float
) -> None:
    """The figures of an upright axis, each with a pale line over the whole width. marks: where each is, and what."""
    for at, label in marks:
        pen.line((left, at, right, at), fill=PALE)
        pen.text((left - MARGIN, at), label, fill=INK, font=font, anchor="rm")


def legend(
    pen: ImageDraw.ImageDraw, font: Font, named: Mapping[str, tuple[int, int, int]], *, left: float, floor: float
) -> None:
    """What each colour is, in one line that stands on `floor`."""
    for name, colour in named.items():
        middle = floor - TEXT_SIZE // 2 + 2
        pen.line((left, middle, left + STROKE, middle), fill=colour, width=3)
        pen.text((left + STROKE + 4, floor), name, fill=INK, font=font, anchor="ls")
        left += font.getlength(name) + 2 * STROKE + 8


def captioned(pictures: np.ndarray, captions: Sequence[Caption], *, title: str, columns: int) -> np.ndarray:
    """Pictures in a grid, each in a frame with its caption below: blue where the network was right, orange where not.

    pictures: uint8 `[N, H, W, 3]`, enlarged by whole pixels until they can be seen. captions: N.
    Returns: uint8 `[H', W', 3]`.
    """
    count, height, width, _ = pictures.shape
    factor = max(1, 64 // max(height, width))
    pictures = pictures.repeat(factor, axis=1).repeat(factor, axis=2)
    height, width = height * factor, width * factor
    font = font_of(TEXT_SIZE)
    lines = max(len(caption.lines) for caption in captions)
    texts = [font.getlength(line) for caption in captions for line in caption.lines]
    wide = int(max([width, *texts])) + 2 * MARGIN
    high = height + 2 * MARGIN + lines * (TEXT_SIZE + 3)
    columns = min(columns, count)
    rows = -(-count // columns)
    top = TEXT_SIZE + 2 * MARGIN
    sheet, pen, _ = blank(max(columns * wide, int(font.getlength(title)) + 2 * MARGIN, CARD), top + rows * high)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    for place, (picture, caption) in enumerate(zip(pictures, captions, strict=True)):
        x, y = place % columns * wide, top + place // columns * high
        colour = INK if caption.right is None else RIGHT if caption.right else WRONG
        left = x + (wide - width) // 2
        pen.rectangle((left - 3, y - 3, left + width + 2, y + height + 2), outline=colour, width=2)
        sheet.paste(Image.fromarray(picture), (left, y))
        for number, line in enumerate(caption.lines):
            pen.text((left - 3, y + height + 4 + number * (TEXT_SIZE + 3)), line, fill=colour, font=font)
    return np.array(sheet)


def matrix(counts: np.ndarray, *, normalised: bool, title: str) -> np.ndarray:
    """A confusion matrix as a picture: a row a target, a column a prediction, hits blue and misses orange.

    A cell is as dark as the root of its share of its row, and PALEST at least, so that one miss among thousands is
    seen. Where a cell has room its figure is written: the count, or with `normalised` per cent of the row.

    counts: `[V, V]`, whole numbers, by target and prediction. Returns: uint8 `[H, W, 3]`, at most about 1,100 high.
    """
    classes = len(counts)
    rows = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(rows, 1)
    cell = max(1, min(WIDEST_CELL, 900 // classes))
    colours = _tinted(shares)
    font = font_of(TEXT_SIZE)
    side = cell * classes
    left = int(font.getlength(str(classes - 1))) + 3 * MARGIN + TEXT_SIZE
    top = 2 * (TEXT_SIZE + MARGIN) + 3 * MARGIN + TEXT_SIZE
    width = max(left + side + 2 * MARGIN, int(font.getlength(title)) + 2 * MARGIN, CARD)
    sheet, pen, _ = blank(width, top + side + 2 * MARGIN)
    sheet.paste(Image.fromarray(colours.repeat(cell, axis=0).repeat(cell, axis=1)), (left, top))
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    pen.text((left, top - 2 * (TEXT_SIZE + MARGIN)), "prediction", fill=INK, font=font)
    upright = Image.new("RGB", (int(font.getlength("target")) + 1, TEXT_SIZE + 3), PAPER)
    ImageDraw.Draw(upright).text((0, 0), "target", fill=INK, font=font)
    sheet.paste(upright.rotate(90, expand=True), (MARGIN // 2, top))
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 2 * TEXT_SIZE)
    for place in range(0, classes, every):
        middle = place * cell + cell // 2
        pen.text((left + middle, top - 4), str(place), fill=INK, font=font, anchor="ms")
        pen.text((left - MARGIN, top + middle), str(place), fill=INK, font=font, anchor="rm")
    if cell >= 6:
        for line in range(classes + 1):
            at = line * cell
            pen.line((left, top + at, left + side, top + at), fill=PALE)
            pen.line((left + at, top, left + at, top + side), fill=PALE)
    if cell >= CELL_WITH_FIGURE:
        _write_figures(pen, counts, shares, at=(left, top), cell=cell, normalised=normalised)
    return np.array(sheet)


def _tinted(shares: np.ndarray) -> np.ndarray:
    """`[V, V]` from 0 to 1 as colours `[V, V, 3]`: from white to blue on the diagonal, to orange beside it."""
    hue = np.where(np.eye(len(shares), dtype=bool)[..., None], RIGHT, WRONG)
    depth = np.where(shares > 0, np.sqrt(shares).clip(min=PALEST), 0)[..., None]
    return (255 - (255 - hue) * depth).round().astype(np.uint8)


def _write_figures(
    pen: ImageDraw.ImageDraw,
    counts: np.ndarray,
    shares: np.ndarray,
    *,
    at: tuple[int, int],
    cell: int,
    normalised: bool,
) -> None:
    font = font_of(TEXT_SIZE if cell == WIDEST_CELL else TEXT_SIZE - 2)
    for target, prediction in np.argwhere(counts):
        share = shares[target, prediction]
        figure = _per_cent(share) if normalised else short(int(counts[target, prediction]))
        ink = PAPER if share > 0.4 else INK
        middle = (at[0] + prediction * cell + cell // 2, at[1] + target * cell + cell // 2)
        pen.text(middle, figure, fill=ink, font=font, anchor="mm")


def _per_cent(share: float) -> str:
    """Only all is 100, and only nothing is 0."""
    whole = round(100 * share)
    return "<1" if whole == 0 else "99" if whole == 100 and share < 1 else str(whole)


def short(count: int) -> str:
    """A whole number in a few signs: 999, 1.2k, 45k, 3.1M."""
    if count < 1000:
        return str(count)
    size, unit = next((size, unit) for size, unit in ((1e12, "T"), (1e9, "G"), (1e6, "M"), (1e3, "k")) if count >= size)
    scaled = count / size
    return f"{scaled:.1f}{unit}" if scaled < 9.95 else f"{scaled:.0f}{unit}"


WIDTH, HEIGHT = 480, 320
# A scale of powers of ten where the largest value is so many times the smallest.
WIDE = 100.0
COLOURS = (BLUE, ORANGE, GREEN, PINK)


def curves(x: Sequence[float], named: Mapping[str, Sequence[float]], *, title: str, along: str) -> np.ndarray:
    """uint8 `[H, W, 3]`. A value that is not finite is left out of its curve.

    x: where the values are, rising. named: the values of each curve, as many. along: what x is.
    """
    finite = [value for values in named.values() for value in values if math.isfinite(value)]
    low, high = (min(finite), max(finite)) if finite else (0.0, 1.0)
    is_wide = low > 0 and high / low > WIDE
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    bottom, top = (math.log10(low), math.log10(high)) if is_wide else (low, high)
    sheet, pen, font = blank(WIDTH, HEIGHT)
    marks = [bottom + (top - bottom) * part / 4 for part in range(5)]
    labels = [f"{10**mark if is_wide else mark:.3g}" for mark in marks]
    left = int(max(font.getlength(label) for label in labels)) + 2 * MARGIN
    right, upper, lower = WIDTH - 3 * MARGIN, 3 * MARGIN + 2 * TEXT_SIZE, HEIGHT - 3 * MARGIN - 2 * TEXT_SIZE

    def across(value: float) -> float:
        return left + (right - left) * (value - x[0]) / ((x[-1] - x[0]) or 1.0)

    def up(value: float) -> float:
        return lower - (lower - upper) * (value - bottom) / (top - bottom)

    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    heights(pen, font, zip(map(up, marks), labels, strict=True), left=left, right=right)
    for part in range(5):
        mark = x[0] + (x[-1] - x[0]) * part / 4
        pen.line((across(mark), upper, across(mark), lower), fill=PALE)
        pen.text((across(mark), lower + MARGIN), f"{mark:.3g}", fill=INK, font=font, anchor="ma")
    pen.text(((left + right) // 2, HEIGHT - MARGIN), along, fill=INK, font=font, anchor="ms")
    legend(pen, font, dict(zip(named, COLOURS, strict=False)), left=left, floor=upper - 3)
    for values, colour in zip(named.values(), COLOURS, strict=False):
        for points in _runs(x, values):
            shown = [(across(at), up(math.log10(value) if is_wide else value)) for at, value in points]
            if len(shown) > 1:
                pen.line(shown, fill=colour, width=2, joint="curve")
            else:
                pen.circle(shown[0], 2, fill=colour)
    return np.array(sheet)


def _runs(x: Sequence[float], values: Sequence[float]) -> list[list[tuple[float, float]]]:
    """The stretches of a curve between values that are not finite."""
    found: list[list[tuple[float, float]]] = [[]]
    for at, value in zip(x, values, strict=True):
        if math.isfinite(value):
            found[-1].append((at, value))
        elif found[-1]:
            found.append([])
    return [run for run in found if run]
