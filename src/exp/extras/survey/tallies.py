"""Statistics of columns, accumulated batch by batch in float64."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Statistics of a column, of a channel, or of a whole entry.

    Args:
        name: The column or channel; empty for a whole entry.
        count: The number of finite values.
        missing: The number of nan.
        infinite: The number of infinite values.
        mean, deviation, low, high: Statistics of the finite values; None without finite values, or outside the range of
            float64. The deviation is NumPy's `std`.
    """

    name: str
    count: int
    missing: int
    infinite: int
    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None


def moments(tensor: Tensor) -> np.ndarray:
    """Return count, missing, infinite, mean, sum of squared deviations, low and high of each column, `[7, C]`."""
    values = tensor.double().numpy()
    finite = np.isfinite(values)
    count, missing = finite.sum(0), np.isnan(values).sum(0)
    with np.errstate(over="ignore"):
        mean = np.where(finite, values, 0.0).sum(0) / np.maximum(count, 1)
        squares = np.square(np.where(finite, values, mean) - mean).sum(0)
    low = np.where(finite, values, math.inf).min(0, initial=math.inf)
    high = np.where(finite, values, -math.inf).max(0, initial=-math.inf)
    return np.stack([count, missing, len(values) - count - missing, mean, squares, low, high])


def combine(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the moments of two groups of rows together, with a numerically stable formula.

    Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    counts = one[:3] + other[:3]
    share = other[0] / np.maximum(counts[0], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        change = other[3] - one[3]
        mean, squares = one[3] + change * share, one[4] + other[4] + change * change * one[0] * share
    return np.stack([*counts, mean, squares, np.minimum(one[5], other[5]), np.maximum(one[6], other[6])])


def statistics(moments: np.ndarray, names: Sequence[str]) -> list[Numbers]:
    """Return the statistics of each column by name."""
    found = []
    for name, (count, missing, infinite, mean, squares, low, high) in zip(names, moments.T.tolist(), strict=True):
        figures = {"mean": mean, "deviation": math.sqrt(squares / max(count, 1)), "low": low, "high": high}
        held = {word: value if count and math.isfinite(value) else None for word, value in figures.items()}
        found.append(Numbers(name=name, count=int(count), missing=int(missing), infinite=int(infinite), **held))
    return found
