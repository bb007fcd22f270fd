"""Figures that are drawn on the host: captions below pictures, coloured cells, heat maps, curves over an axis."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from exp.hooks.panels import Healthy

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


def matrix(counts: np.ndarray, *, normalised: bool, title: str, names: Sequence[str] = ()) -> np.ndarray:
    """A confusion matrix as a picture: a row a target, a column a prediction, hits blue and misses orange.

    A cell is as dark as the root of its share of its row, and PALEST at least, so that one miss among thousands is
    seen. Where a cell has room its figure is written: the count, or with `normalised` per cent of the row.

    counts: `[V, V]`, whole numbers, by target and prediction. names: of the classes; by default their numbers.
    Returns: uint8 `[H, W, 3]`, at most about 1,200 high.
    """
    classes = len(counts)
    rows = counts.sum(1, keepdims=True)
    shares = counts / np.maximum(rows, 1)
    cell = max(1, min(WIDEST_CELL, 900 // classes))
    colours = _tinted(shares)
    font = font_of(TEXT_SIZE)
    side = cell * classes
    called = [names[place] if place < len(names) else str(place) for place in range(classes)]
    labels = [cut(name, font, LONGEST_NAME) for name in called]
    longest = int(max(map(font.getlength, labels)))
    left = longest + 3 * MARGIN + TEXT_SIZE
    top = 2 * (TEXT_SIZE + MARGIN) + 3 * MARGIN + (longest if names else TEXT_SIZE)
    width = max(left + side + 2 * MARGIN, int(font.getlength(title)) + 2 * MARGIN, CARD)
    sheet, pen, _ = blank(width, top + side + 2 * MARGIN)
    sheet.paste(Image.fromarray(colours.repeat(cell, axis=0).repeat(cell, axis=1)), (left, top))
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    pen.text((left, TEXT_SIZE + 2 * MARGIN + 3), "prediction", fill=INK, font=font)
    sheet.paste(_upright("target", font), (MARGIN // 2, top))
    every = next(step for step in (1, 2, 5, 10, 20, 50, 100, 200, 500) if step * cell >= 2 * TEXT_SIZE)
    for place in range(0, classes, every):
        middle = place * cell + cell // 2
        pen.text((left - MARGIN, top + middle), labels[place], fill=INK, font=font, anchor="rm")
        if names:
            upright = _upright(labels[place], font)
            sheet.paste(upright, (left + middle - upright.width // 2, top - 4 - upright.height))
        else:
            pen.text((left + middle, top - 4), labels[place], fill=INK, font=font, anchor="ms")
    if cell >= 6:
        for line in range(classes + 1):
            at = line * cell
            pen.line((left, top + at, left + side, top + at), fill=PALE)
            pen.line((left + at, top, left + at, top + side), fill=PALE)
    if cell >= CELL_WITH_FIGURE:
        _write_figures(pen, counts, shares, at=(left, top), cell=cell, normalised=normalised)
    return np.array(sheet)


def _upright(text: str, font: Font) -> Image.Image:
    """Return a picture of a text that reads from below."""
    sheet = Image.new("RGB", (int(font.getlength(text)) + 1, TEXT_SIZE + 3), PAPER)
    ImageDraw.Draw(sheet).text((0, 0), text, fill=INK, font=font)
    return sheet.rotate(90, expand=True)


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


# Of a heat map: healthy numbers are grey, from light to dark as they grow; what is not is saturated.
LIGHT, DARK = 232, 96
LOW, HIGH, LOST = (0, 90, 255), (255, 96, 0), (225, 0, 120)
MOST_ROWS = 720
ROWS = 360
WIDEST_COLUMN, HIGHEST_ROW = 28, 18
LONGEST_NAME = 140
KEY = 22


def heat_map(
    numbers: np.ndarray, *, names: Sequence[str], steps: Sequence[int], healthy: Healthy, title: str
) -> np.ndarray:
    """Rows by steps as a picture: uint8 `[H, W, 3]`.

    A healthy number is grey, darker as it grows; one below the lower bound is blue, one above the upper bound orange,
    one that is infinite or not a number pink, and where there is none it is white. Of more rows than MOST_ROWS, the
    least healthy of several neighbours is shown.

    numbers: `[R, S]`, infinite where a number is lost, nan where there is none. names: R. steps: S, rising.
    """
    numbers, names = _folded(numbers, names, healthy)
    count, length = numbers.shape
    font = font_of(TEXT_SIZE)
    left = int(min(LONGEST_NAME, max(map(font.getlength, names)))) + 2 * MARGIN
    wide = max(1, min(WIDEST_COLUMN, (CARD - left - MARGIN) // length))
    high = max(1, min(HIGHEST_ROW, ROWS // count))
    low, most = _limits(numbers, healthy)
    cells = _colours(numbers, healthy, low, most).repeat(high, axis=0).repeat(wide, axis=1)
    top, line = 2 * MARGIN + TEXT_SIZE, TEXT_SIZE + 3
    down, across = top + cells.shape[0], left + cells.shape[1]
    key = _key(healthy, low, most, lost=bool(np.isinf(numbers).any()))
    key_width = int(max(font.getlength(text) for _, text in key)) + KEY + 2 * MARGIN
    width = max(CARD, across + MARGIN, int(font.getlength(title)) + 2 * MARGIN, left + key_width)
    sheet, pen, font = blank(width, down + 2 * line + MARGIN + len(key) * line + MARGIN)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    sheet.paste(Image.fromarray(cells), (left, top))
    every = -(-(TEXT_SIZE + 1) // high)
    for place in range(0, count, every):
        name = cut(names[place], font, LONGEST_NAME, keeps_end=True)
        middle = top + place * high + (high if high > TEXT_SIZE else TEXT_SIZE) / 2
        pen.text((left - MARGIN, middle), name, fill=INK, font=font, anchor="rm")
    for place in dict.fromkeys((0, length // 2, length - 1)):
        anchor = "la" if place == 0 else "ra" if place == length - 1 else "ma"
        at = left + (place + (place > 0) * 0.5 + (place == length - 1 > 0) * 0.5) * wide
        if place in (0, length - 1) or cells.shape[1] > 150:
            pen.text((at, down + 2), str(steps[place]), fill=INK, font=font, anchor=anchor)
    pen.text((left, down + 2 + line), "step", fill=INK, font=font)
    for place, (colour, text) in enumerate(key):
        upper = down + 2 * line + MARGIN + place * line
        pen.rectangle((left, upper, left + KEY - 4, upper + TEXT_SIZE), fill=colour, outline=PALE)
        pen.text((left + KEY, upper), text, fill=INK, font=font)
    return np.array(sheet)


def cut(text: str, font: Font, width: float, *, keeps_end: bool = False) -> str:
    """A text as far as there is room for it. keeps_end: for names whose ends tell neighbours apart."""
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"...{text}") > width:
        text = text[1:] if keeps_end else text[:-1]
    return f"...{text}" if keeps_end else f"{text}..."


def _folded(numbers: np.ndarray, names: Sequence[str], healthy: Healthy) -> tuple[np.ndarray, Sequence[str]]:
    """As many rows as can be told apart."""
    together = -(-len(names) // MOST_ROWS)
    if together == 1:
        return numbers, names
    groups = [numbers[first : first + together] for first in range(0, len(names), together)]
    rows = [np.take_along_axis(group, _harm(group, healthy).argmax(0)[None], 0)[0] for group in groups]
    return np.stack(rows), names[::together]


def _harm(numbers: np.ndarray, healthy: Healthy) -> np.ndarray:
    """How far from healthy: 4 lost, 3 too large, 2 too small, 1 healthy, 0 missing."""
    harm = np.where(np.isnan(numbers), 0, 1)
    if healthy.low is not None:
        harm[numbers < healthy.low] = 2
    if healthy.high is not None:
        harm[numbers > healthy.high] = 3
    harm[np.isinf(numbers)] = 4
    return harm


def _limits(numbers: np.ndarray, healthy: Healthy) -> tuple[float, float]:
    """The smallest and the largest healthy number; of a logarithmic scale the smallest above zero."""
    fine = numbers[_harm(numbers, healthy) == 1]
    if healthy.is_logarithmic:
        fine = fine[fine > 0]
    return (float(fine.min()), float(fine.max())) if len(fine) else (0.0, 0.0)


def _colours(numbers: np.ndarray, healthy: Healthy, low: float, most: float) -> np.ndarray:
    """uint8 `[R, S, 3]`."""
    harm = _harm(numbers, healthy)
    shares = np.zeros(numbers.shape)
    if most > low:
        known = np.where(harm == 1, numbers, low).clip(low, most)
        magnitude = np.log if healthy.is_logarithmic else np.asarray
        shares = (magnitude(known) - magnitude(low)) / (magnitude(most) - magnitude(low))
    grey = (LIGHT + (DARK - LIGHT) * shares).round()
    cells = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    for level, colour in ((0, PAPER), (2, LOW), (3, HIGH), (4, LOST)):
        cells[harm == level] = colour
    return cells


def _key(healthy: Healthy, low: float, most: float, *, lost: bool) -> list[tuple[tuple[int, int, int], str]]:
    """What the colours mean."""
    light, dark = (LIGHT,) * 3, (DARK,) * 3
    found = [(light, f"{low:.3g}"), (dark, f"{most:.3g}")] if most > low else [(light, f"{low:.3g}")]
    if healthy.low is not None:
        found.append((LOW, f"below {healthy.low:g}"))
    if healthy.high is not None:
        found.append((HIGH, f"above {healthy.high:g}"))
    return [*found, (LOST, "infinite or not a number")] if lost else found


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
