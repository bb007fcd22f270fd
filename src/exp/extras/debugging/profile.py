"""The hook `profile`: torch.profiler over some steps, as files and panels."""

from __future__ import annotations

import gc
import itertools
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Annotated, Literal

import torch
from annotated_types import Ge, MinLen
from torch import nn
from torch.profiler import ProfilerActivity, record_function

from exp.errors import Fault
from exp.extras.debugging.profile_files import RecordedWindow
from exp.hooks.hook import Boundary, Hook, Values
from exp.hooks.panels import Panel
from exp.hooks.step import Step
from exp.strategies.process_group import global_rank
from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)


class Profile(Hook):
    """Records every operator of some steps, and writes below the run directory, in a folder of the hook's name:

        trace.rank0.json.gz      a chrome trace, for https://ui.perfetto.dev and chrome://tracing
        operators.rank0.md       the operators, the most expensive first; its top is the text `profile/operators`
        memory.rank0.csv, .png   with `memory` each allocation, and a picture, which is the image `profile/memory`

    Steps, forwards and backwards are ranges in the trace. A recorded step is slower, by its operators' number: the
    shares hold, and the times of small operators do not. A run that ends inside the window writes what it has.

    start_step: the first step that is recorded, counted from 1. steps: how many are.
    warmup: so many steps before them run under the profiler, too, and are thrown away: its first step is slow.
    ranks: global ranks that record, each to its own files; `all` is every one. Rank 0's panels are shown.
    shapes: tell operators apart by the shapes of their inputs. stacks: the trace has Python's functions; slow.
    rows: of the table in the text; the file has all.
    """

    def __init__(
        self,
        *,
        start_step: int = 10,
        steps: Annotated[int, Ge(1)] = 3,
        warmup: Annotated[int, "a number of steps", Ge(0)] = 2,
        ranks: Annotated[Sequence[Annotated[int, Ge(0)]], "ranks, counted from 0", MinLen(1)] | Literal["all"] = (0,),
        shapes: bool = True,
        memory: bool = True,
        stacks: bool = False,
        rows: Annotated[int, Ge(1)] = 30,
    ) -> None:
        super().__init__()
        self.window = ProfileWindow(start=start_step, steps=steps, warmup=warmup, ranks=ranks)
        self._shapes, self._memory, self._stacks, self._rows = shapes, memory, stacks, rows
        # Whether the window is still to come, or under way, in a run that is.
        self._is_waiting = False
        self._forget()

    def _forget(self) -> None:
        self._profiler: torch.profiler.profile | None = None
        self._is_recording = self._on_device = False
        self._ranges: list[record_function] = []
        self._recorded: list[int] = []

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        window, config, world = self.window, planned.config, planned.placement.world_size
        limit, profiler = config["trainer"]["max_steps"], config["trainer"]["profiler"]
        if isinstance(limit, int) and 0 <= limit < window.last:
            got = f"{window.start}, and steps: {window.steps}: {window}, of a run with trainer.max_steps={limit}"
            yield self.fault("start_step", got=got, expected=f"a window that ends at step {limit} or before")
        if window.ranks != "all" and max(window.ranks) >= world:
            got = f"{list(window.ranks)}, of a run in {world} process{'es' if world > 1 else ''}"
            yield self.fault("ranks", got=got, expected=f"ranks from 0 to {world - 1}, or all")
        if (profiler.get("_target_") if isinstance(profiler, Mapping) else profiler) in LIGHTNINGS:
            yield self.fault(
                got="torch.profiler, beside trainer.profiler=pytorch, which is the same one",
                expected="one of the two: a process has one torch.profiler at a time",
                cure=f"Leave one out: ~hooks.{self.name}, or trainer.profiler=null",
            )
        # With the windows of the hooks before this one, so that each pair is told once.
        for other, hook in itertools.takewhile(lambda item: item[0] != self.name, planned.hooks.items()):
            if isinstance(hook, Profile) and window.overlaps(before := hook.window):
                got = f"{window.start}: {window} and {window.warmup} before them, beside hooks.{other} with {before}"
                expected = "windows that do not overlap: a process has one torch.profiler at a time"
                yield self.fault("start_step", got=got, expected=expected)

    def setup(self, network: nn.Module) -> None:
        self._forget()
        self._rank = global_rank()
        self._is_waiting = self.window.is_of(self._rank)

    def due(self, index: int) -> bool:
        if index > self.window.last and not self._recorded:
            self._is_waiting = False  # a run that was resumed behind its window
        return self._is_waiting and self.window.first <= index <= self.window.last

    # --- the window ---

    def passed(self, boundary: Boundary, step: Step) -> None:
        if boundary == "batch" and self._profiler is None:
            self._prepare(step)
        if not self._is_recording:
            return
        if boundary == "batch" and not self._ranges:
            self._open(f"step {step.index}")
            self._recorded.append(step.index)
        elif boundary == "forward":
            self._open("backward")
        elif boundary == "backward" and len(self._ranges) > 1:
            self._close()

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        return record_function("forward") if self._is_recording else None

    def after_step(self, step: Step) -> Values | None:
        self._close_all()
        if self._profiler is None:
            return None
        if step.index + 1 == self.window.start:
            # From here, so that the wait for the first step's batch is in the trace.
            self._start()
        return self._finish() if step.index == self.window.last else None

    def ended(self) -> None:
        # Before the strategy is taken down: fsdp could not, while a profiler looks at its parameters.
        self.teardown()

    def teardown(self) -> None:
        """Ends what was begun, whatever ended the run, so that nothing goes on recording."""
        if not self._is_waiting:
            return
        recorded, is_cut = len(self._recorded), bool(self._ranges)
        self._close_all()
        try:
            self._finish()
        except Exception:
            # The run may be ending by an error of its own, which is the one to tell.
            log.exception("hooks.%s could not write what it had recorded", self.name)
        else:
            log.warning(
                "hooks.%s: the run ended before the end of its window, %s; %s",
                self.name,
                self.window,
                f"{recorded} of them {'is' if recorded == 1 else 'are'} written{', the last one in part' * is_cut}"
                if recorded
                else "nothing is written",
            )

    # --- the profiler ---

    def _prepare(self, step: Step) -> None:
        self._on_device = step.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_device else [])
        self._profiler = torch.profiler.profile(
            activities=activities,
            record_shapes=self._shapes,
            profile_memory=self._memory,
            with_stack=self._stacks,
            # One cycle; without it, torch 2.11 warns that a second one would clear the events.
            acc_events=True,
        )
        self._profiler.prepare_trace()
        if step.index >= self.window.start:
            self._start()

    def _start(self) -> None:
        assert self._profiler is not None
        self._profiler.start_trace()
        self._is_recording = True

    def _finish(self) -> dict[str, Panel]:
        """Stops, writes, and lets everything go."""
        profiler, recorded, is_recording = self._profiler, self._recorded, self._is_recording
        self._forget()
        self._is_waiting = False
        if profiler is None:
            return {}
        if not is_recording:
            # It is ended by being begun: what was prepared is given back then only.
            profiler.start_trace()
        profiler.stop_trace()
        if not recorded:
            return {}
        assert self.directory is not None
        steps = f"step {recorded[0]}" if len(recorded) == 1 else f"steps {recorded[0]} to {recorded[-1]}"
        ended = RecordedWindow(
            profiler=profiler,
            what=f"{steps}, rank {self._rank}",
            rank=self._rank,
            on_device=self._on_device,
            with_shapes=self._shapes,
            with_memory=self._memory,
            rows=self._rows,
        )
        try:
            return ended.write(self.directory / self.name)
        finally:
            # A profiler refers to itself, and to tensors that it saw: fsdp could not be taken down.
            del profiler, ended
            gc.collect()

    # --- its ranges ---

    def _open(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._ranges.append(entered)

    def _close(self) -> None:
        self._ranges.pop().__exit__(None, None, None)

    def _close_all(self) -> None:
        while self._ranges:
            self._close()


LIGHTNINGS = ("pytorch", "lightning.pytorch.profilers.PyTorchProfiler")


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
        if self.start <= self.warmup:
            raise ValueError(
                f"start_step is {self.start}; expected {self.warmup + 1} or more: steps are counted from 1, and "
                f"{self.warmup} of warm-up come before it"
            )

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
