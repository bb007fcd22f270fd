"""Statistics of columns in float64, which are computed from one batch after another."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from torch import Tensor


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """Statistics of a column, of a channel, or of all numbers of a value.

    The mean, deviation, low and high are None if there are no finite numbers. They are also None if they are outside
    the range of float64.

    Args:
        name: Name of the column or channel. Empty for the statistics of all numbers of a value.
        count: Number of finite numbers.
        missing: Number of nan.
        infinite: Number of infinite numbers.
        mean: Mean of the finite numbers.
        deviation: Standard deviation of the finite numbers, defined as in NumPy's `std`.
        low: Smallest finite number.
        high: Largest finite number.
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
    """Return the moments of C columns, float64 `[7, C]`.

    The 7 rows are count, missing, infinite, mean, sum of squared deviations from the mean, low and high; see Numbers.

    Args:
        tensor: The columns, `[N, C]`.
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
    """Return the moments of two groups of rows together, `[7, C]`, computed from the moments of each group.

    The formulas are from Chan, Golub and LeVeque, Updating Formulae and a Pairwise Algorithm for Computing Sample
    Variances, 1979.

    Args:
        one: Moments of the first group, `[7, C]`.
        other: Moments of the second group, `[7, C]`.
    """
    counts = one[:3] + other[:3]
    share = other[0] / np.maximum(counts[0], 1)
    with np.errstate(over="ignore", invalid="ignore"):
        change = other[3] - one[3]
        mean, squares = one[3] + change * share, one[4] + other[4] + change * change * one[0] * share
    return np.stack([*counts, mean, squares, np.minimum(one[5], other[5]), np.maximum(one[6], other[6])])


def statistics(moments: np.ndarray, names: Sequence[str]) -> list[Numbers]:
    """Return the statistics of C columns, computed from their moments.

    Args:
        moments: Moments `[7, C]`, from the functions `moments` or `combine`.
        names: Names of the columns.
    """
    found = []
    for name, (count, missing, infinite, mean, squares, low, high) in zip(names, moments.T.tolist(), strict=True):
        figures = {"mean": mean, "deviation": math.sqrt(squares / max(count, 1)), "low": low, "high": high}
        held = {word: value if count and math.isfinite(value) else None for word, value in figures.items()}
        found.append(Numbers(name=name, count=int(count), missing=int(missing), infinite=int(infinite), **held))
    return found
