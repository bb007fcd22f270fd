"""Computes statistics of columns in float64, batch by batch."""

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
        name: Name of the column or channel; empty for a whole entry.
        count: Number of finite values.
        missing: Number of nan values.
        infinite: Number of infinite values.
        mean: Mean of the finite values. This and the following fields are None without finite values, or if the result
            is outside the range of float64.
        deviation: Standard deviation of the finite values, as NumPy's `std`.
        low: Smallest finite value.
        high: Largest finite value.
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
    """Return the moments of each of C columns, `[7, C]`.

    The rows are count, missing, infinite, mean, sum of squared deviations, low and high; see Numbers.
    """
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
    """Return the moments of the union of two groups of rows from the moments of each group.

    Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979.
    """
    counts = one[:3] + other[:3]
    share = other[0] / np.maximum(counts[0], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        change = other[3] - one[3]
        mean, squares = one[3] + change * share, one[4] + other[4] + change * change * one[0] * share
    return np.stack([*counts, mean, squares, np.minimum(one[5], other[5]), np.maximum(one[6], other[6])])


def statistics(moments: np.ndarray, names: Sequence[str]) -> list[Numbers]:
    """Return the statistics of each column from its moments.

    Args:
        moments: Moments `[7, C]`, from `moments` or `combine`.
        names: Names of the C columns.
    """
    found = []
    for name, (count, missing, infinite, mean, squares, low, high) in zip(names, moments.T.tolist(), strict=True):
        figures = {"mean": mean, "deviation": math.sqrt(squares / max(count, 1)), "low": low, "high": high}
        held = {word: value if count and math.isfinite(value) else None for word, value in figures.items()}
        found.append(Numbers(name=name, count=int(count), missing=int(missing), infinite=int(infinite), **held))
    return found
