"""What the numbers of several runs say together: a band around curves, the share that a key explains, a Pareto front.

NumPy alone: nothing here knows of runs, and a report of many is made in a moment.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from exp.shared_types import Mode

# Of fewer values a share explained is luck.
LEAST_RUNS = 8
# A numeric key of more values than these is cut into so many bins.
MOST_BINS = 4


@dataclass(frozen=True, kw_only=True, eq=False)
class Band:
    """Curves of repeats in one. steps `[N]`; mean and deviation `[N]`, nan where a curve is not finite. count: curves.

    deviation: of the sample, over n - 1; nan of a single curve.
    """

    steps: np.ndarray
    mean: np.ndarray
    deviation: np.ndarray
    count: int


def band(curves: Sequence[tuple[np.ndarray, np.ndarray]]) -> Band | None:
    """The mean of curves and their deviation, at every step that one of them has and that lies within all of them.

    A curve without a value at such a step has there what a straight line between its neighbours has. No curve is
    drawn on beyond its ends, where the mean of those that are left would be of other runs.

    curves: steps, rising, and values of each. Returns: None where no step lies within all of them.
    """
    curves = [(steps, values) for steps, values in curves if len(steps)]
    if not curves:
        return None
    first, last = max(steps[0] for steps, _ in curves), min(steps[-1] for steps, _ in curves)
    steps = np.unique(np.concatenate([steps for steps, _ in curves]))
    steps = steps[(steps >= first) & (steps <= last)]
    if not len(steps):
        return None
    there = np.stack([np.interp(steps, own, np.where(np.isfinite(values), values, np.nan)) for own, values in curves])
    deviation = there.std(axis=0, ddof=1) if len(curves) > 1 else np.full(len(steps), np.nan)
    return Band(steps=steps, mean=there.mean(axis=0), deviation=deviation, count=len(curves))


def numbers(texts: Sequence[str]) -> np.ndarray | None:
    """The finite numbers that texts are, float64 `[N]`; None where one is another word, or none is there."""
    try:
        found = np.array([float(text) for text in texts], np.float64)
    except ValueError:
        return None
    return found if len(found) and np.isfinite(found).all() else None


def ranks(values: np.ndarray) -> np.ndarray:
    """The rank of each value from 1 on, float64 `[N]`; equal values share the mean of their ranks."""
    _, places, counts = np.unique(values, return_inverse=True, return_counts=True)
    ends = np.cumsum(counts)
    return np.asarray((ends - (counts - 1) / 2)[places])


def bins_of(texts: Sequence[str]) -> list[int]:
    """The group of each value of a key: equal values are one, and numbers of many values are cut at their quantiles."""
    found = numbers(texts)
    if found is None or len(np.unique(found)) <= MOST_BINS:
        values = texts if found is None else found.tolist()
        places = {value: place for place, value in enumerate(dict.fromkeys(values))}
        return [places[value] for value in values]
    limits = np.unique(np.quantile(found, np.arange(1, MOST_BINS) / MOST_BINS))
    return [int(place) for place in np.searchsorted(limits, found, side="left")]


def share_explained(texts: Sequence[str], values: Sequence[float]) -> float | None:
    """The share of the variance of the values' ranks that one key explains alone, from 0 to 1.

    The runs are grouped by the key (`bins_of`), and the share is Kelley's epsilon squared of their ranks, which is eta
    squared less what groups of so many runs explain by chance (Kelley, "An unbiased correlation ratio measure", 1935):

        1 - (SS_within / (n - k)) / (SS_total / (n - 1)),   clipped at 0

    of n runs in k groups. It is what a key explains by itself, whatever the others are: of two keys that matter only
    together each may have 0, and the shares need not add up to 1. Of bins, the variance within them is not explained.

    texts: the key's value of each run. values: finite.
    Returns: None of fewer than LEAST_RUNS runs, of one group, of a key with another value in every run that is no
    number, and where all values are equal.
    """
    groups, ranked = np.array(bins_of(texts)), ranks(np.array(values, np.float64))
    n, k = len(groups), len(np.unique(groups))
    total = float(((ranked - ranked.mean()) ** 2).sum()) if n else 0.0
    if n < LEAST_RUNS or not 1 < k < n or not total:
        return None
    members = [ranked[groups == group] for group in np.unique(groups)]
    within = sum(float(((own - own.mean()) ** 2).sum()) for own in members)
    return max(0.0, 1 - (within / (n - k)) / (total / (n - 1)))


def pareto_front(points: np.ndarray, modes: Sequence[Mode]) -> np.ndarray:
    """Whether each point is dominated by no other: none is as good in every coordinate and better in one, bool `[N]`.

    points: `[N, K]`, finite. modes: what is better in each coordinate.
    """
    smaller = points * np.array([1.0 if mode == "min" else -1.0 for mode in modes])
    front = np.ones(len(points), bool)
    for place, point in enumerate(smaller):
        front[place] = not ((smaller <= point).all(axis=1) & (smaller < point).any(axis=1)).any()
    return front


def spans_decades(values: np.ndarray) -> bool:
    """Whether positive values are more than two decades apart, so that a logarithmic axis shows more of them."""
    finite = values[np.isfinite(values)]
    return bool(len(finite) and finite.min() > 0 and finite.max() / finite.min() > 100)
