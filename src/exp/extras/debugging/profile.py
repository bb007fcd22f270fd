"""The hook `profile`: records some steps with torch.profiler, and writes a trace and a table."""

from __future__ import annotations

import gc
import logging
from collections.abc import Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Annotated, Literal

from annotated_types import Ge, MinLen
from torch import nn
from torch.profiler import ProfilerAction, ProfilerActivity, profile, record_function

from exp.errors import ErrorDetails
from exp.files import write_atomic
from exp.hooks.hook import Boundary, Hook, Values
from exp.hooks.panels import Panel, Text
from exp.hooks.step import Step
from exp.strategies.process_group import global_rank
from exp.strategies.strategy import Blueprint

log = logging.getLogger(__name__)

LIGHTNING_PROFILERS = ("pytorch", "lightning.pytorch.profilers.PyTorchProfiler")
# Number of rows of the logged table. The table in the file has all rows.
PANEL_ROWS = 30


class Profile(Hook):
    """Hook that records the operators of some steps, and writes files to `<name of the hook>/` in the run directory.

        trace.rank0.json.gz      a Chrome trace, for https://ui.perfetto.dev and chrome://tracing
        operators.rank0.md       torch's table of operators; its first 30 rows are logged as `profile/operators`

    The trace has a range for each step, forward and backward. A recorded step is slower, in proportion to its number of
    operators. Shares of time are therefore meaningful, and absolute times are not. If the run ends before the last step
    to record, the hook writes the steps that it recorded.

    Args:
        start_step: The first recorded step, counted from 1. Default: 10.
        steps: Number of recorded steps. Default: 3.
        warmup: Number of steps before start_step that are profiled and discarded, because the first profiled steps are
            slow. Default: 2.
        ranks: Global ranks that record, or "all". Each rank writes separate files, and only the table of rank 0 is
            logged. Default: rank 0.
        shapes: Whether the table has a separate row for each combination of input shapes. Default: True.
        memory: Whether memory allocations are recorded. Default: True.
        stacks: Whether the trace has the Python functions that call operators. This is slow. Default: False.
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
                f"start_step is {start_step}; expected {warmup + 1} or more: steps are counted from 1, and {warmup} "
                "warm-up steps come before it"
            )
        self.first, self.start, self.last = start_step - warmup, start_step, start_step + steps - 1
        self.ranks = ranks
        self._shapes, self._memory, self._stacks = shapes, memory, stacks
        # Whether the last step to record is in the future.
        self._is_waiting = False
        self._forget()

    def _forget(self) -> None:
        self._profiler: profile | None = None
        self._ranges: list[record_function] = []
        self._recorded: list[int] = []
        self._panels: dict[str, Panel] = {}

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        trainer, world = planned.settings.trainer, planned.placement.world_size
        limit, profiler = trainer.max_steps, trainer.profiler
        if isinstance(limit, int) and 0 <= limit < self.last:
            got = f"{self.start}: the last recorded step is {self.last}, with trainer.max_steps={limit}"
            yield self.error("start_step", got=got, expected=f"recorded steps up to step {limit}")
        if self.ranks != "all" and max(self.ranks) >= world:
            got = f"{list(self.ranks)} in a run with {world} process{'es' if world > 1 else ''}"
            yield self.error("ranks", got=got, expected=f"ranks from 0 to {world - 1}, or all")
        others = [f"hooks.{name}" for name, hook in planned.hooks.items() if isinstance(hook, Profile)]
        if (profiler["_target_"] if isinstance(profiler, Mapping) else profiler) in LIGHTNING_PROFILERS:
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
            self._is_waiting = False  # the run was resumed after the last step to record
        return self._is_waiting and self.first <= index <= self.last

    def passed(self, boundary: Boundary, step: Step) -> None:
        if boundary == "batch" and self._profiler is None:
            self._begin(step)
        if step.index < self.start:
            return
        if boundary == "batch" and not self._ranges:
            self._open(f"step {step.index}")
            self._recorded.append(step.index)
        elif boundary == "forward":
            self._open("backward")
        elif boundary == "backward" and len(self._ranges) > 1:
            self._ranges.pop().__exit__(None, None, None)

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        return record_function("forward") if step.index >= self.start else None

    def after_step(self, step: Step) -> Values | None:
        self._close_all()
        if self._profiler is None:
            return None
        self._profiler.step()
        return self._end() if step.index == self.last else None

    def ended(self) -> None:
        # Called before the strategy is torn down, because fsdp cannot be torn down while a profiler refers to its
        # parameters.
        self.teardown()

    def teardown(self) -> None:
        """Write the recorded steps, if the run ends before the last step to record."""
        if not self._is_waiting:
            return
        recorded = len(self._recorded)
        self._close_all()
        try:
            self._end()
        except Exception:
            # If the run ends because of another error, this error must not replace it.
            log.exception("hooks.%s: the recorded steps could not be written", self.name)
            return
        log.warning(
            "hooks.%s: the run ended before step %s, the last step to record; number of written steps: %s",
            self.name,
            self.last,
            recorded,
        )

    def _begin(self, step: Step) -> None:
        self._order = "self_device_time_total" if step.device.type == "cuda" else "self_cpu_time_total"
        first = step.index

        def action(count: int) -> ProfilerAction:
            index = first + count
            if index < self.start:
                return ProfilerAction.WARMUP
            if index > self.last:
                return ProfilerAction.NONE
            return ProfilerAction.RECORD_AND_SAVE if index == self.last else ProfilerAction.RECORD

        self._profiler = profile(
            activities=[ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if step.device.type == "cuda" else [])],
            schedule=action,
            on_trace_ready=self._write,
            record_shapes=self._shapes,
            profile_memory=self._memory,
            with_stack=self._stacks,
            # There is one cycle. If acc_events is False, torch 2.11 warns that a second cycle would clear the events.
            acc_events=True,
        )
        # The profiler adds no ranges of steps, because the hook adds ranges with the numbers of optimizer steps.
        self._profiler.record_steps = False
        self._profiler.start()

    def _end(self) -> dict[str, Panel]:
        """Stop the profiler, free its memory, and return the logged panels."""
        profiler, self._is_waiting = self._profiler, False
        try:
            if profiler is not None:
                profiler.stop()
            return self._panels
        finally:
            self._forget()
            # A profiler refers to itself and to recorded tensors. Without the collection, fsdp could not be torn down.
            del profiler
            gc.collect()

    def _write(self, profiler: profile) -> None:
        if not self._recorded:
            return
        assert self.directory is not None
        folder, recorded = self.directory / self.name, self._recorded
        folder.mkdir(parents=True, exist_ok=True)
        profiler.export_chrome_trace(str(folder / f"trace.rank{self._rank}.json.gz"))
        averages = profiler.key_averages(group_by_input_shape=self._shapes)
        title = f"Operators of steps {recorded[0]} to {recorded[-1]}, rank {self._rank}, all steps together"
        whole, top = (
            f"{title}:\n\n```\n{averages.table(sort_by=self._order, row_limit=rows, max_name_column_width=80)}\n```\n"
            for rows in (-1, PANEL_ROWS)
        )
        write_atomic(folder / f"operators.rank{self._rank}.md", whole)
        self._panels = {"profile/operators": Text(top)}

    def _open(self, name: str) -> None:
        entered = record_function(name)
        entered.__enter__()
        self._ranges.append(entered)

    def _close_all(self) -> None:
        while self._ranges:
            self._ranges.pop().__exit__(None, None, None)
