"""Functions that draw figures on the CPU: heat maps and curves."""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import Image, ImageDraw, ImageFont

from exp.hooks.panels import Healthy

# Colors that people without red or green vision can distinguish (Okabe and Ito 2008).
BLUE, ORANGE, GREEN, PINK = (0, 114, 178), (213, 94, 0), (0, 158, 115), (204, 121, 167)
COLOURS = (BLUE, ORANGE, GREEN, PINK)
RIGHT, WRONG = BLUE, ORANGE
INK, PAPER, PALE = (30, 30, 30), (255, 255, 255), (225, 225, 225)
TEXT_SIZE, MARGIN = 11, 6
LINE = TEXT_SIZE + 3
Font = ImageFont.FreeTypeFont | ImageFont.ImageFont
# Width in pixels at which pictures are drawn if possible. TensorBoard's Images page stretches narrower pictures, and
# drops lines of wider pictures.
CARD = 350
LONGEST_NAME = 140


@functools.cache
def font_of(size: int) -> Font:
    """Return Pillow's built-in font in a size.

    The font is cached, because reading the font takes longer than drawing most pictures.
    """
    return ImageFont.load_default(size)


def blank(width: float, height: float, title: str) -> tuple[Image.Image, ImageDraw.ImageDraw, Font]:
    """Return an empty picture with a title, its drawing object, and the font.

    The picture is at least as wide as the title.
    """
    font = font_of(TEXT_SIZE)
    sheet = Image.new("RGB", (max(int(width), int(font.getlength(title)) + 2 * MARGIN, CARD), int(height)), PAPER)
    pen = ImageDraw.Draw(sheet)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    return sheet, pen, font


def shorten(text: str, width: float, *, keeps_end: bool = False) -> str:
    """Return a text shortened to a width in pixels.

    Args:
        text: The text.
        width: Maximum width in pixels.
        keeps_end: Whether the end of the text is kept instead of the start. Names of neighboring layers differ at the
            end. Default: False.
    """
    font = font_of(TEXT_SIZE)
    if font.getlength(text) <= width:
        return text
    while text and font.getlength(f"...{text}") > width:
        text = text[1:] if keeps_end else text[:-1]
    return f"...{text}" if keeps_end else f"{text}..."


def widest(texts: Sequence[str]) -> int:
    """Return the width in pixels of the widest of several texts."""
    return int(max(map(font_of(TEXT_SIZE).getlength, texts), default=0))


# Gray levels of the smallest and the largest healthy number in a heat map. Other numbers have saturated colors.
LIGHT, DARK = 232, 96
LOW, HIGH, LOST = (0, 90, 255), (255, 96, 0), (225, 0, 120)
MOST_ROWS, ROWS = 720, 360
WIDEST_COLUMN, HIGHEST_ROW = 28, 18
KEY = 22


def heat_map(
    numbers: np.ndarray, *, names: Sequence[str], steps: Sequence[int], healthy: Healthy, title: str
) -> np.ndarray:
    """Draw a heat map of numbers, with one row per name and one column per step.

    Healthy numbers are gray, and larger numbers are darker. Numbers below the lower bound are blue, numbers above the
    upper bound are orange, infinite numbers are pink, and missing numbers are white. If the map has more than MOST_ROWS
    rows, neighboring rows are merged. A merged row shows the least healthy of its numbers.

    Args:
        numbers: `[R, S]`. nan marks a missing number, and an infinity marks a number that is not finite.
        names: R names of rows.
        steps: S steps, in increasing order.
        healthy: Bounds of healthy numbers.
        title: Text above the map.

    Returns:
        Picture, uint8 `[H, W, 3]`.
    """
    numbers, names = _fold(numbers, names, healthy)
    count, length = numbers.shape
    left, top = min(LONGEST_NAME, widest(names)) + 2 * MARGIN, 2 * MARGIN + TEXT_SIZE
    wide = max(1, min(WIDEST_COLUMN, (CARD - left - MARGIN) // length))
    high = max(1, min(HIGHEST_ROW, ROWS // count))
    colours, key = _colours(numbers, healthy)
    down, across = top + count * high, left + length * wide
    width = max(across + MARGIN, left + widest([text for _, text in key]) + KEY + 2 * MARGIN)
    sheet, pen, font = blank(width, down + (2 + len(key)) * LINE + 2 * MARGIN, title)
    sheet.paste(Image.fromarray(colours.repeat(high, axis=0).repeat(wide, axis=1)), (left, top))
    for place in range(0, count, -(-(TEXT_SIZE + 1) // high)):
        middle = top + place * high + max(high, TEXT_SIZE) / 2
        name = shorten(names[place], LONGEST_NAME, keeps_end=True)
        pen.text((left - MARGIN, middle), name, fill=INK, font=font, anchor="rm")
    pen.text((left, down + 2), f"step {steps[0]} to {steps[-1]}", fill=INK, font=font)
    for place, (colour, text) in enumerate(key):
        upper = down + 2 * LINE + place * LINE
        pen.rectangle((left, upper, left + KEY - 4, upper + TEXT_SIZE), fill=colour, outline=PALE)
        pen.text((left + KEY, upper), text, fill=INK, font=font)
    return np.array(sheet)


def _fold(numbers: np.ndarray, names: Sequence[str], healthy: Healthy) -> tuple[np.ndarray, Sequence[str]]:
    """Merge neighboring rows until the map has at most MOST_ROWS rows. Return the rows and their names."""
    together = -(-len(names) // MOST_ROWS)
    if together == 1:
        return numbers, names
    groups = [numbers[first : first + together] for first in range(0, len(names), together)]
    rows = [np.take_along_axis(group, _harm(group, healthy).argmax(0)[None], 0)[0] for group in groups]
    return np.stack(rows), names[::together]


def _harm(numbers: np.ndarray, healthy: Healthy) -> np.ndarray:
    """Return a severity for each number: 4 not finite, 3 too large, 2 too small, 1 healthy, 0 missing."""
    harm = np.where(np.isnan(numbers), 0, 1)
    harm[numbers < (-np.inf if healthy.low is None else healthy.low)] = 2
    harm[numbers > (np.inf if healthy.high is None else healthy.high)] = 3
    harm[np.isinf(numbers)] = 4
    return harm


Colour = tuple[int, int, int]


def _colours(numbers: np.ndarray, healthy: Healthy) -> tuple[np.ndarray, list[tuple[Colour, str]]]:
    """Return the color of each number, uint8 `[R, S, 3]`, and the legend as pairs of a color and its meaning."""
    harm = _harm(numbers, healthy)
    fine = numbers[(harm == 1) & ((numbers > 0) | (not healthy.is_logarithmic))]
    low, most = (float(fine.min()), float(fine.max())) if len(fine) else (0.0, 0.0)
    shares = np.zeros(numbers.shape)
    if most > low:
        known = np.where(harm == 1, numbers, low).clip(low, most)
        magnitude = np.log if healthy.is_logarithmic else np.asarray
        shares = (magnitude(known) - magnitude(low)) / (magnitude(most) - magnitude(low))
    grey = (LIGHT + (DARK - LIGHT) * shares).round()
    cells = np.repeat(grey[..., None], 3, axis=2).astype(np.uint8)
    for level, colour in ((0, PAPER), (2, LOW), (3, HIGH), (4, LOST)):
        cells[harm == level] = colour
    meanings = [
        ((LIGHT,) * 3, f"{low:.3g}", True),
        ((DARK,) * 3, f"{most:.3g}", most > low),
        (LOW, f"below {healthy.low}", healthy.low is not None),
        (HIGH, f"above {healthy.high}", healthy.high is not None),
        (LOST, "infinite or not a number", bool((harm == 4).any())),
    ]
    return cells, [(colour, text) for colour, text, is_shown in meanings if is_shown]


WIDTH, HEIGHT = 480, 320
# The y axis is logarithmic if the ratio of the largest to the smallest value exceeds this number.
WIDE = 100.0
TICKS = 5
STROKE = 14


def curves(x: Sequence[float], named: Mapping[str, Sequence[float]], *, title: str, along: str) -> np.ndarray:
    """Draw up to four curves. A curve has a gap at each value that is not finite.

    Args:
        x: Positions of the values, in increasing order.
        named: Values of each curve by name, one value per position.
        title: Text above the curves.
        along: Label of the x axis.

    Returns:
        Picture, uint8 `[H, W, 3]`.
    """
    finite = [value for values in named.values() for value in values if math.isfinite(value)] or [0.0, 1.0]
    low, high = min(finite), max(finite)
    is_wide = low > 0 and high / low > WIDE
    if low == high:
        low, high = low - (abs(low) or 1.0) / 2, high + (abs(high) or 1.0) / 2
    bottom, top = (math.log10(low), math.log10(high)) if is_wide else (low, high)
    heights = [bottom + (top - bottom) * part / (TICKS - 1) for part in range(TICKS)]
    labels = [f"{10**mark if is_wide else mark:.3g}" for mark in heights]
    sheet, pen, font = blank(WIDTH, HEIGHT, title)
    left, right = widest(labels) + 2 * MARGIN, WIDTH - 3 * MARGIN
    upper, lower = 3 * MARGIN + 2 * TEXT_SIZE, HEIGHT - 3 * MARGIN - 2 * TEXT_SIZE

    def across(value: float) -> float:
        return left + (right - left) * (value - x[0]) / ((x[-1] - x[0]) or 1.0)

    def up(value: float) -> float:
        return lower - (lower - upper) * (value - bottom) / (top - bottom)

    for mark, label in zip(heights, labels, strict=True):
        pen.line((left, up(mark), right, up(mark)), fill=PALE)
        pen.text((left - MARGIN, up(mark)), label, fill=INK, font=font, anchor="rm")
    for part in range(TICKS):
        mark = x[0] + (x[-1] - x[0]) * part / (TICKS - 1)
        pen.line((across(mark), upper, across(mark), lower), fill=PALE)
        pen.text((across(mark), lower + MARGIN), f"{mark:.3g}", fill=INK, font=font, anchor="ma")
    pen.text(((left + right) // 2, HEIGHT - MARGIN), along, fill=INK, font=font, anchor="ms")
    key = float(left)
    for (name, values), colour in zip(named.items(), COLOURS, strict=False):
        pen.text((key + STROKE + 4, upper - 3), name, fill=INK, font=font, anchor="ls")
        pen.line((key, upper - 7, key + STROKE, upper - 7), fill=colour, width=3)
        key += font.getlength(name) + 2 * STROKE + 8
        points = [
            (across(at), up(math.log10(value) if is_wide else value)) if math.isfinite(value) else None
            for at, value in zip(x, values, strict=True)
        ]
        for before, point, after in zip([None, *points], points, [*points[1:], None], strict=False):
            if point is not None and before is not None:
                pen.line((*before, *point), fill=colour, width=2)
            elif point is not None and after is None:
                pen.circle(point, 2, fill=colour)
    return np.array(sheet)
