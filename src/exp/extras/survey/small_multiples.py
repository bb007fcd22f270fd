"""Figures that compare the parts of a data set: histograms of many columns beside each other, shares of classes."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np
from PIL import ImageDraw

from exp.hooks.figures import CARD, COLOURS, INK, MARGIN, PALE, TEXT_SIZE, Font, blank, cut, legend

FEWEST_BINS, MOST_BINS = 8, 32
# One histogram with its name above and its limits below; two or three fill a card.
WIDE, HIGH, COLUMNS = 170, 96, 4
LINE = TEXT_SIZE + 3
BAR_HEIGHT, MOST_NAMES = 180, 40


def histograms(columns: Mapping[str, Mapping[str, np.ndarray]], *, title: str) -> np.ndarray:
    """How the numbers of each column are distributed, the parts over each other: uint8 `[H, W, 3]`.

    All parts have the same area, whatever their size. Numbers that are not finite are left out.

    columns: `[N]` by the column's name and by part.
    """
    across = min(COLUMNS, len(columns))
    rows = -(-len(columns) // across)
    top = 2 * LINE + 2 * MARGIN
    sheet, pen, font = blank(max(CARD, across * (WIDE + MARGIN) + MARGIN), top + rows * (HIGH + 2 * LINE + MARGIN))
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    parts = list(dict.fromkeys(part for own in columns.values() for part in own))
    legend(pen, font, dict(zip(parts, COLOURS, strict=False)), left=MARGIN, floor=2 * LINE + MARGIN)
    for place, (name, own) in enumerate(columns.items()):
        left = MARGIN + place % across * (WIDE + MARGIN)
        upper = top + place // across * (HIGH + 2 * LINE + MARGIN)
        pen.text((left, upper), cut(name, font, WIDE), fill=INK, font=font)
        _outlines(pen, font, own, parts, left=left, upper=upper + LINE)
    return np.array(sheet)


def _outlines(
    pen: ImageDraw.ImageDraw, font: Font, own: Mapping[str, np.ndarray], parts: Sequence[str], *, left: int, upper: int
) -> None:
    floor = upper + HIGH
    pen.rectangle((left, upper, left + WIDE - 1, floor), outline=PALE)
    finite = {part: values[np.isfinite(values)].astype(np.float64) for part, values in own.items()}
    finite = {part: values for part, values in finite.items() if len(values)}
    if not finite:
        return
    low, high = min(map(np.min, finite.values())), max(map(np.max, finite.values()))
    ends = (low - 0.5, high + 0.5) if low == high else (low, high)
    # As many as the smallest part can fill.
    bins = int(np.clip(math.isqrt(min(map(len, finite.values()))), FEWEST_BINS, MOST_BINS))
    shares = {part: np.histogram(values, bins, ends)[0] / len(values) for part, values in finite.items()}
    most = max(float(share.max()) for share in shares.values())
    for part, share in shares.items():
        points = [(float(left), float(floor))]
        for place, value in enumerate(share):
            at = floor - (HIGH - 4) * value / most
            points += [(left + (WIDE - 1) * place / bins, at), (left + (WIDE - 1) * (place + 1) / bins, at)]
        pen.line([*points, (left + WIDE - 1, floor)], fill=COLOURS[parts.index(part)], width=1)
    pen.text((left, floor + 1), f"{low:.3g}", fill=INK, font=font)
    pen.text((left + WIDE, floor + 1), f"{high:.3g}", fill=INK, font=font, anchor="ra")


def class_shares(shares: Mapping[str, Sequence[float]], names: Sequence[str], *, title: str) -> np.ndarray:
    """Which share of each part's samples has each class, as bars beside each other: uint8 `[H, W, 3]`.

    shares: `[V]`, from 0 to 1, by part. names: of the V classes; of many, they are left out.
    """
    groups, bars = max(1, len(names)), max(1, len(shares))
    width = max(1, min(14, 900 // (groups * (bars + 1))))
    has_names = groups <= MOST_NAMES
    sheet, pen, font = blank(1, 1)
    step = max(width * (bars + 1), 0 if not has_names else min(90, int(max(map(font.getlength, names), default=0))) + 6)
    top, left = 3 * LINE + 2 * MARGIN, 40
    floor = top + BAR_HEIGHT
    sheet, pen, font = blank(max(CARD, left + groups * step + MARGIN), floor + LINE + MARGIN)
    pen.text((MARGIN, MARGIN), title, fill=INK, font=font)
    legend(pen, font, dict(zip(shares, COLOURS, strict=False)), left=MARGIN, floor=2 * LINE + MARGIN)
    most = max((share for own in shares.values() for share in own), default=1.0) or 1.0
    for mark in (0.0, 0.5, 1.0):
        at = floor - BAR_HEIGHT * mark
        pen.line((left, at, sheet.width - MARGIN, at), fill=PALE)
        pen.text((left - 4, at), f"{100 * most * mark:.3g}%", fill=INK, font=font, anchor="rm")
    for group, name in enumerate(names):
        start = left + group * step + (step - width * bars) // 2
        for bar, (own, colour) in enumerate(zip(shares.values(), COLOURS, strict=False)):
            high = BAR_HEIGHT * own[group] / most
            if high:
                at = start + bar * width
                pen.rectangle((at, min(floor - 1, floor - high), at + max(0, width - 2), floor), fill=colour)
        if has_names:
            middle = left + group * step + step // 2
            pen.text((middle, floor + 3), cut(name, font, step), fill=INK, font=font, anchor="ma")
    return np.array(sheet)
