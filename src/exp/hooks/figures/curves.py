"""Curves over one axis as a picture, drawn on the host."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import numpy as np

from exp.hooks.figures.drawing import BLUE, GREEN, INK, MARGIN, ORANGE, PALE, PINK, TEXT_SIZE, blank, heights, legend

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
