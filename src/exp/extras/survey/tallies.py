"""Figures of a part that are added up batch by batch: moments in float64, counts of whole numbers, lengths."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

# Numbers that are looked at together: what they are turned into for that stays in cache.
CHUNK = 2**18
# Whole numbers that are counted in a table of all between the least and the largest.
BINS = 2**16


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What there is to say of numbers: of a column, a channel, or a whole entry.

    name: of the column or channel; empty for a whole entry. count: finite ones, of which all but the next two are.
    missing, infinite: how many are nan, and how many infinite.
    mean, deviation, low, high: None where none is finite. The deviation is the root of the mean square (NumPy's std).
    """

    name: str
    count: int
    missing: int
    infinite: int
    mean: float | None
    deviation: float | None
    low: float | None
    high: float | None


class Moments:
    """Adds up numbers by column, in float64: each batch by itself in two passes, and batches by Chan, Golub and LeVeque
    (Updating Formulae and a Pairwise Algorithm for Computing Sample Variances, 1979), so that no digits are lost where
    the mean is large.
    """

    def __init__(self, columns: int) -> None:
        self._count = np.zeros(columns, np.int64)
        self._missing, self._infinite = np.zeros(columns, np.int64), np.zeros(columns, np.int64)
        self._mean, self._squares = np.zeros(columns), np.zeros(columns)
        self._low, self._high = np.full(columns, math.inf), np.full(columns, -math.inf)

    def add(self, values: Tensor) -> None:
        """values: `[N, C]` of any dtype; of complex ones the magnitude."""
        rows = max(1, CHUNK // max(1, values.shape[1]))
        for part in values.split(rows):
            self._add((part.abs() if part.is_complex() else part).to(torch.float64).numpy())

    def take(self, other: Moments) -> None:
        """Adds all columns of another one to this one's only column."""
        for column in range(len(other._count)):
            one = slice(column, column + 1)
            self._merge(other._count[one], other._mean[one], other._squares[one])
            self._missing += other._missing[one]
            self._infinite += other._infinite[one]
            self._low = np.minimum(self._low, other._low[one])
            self._high = np.maximum(self._high, other._high[one])

    def _add(self, values: np.ndarray) -> None:
        finite = np.isfinite(values)
        count = finite.sum(0)
        missing = np.isnan(values).sum(0)
        self._missing += missing
        self._infinite += len(values) - count - missing
        mean = np.where(finite, values, 0.0).sum(0) / np.maximum(count, 1)
        around = np.where(finite, values, mean) - mean
        self._merge(count, mean, (around * around).sum(0))
        self._low = np.minimum(self._low, np.where(finite, values, math.inf).min(0, initial=math.inf))
        self._high = np.maximum(self._high, np.where(finite, values, -math.inf).max(0, initial=-math.inf))

    def _merge(self, count: np.ndarray, mean: np.ndarray, squares: np.ndarray) -> None:
        whole = np.maximum(self._count + count, 1)
        change = mean - self._mean
        # A part without a number has the mean 0, which counts for nothing.
        self._squares += squares + change * change * self._count * count / whole
        self._mean += change * count / whole
        self._count += count

    def numbers(self, names: Sequence[str]) -> list[Numbers]:
        """names: of the columns."""
        return [
            Numbers(
                name=name,
                count=int(self._count[place]),
                missing=int(self._missing[place]),
                infinite=int(self._infinite[place]),
                mean=float(self._mean[place]) if self._count[place] else None,
                deviation=math.sqrt(self._squares[place] / self._count[place]) if self._count[place] else None,
                low=float(self._low[place]) if self._count[place] else None,
                high=float(self._high[place]) if self._count[place] else None,
            )
            for place, name in enumerate(names)
        ]


def merged(parts: Iterable[Moments]) -> Moments:
    """All columns of several as one."""
    whole = Moments(1)
    for part in parts:
        whole.take(part)
    return whole


class Counts:
    """Counts whole numbers, each by itself."""

    def __init__(self) -> None:
        self.of: Counter[int] = Counter()

    def add(self, values: Tensor) -> None:
        """values: whole numbers of any shape."""
        if not values.numel():
            return
        low, high = (int(value) for value in values.aminmax())
        if high - low < BINS:  # without the sorting that np.unique does, ten times faster on masks of pictures
            counts = torch.bincount(values.reshape(-1).long() - low)
            found = counts.nonzero()[:, 0]
            self.of.update(dict(zip((found + low).tolist(), counts[found].tolist(), strict=True)))
        else:
            numbers, times = np.unique(values.numpy(), return_counts=True)
            self.of.update(dict(zip(numbers.tolist(), times.tolist(), strict=True)))


@dataclass(kw_only=True)
class Lengths:
    """Of samples along their first axis: the shortest, the longest, and the mean."""

    count: int = 0
    total: int = 0
    low: int = 0
    high: int = 0

    def add(self, lengths: Sequence[int]) -> None:
        if not lengths:
            return
        low, high = min(lengths), max(lengths)
        self.low, self.high = (min(self.low, low), max(self.high, high)) if self.count else (low, high)
        self.count += len(lengths)
        self.total += sum(lengths)

    @property
    def mean(self) -> float:
        return self.total / max(self.count, 1)
