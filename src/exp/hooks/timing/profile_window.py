"""Which steps of which ranks are profiled, and what can be said against it before the run."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exp.errors import Fault
from exp.strategies.strategy import Planned

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


def faults_of_window(window: ProfileWindow, planned: Planned, *, name: str) -> Iterator[Fault]:
    """name: of the hook in the config."""
    config = planned.config
    limit = config["trainer"].get("max_steps")
    if isinstance(limit, int) and 0 <= limit < window.last:
        yield Fault(
            key=f"hooks.{name}.start_step",
            got=f"{window.start}, and steps: {window.steps}: {window}, of a run with trainer.max_steps={limit}",
            expected=f"a window that ends at step {limit} or before",
        )
    world = planned.placement.world_size
    if window.ranks != "all" and max(window.ranks) >= world:
        got = f"{list(window.ranks)}, of a run in {world} process{'es' if world > 1 else ''}"
        yield Fault(key=f"hooks.{name}.ranks", got=got, expected=f"ranks from 0 to {world - 1}, or all")
    profiler = config["trainer"].get("profiler")
    if (profiler.get("_target_") if isinstance(profiler, Mapping) else profiler) in LIGHTNINGS:
        yield Fault(
            key=f"hooks.{name}",
            got="torch.profiler, beside trainer.profiler=pytorch, which is the same one",
            expected="one of the two: a process has one torch.profiler at a time",
            cure=f"Leave one out: ~hooks.{name}, or trainer.profiler=null",
        )
    yield from _overlaps(window, config["hooks"], name=name)


def _overlaps(window: ProfileWindow, hooks: Mapping[str, Mapping[str, Any]], *, name: str) -> Iterator[Fault]:
    """With the windows of the hooks before this one, so that each pair is told once."""
    for other, node in hooks.items():
        if other == name:
            return
        if node["_target_"] == OWN and window.overlaps(before := window_of(node)):
            yield Fault(
                key=f"hooks.{name}.start_step",
                got=f"{window.start}: {window} and {window.warmup} before them, beside hooks.{other} with {before}",
                expected="windows that do not overlap: a process has one torch.profiler at a time",
            )


def window_of(node: Mapping[str, Any]) -> ProfileWindow:
    """That of a plain node of this hook."""
    names = {"start_step": "start", "steps": "steps", "warmup": "warmup", "ranks": "ranks"}
    return ProfileWindow(**{names[key]: value for key, value in node.items() if key in names})
