"""The hook `profile`: torch.profiler over some steps, as files and a table."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from pathlib import Path
from typing import Annotated, Literal

from annotated_types import Ge, MinLen
from torch import nn
from torch.profiler import ProfilerActivity, profile, record_function

from exp.errors import ErrorDetails
from exp.files import write_atomic
from exp.hooks.hook import Boundary, Hook, Values
from exp.hooks.panels import Panel, Text
from exp.hooks.step import Step
from exp.strategies.process_group import global_rank
from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)

LIGHTNINGS = ("pytorch", "lightning.pytorch.profilers.PyTorchProfiler")
# The file has all rows.
PANEL_ROWS = 30


class Profile(Hook):
    """Records every operator of some steps, and writes two files into a folder of the hook's name in the run directory:

        trace.rank0.json.gz      a chrome trace, for https://ui.perfetto.dev and chrome://tracing
        operators.rank0.md       torch's table of the operators; its top is the text `profile/operators`

    Steps, forwards and backwards are ranges in the trace. A recorded step is slower, by the number of its operators:
    the shares hold, and the times of small operators do not. A run that ends inside the window writes what it has.

    Args:
        start_step: The first step that is recorded, counted from 1.
        steps: Number of steps that are recorded.
        warmup: Number of steps before them that run under the profiler and are discarded, because its first is slow.
        ranks: Global ranks that record, each to its own files. Rank 0's table is shown.
        shapes: Whether the table has a row for each shape of inputs.
        memory: Whether allocations are recorded.
        stacks: Whether the trace has Python functions, which is slow.
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
    ) -> None:
        super().__init__()
        if start_step <= warmup:
            raise ValueError(
                f"start_step is {start_step}; expected {warmup + 1} or more: steps are counted from 1, and {warmup} of "
                "warm-up come before it"
            )
        self.first, self.start, self.last = start_step - warmup, start_step, start_step + steps - 1
        self.ranks = ranks
        self._shapes, self._memory, self._stacks = shapes, memory, stacks
        # Whether the window is still to come, or has begun.
        self._is_waiting = False
        self._forget()

    def _forget(self) -> None:
        self._profiler: profile | None = None
        self._is_recording = self._on_device = False
        self._ranges: list[record_function] = []
        self._recorded: list[int] = []

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        trainer, world = planned.settings.trainer, planned.placement.world_size
        limit, profiler = trainer.max_steps, trainer.profiler
        if isinstance(limit, int) and 0 <= limit < self.last:
            got = f"{self.start}, of a window to step {self.last} in a run with trainer.max_steps={limit}"
            yield self.error("start_step", got=got, expected=f"a window that ends at step {limit} or before")
        if self.ranks != "all" and max(self.ranks) >= world:
            got = f"{list(self.ranks)}, of a run in {world} process{'es' if world > 1 else ''}"
            yield self.error("ranks", got=got, expected=f"ranks from 0 to {world - 1}, or all")
        others = [f"hooks.{name}" for name, hook in planned.hooks.items() if isinstance(hook, Profile)]
        if (profiler["_target_"] if isinstance(profiler, Mapping) else profiler) in LIGHTNINGS:
            others.append("trainer.profiler")
        if len(others) > 1 and others[0] == f"hooks.{self.name}":
            yield self.error(
                got=" and ".join(others),
                expected="one of them: a process has one torch.profiler",
                fix=f"Leave one out: ~hooks.{self.name}, or trainer.profiler=null",
            )

    def setup(self, network: nn.Module) -> None:
        self._forget()
        self._rank = global_rank()
        self._is_waiting = self.ranks == "all" or self._rank in self.ranks

    def due(self, index: int) -> bool:
        if index > self.last and not self._recorded:
            self._is_waiting = False  # a run that was resumed after its window
        return self._is_waiting and self.first <= index <= self.last

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
            self._ranges.pop().__exit__(None, None, None)

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        return record_function("forward") if self._is_recording else None

    def after_step(self, step: Step) -> Values | None:
        self._close_all()
        if self._profiler is None:
            return None
        if step.index + 1 == self.start:
            # From here, so that the wait for the first step's batch is in the trace.
            self._start()
        return self._finish() if step.index == self.last else None

    def ended(self) -> None:
        # Before the strategy is taken down: fsdp could not be, while a profiler refers to its parameters.
        self.teardown()

    def teardown(self) -> None:
        """Write the steps of a window that the end of the run cuts, so that nothing goes on recording."""
        if not self._is_waiting:
            return
        recorded = len(self._recorded)
        self._close_all()
        try:
            self._finish()
        except Exception:
            # The run may be ending by an error, which is the one to report.
            log.exception("hooks.%s could not write what it had recorded", self.name)
            return
        log.warning(
            "hooks.%s: the run ended before the end of its window at step %s; steps written: %s",
            self.name,
            self.last,
            recorded,
        )

    # --- the profiler ---

    def _prepare(self, step: Step) -> None:
        self._on_device = step.device.type == "cuda"
        activities = [ProfilerActivity.CPU] + ([ProfilerActivity.CUDA] if self._on_device else [])
        self._profiler = profile(
            activities=activities,
            record_shapes=self._shapes,
            profile_memory=self._memory,
            with_stack=self._stacks,
            # One cycle; without it, torch 2.11 warns that a second one would clear the events.
            acc_events=True,
        )
        self._profiler.prepare_trace()
        if step.index >= self.start:
            self._start()

    def _start(self) -> None:
        assert self._profiler is not None
        self._profiler.start_trace()
        self._is_recording = True

    def _finish(self) -> dict[str, Panel]:
        """Stop the profiler, write the files, and free everything."""
        profiler, recorded = self._profiler, self._recorded
        if profiler is not None and not self._is_recording:
            # Only a trace that began can be stopped.
            self._start()
        on_device = self._on_device
        self._forget()
        self._is_waiting = False
        if profiler is None:
            return {}
        profiler.stop_trace()
        try:
            if not recorded:
                return {}
            assert self.directory is not None
            title = f"Operators of steps {recorded[0]} to {recorded[-1]}, rank {self._rank}, all steps together"
            return self._write(profiler, self.directory / self.name, title=title, on_device=on_device)
        finally:
            # A profiler refers to itself, and to tensors that it saw: fsdp could not be taken down.
            del profiler
            gc.collect()

    def _write(self, profiler: profile, folder: Path, *, title: str, on_device: bool) -> dict[str, Panel]:
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"trace.rank{self._rank}.json.gz"))
        averages = profiler.key_averages(group_by_input_shape=self._shapes)
        order = "self_device_time_total" if on_device else "self_cpu_time_total"
        whole, top = (
            f"{title}:\n\n```\n{averages.table(sort_by=order, row_limit=rows, max_name_column_width=80)}\n```\n"
            for rows in (-1, PANEL_ROWS)
        )
        write_atomic(folder / f"operators.rank{self._rank}.md", whole)
        return {"profile/operators": Text(top)}

    # --- its ranges ---

    def _open(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._ranges.append(entered)

    def _close_all(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)
