"""How far the numbers of tensors go, and how many of them are none."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from torch import Tensor


@dataclass(frozen=True, kw_only=True, slots=True)
class Extent:
    """Of the numbers of some tensors: how many there are, nan, infinite, and the least and the greatest finite one.

    low, high: nan where none is finite.
    """

    count: int = 0
    nans: int = 0
    infinities: int = 0
    low: float = math.nan
    high: float = math.nan

    @classmethod
    def of(cls, tensors: Iterable[Tensor]) -> Extent:
        """Of floating and complex tensors; others are left out. Waits for their devices."""
        found = cls()
        for tensor in tensors:
            found = found + _of_one(tensor)
        return found

    def __add__(self, other: Extent) -> Extent:
        return Extent(
            count=self.count + other.count,
            nans=self.nans + other.nans,
            infinities=self.infinities + other.infinities,
            low=_least(self.low, other.low),
            high=-_least(-self.high, -other.high),
        )

    @property
    def bad(self) -> int:
        """How many are not finite."""
        return self.nans + self.infinities

    @property
    def share(self) -> float:
        """Which share of them is not finite."""
        return self.bad / self.count if self.count else 0.0

    @property
    def absmax(self) -> float:
        """The greatest absolute value of a finite one."""
        return max(abs(self.low), abs(self.high))

    def __str__(self) -> str:
        kinds = [f"{count} {name}" for count, name in ((self.nans, "nan"), (self.infinities, "infinite")) if count]
        return f"{' and '.join(kinds) or 'none'} of {self.count} numbers"


def is_mask(tensor: Tensor) -> bool:
    """Whether its infinities are meant: the negative ones of a tensor that learns nothing, as attention masks have."""
    return not tensor.requires_grad and not (tensor.isnan().any() or (tensor == math.inf).any())


def _of_one(tensor: Tensor) -> Extent:
    if tensor.is_sparse:
        tensor = tensor.coalesce().values()
    tensor = tensor.detach()
    if tensor.is_complex():
        tensor = tensor.abs()
    if not tensor.is_floating_point() or not tensor.numel():
        return Extent()
    finite = tensor.isfinite()
    nans = int(tensor.isnan().sum())
    bad = tensor.numel() - int(finite.sum())
    known = tensor if not bad else tensor[finite]
    low, high = (float(one) for one in known.aminmax()) if known.numel() else (math.nan, math.nan)
    return Extent(count=tensor.numel(), nans=nans, infinities=bad - nans, low=low, high=high)


def _least(one: float, other: float) -> float:
    return other if math.isnan(one) else one if math.isnan(other) else min(one, other)
