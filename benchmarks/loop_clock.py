"""Clocks of benchmarks/loop.py, checkpoints.py and gpu.py, and hooks that run them in exp."""

from __future__ import annotations

import time
from typing import ClassVar

import torch

from exp.hooks.hook import Hook
from exp.hooks.step import Step

WARM_UP = 500


class Clock:
    """Clock of the steps after a warm-up of 500 steps."""

    def __init__(self) -> None:
        self.steps = 0
        self._wall = self._processor = 0.0

    def step(self) -> None:
        self.steps += 1
        if self.steps == WARM_UP:
            self._wall, self._processor = time.perf_counter(), time.process_time()

    def microseconds(self) -> tuple[float, float]:
        """Return the wall and processor microseconds of a step; other load changes the processor time less."""
        steps = self.steps - WARM_UP
        wall, processor = time.perf_counter() - self._wall, time.process_time() - self._processor
        return 1e6 * wall / steps, 1e6 * processor / steps


class ClockHook(Hook):
    """Hook that measures the mean time of a step after the warm-up, and leaves it in `measured`.

    Args:
        every_n_steps: steps between two readings of the clock; a hook at each step would itself take time
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


class DeviceClock:
    """Clock from the end of the warm-up to the last step, which synchronizes the GPU at both points."""

    def __init__(self, *, warm_up: int, steps: int) -> None:
        self.warm_up, self.steps = warm_up, steps
        self.microseconds = self._start = 0.0

    def step(self, index: int) -> None:
        if index not in (self.warm_up, self.steps):
            return
        if torch.cuda.is_available():
            torch.cuda.synchronize()
        if index == self.warm_up:
            self._start = time.perf_counter()
        else:
            self.microseconds = 1e6 * (time.perf_counter() - self._start) / (self.steps - self.warm_up)


class DeviceClockHook(Hook):
    """Hook that runs a DeviceClock and leaves its result in `measured`; `steps` must be a multiple of `warm_up`."""

    measured = 0.0

    def __init__(self, *, warm_up: int, steps: int) -> None:
        super().__init__(every_n_steps=warm_up)
        self._clock = DeviceClock(warm_up=warm_up, steps=steps)

    def after_step(self, step: Step) -> None:
        self._clock.step(step.index)
        DeviceClockHook.measured = self._clock.microseconds


class StepTimes(Hook):
    """Hook that appends the seconds since the previous step to `times` after each step, by three clocks."""

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
        """Return the seconds of the wall clock, the process's processor time and this thread's processor time."""
        return time.perf_counter(), time.process_time(), time.thread_time()
