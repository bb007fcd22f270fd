"""The clocks of benchmarks/loop.py and benchmarks/checkpoints.py, and the hooks that turn them in a run of exp."""

from __future__ import annotations

import time
from typing import ClassVar

from exp.hooks.hook import Hook
from exp.hooks.step import Step

WARM_UP = 500


class Clock:
    """Times the steps from the end of the warm-up on."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall = self._processor = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self._wall, self._processor = time.perf_counter(), time.process_time()

    def microseconds(self) -> tuple[float, float]:
        """Of a step: on the wall clock, and of this process's processor time, which neighbours disturb less."""
        steps = self.steps - WARM_UP
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        return 1e6 * wall / steps, 1e6 * processor / steps


class ClockHook(Hook):
    """Leaves what a step took in `measured`, from the end of the warm-up to the last step at which it looked.

    every_n_steps: how often it looks; by hand a clock costs a step nothing, and a hook at every step would.
    """

    measured = (0.0, 0.0)

    def __init__(self, *, every_n_steps: int = 100) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self._seen: list[tuple[int, float, float]] = []

    def after_step(self, step: Step) -> None:
        if step.index >= WARM_UP:
            self._seen.append((step.index, time.perf_counter(), time.process_time()))

    def teardown(self) -> None:
        if len(self._seen) > 1:
            (begin, *started), (end, *ended) = self._seen[0], self._seen[-1]
            wall, processor = (1e6 * (b - a) / (end - begin) for a, b in zip(started, ended, strict=True))
            ClockHook.measured = wall, processor
            self._seen = []


class StepTimes(Hook):
    """Leaves what each step took in `times`, with all that came before it: by each of `now`, in seconds."""

    times: ClassVar[list[tuple[float, ...]]] = []

    def __init__(self) -> None:
        super().__init__()
        StepTimes.times = []
        self._before = self.now()

    def after_step(self, step: Step) -> None:
        now = self.now()
        StepTimes.times.append(tuple(end - begin for begin, end in zip(self._before, now, strict=True)))
        self._before = now

    @staticmethod
    def now() -> tuple[float, ...]:
        """The wall's clock, the processor's, and the processor's of this thread alone."""
        return time.perf_counter(), time.process_time(), time.thread_time()
