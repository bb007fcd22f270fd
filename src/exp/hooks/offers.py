"""What exp offers to the constructor of a hook that has a parameter of that name: `origin` and `workload`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from exp.models.flop_count import FlopCount


@dataclass(frozen=True, kw_only=True)
class Origin:
    """What a run was made from. read: gives its config, whole, as YAML. allow: the packages that it trusts."""

    read: Callable[[], str]
    allow: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a run's step computes, and on what.

    precision: its word. devices: on which all ranks together compute.
    flops: of one sample in a step, from a batch as the data set gives it.
    """

    precision: str
    devices: int
    flops: Callable[[object], FlopCount]
