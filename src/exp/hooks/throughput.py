"""The hook `throughput`: how fast training goes."""

from __future__ import annotations

import time

from exp.hooks.hook import Hook, Step


class Throughput(Hook):
    """Logs `throughput/step_ms` and `throughput/samples_per_second`, means over the last `every_n_steps` steps.

    A step's time runs from the end of the one before to its own end, so that loading, logging and other hooks count.
    The first step of the run and the first after a pause (validation, a checkpoint at an epoch's end) have no such time
    and are left out. On CUDA the host runs ahead of the device, by a bounded queue: the means hold, a single step's
    time would not.
    """

    def __init__(self, *, every_n_steps: int = 50) -> None:
        super().__init__(every_n_steps=every_n_steps)
        self._end_of_last: float | None = None
        self._reset()

    def due(self, index: int) -> bool:
        """Every step: each is timed, and every `every_n_steps` their means are logged."""
        return True

    def after_step(self, step: Step) -> dict[str, float] | None:
        now = time.perf_counter()
        if self._end_of_last is not None:
            self._seconds += now - self._end_of_last
            self._samples += step.batch_size
            self._steps += 1
        self._end_of_last = now
        if step.index % self.every_n_steps or not self._steps:
            return None
        values = {
            "throughput/step_ms": 1000 * self._seconds / self._steps,
            "throughput/samples_per_second": self._samples / self._seconds,
        }
        self._reset()
        return values

    def pause(self) -> None:
        self._end_of_last = None

    def _reset(self) -> None:
        self._seconds, self._samples, self._steps = 0.0, 0, 0
