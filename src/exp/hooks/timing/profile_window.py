"""Which steps of which ranks are profiled, and what can be said against it before the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

LIGHTNINGS = ("pytorch", "lightning.pytorch.profilers.PyTorchProfiler")
OWN = "exp.hooks.profile.Profile"


@dataclass(frozen=True, kw_only=True)
class ProfileWindow:
    """Steps from `start` on, `steps` of them, and `warmup` before; of some global ranks.

    Raises ValueError: a window that no run has.
    """

    start: int = 10
    steps: int = 3
    warmup: int = 2
    ranks: Sequence[int] | Literal["all"] = (0,)

    def __post_init__(self) -> None:
        if self.steps < 1:
            raise ValueError(f"steps is {self.steps}; expected 1 or more")
        if self.warmup < 0:
            raise ValueError(f"warmup is {self.warmup}; expected 0 or more steps")
        if self.start <= self.warmup:
            raise ValueError(
                f"start_step is {self.start}, with {self.warmup} steps of warm-up before it; expected "
                f"{self.warmup + 1} or more, for steps are counted from 1"
            )
        if self.ranks != "all" and (not self.ranks or min(self.ranks) < 0):
            raise ValueError(f"ranks is {list(self.ranks)}; expected ranks, counted from 0, or all")

    @property
    def first(self) -> int:
        """The first step under the profiler."""
        return self.start - self.warmup

    @property
    def last(self) -> int:
        return self.start + self.steps - 1

    def is_of(self, rank: int) -> bool:
        return self.ranks == "all" or rank in self.ranks

    def overlaps(self, other: ProfileWindow) -> bool:
        """Whether one rank would have two profilers at a time, which torch does not keep apart."""
        if self.ranks != "all" and other.ranks != "all" and not set(self.ranks) & set(other.ranks):
            return False
        return self.first <= other.last and other.first <= self.last

    def __str__(self) -> str:
        return f"step {self.start}" if self.steps == 1 else f"steps {self.start} to {self.last}"


def window_of(node: Mapping[str, Any]) -> ProfileWindow:
    """That of a plain node of this hook."""
    names = {"start_step": "start", "steps": "steps", "warmup": "warmup", "ranks": "ranks"}
    return ProfileWindow(**{names[key]: value for key, value in node.items() if key in names})
