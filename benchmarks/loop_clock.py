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
    """Leaves what it measured in `measured`."""

    measured = (0.0, 0.0)

    def __init__(self, *, every_n_steps: int = 1) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self._clock = Clock()

    def after_step(self, step: Step) -> None:
        self._clock.step()

    def teardown(self) -> None:
        if self._clock.steps > WARM_UP:
            ClockHook.measured = self._clock.microseconds()
            self._clock = Clock()


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
