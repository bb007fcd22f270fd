"""The hook of benchmarks/hooks.py by which two runs take turns, step by step, and time their own."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from exp.hooks.hook import Hook
from exp.hooks.step import Step


class Turns(Hook):
    """Waits behind each step until the other run has done one.

    own, other: named pipes, by which a run gets its turn and gives it away. begins: whether it has the first turn.
    steps: of the run, after which nobody waits. out: where the times of the steps go, [wall, processor] in seconds.
    """

    def __init__(self, *, own: str, other: str, begins: bool, steps: int, out: str) -> None:
        super().__init__()
        # Read and write, because a pipe that is opened for one of them waits for the other.
        self._own, self._other = os.open(own, os.O_RDWR), os.open(other, os.O_RDWR)
        self._has_turn, self._steps, self._out = begins, steps, Path(out)
        self._times: list[tuple[float, float]] = []
        self._resumed = (time.perf_counter(), time.process_time())

    def after_step(self, step: Step) -> None:
        wall, processor = time.perf_counter() - self._resumed[0], time.process_time() - self._resumed[1]
        self._times.append((wall, processor))
        if self._has_turn:
            os.write(self._other, b".")
        self._has_turn = True
        if step.index < self._steps:
            os.read(self._own, 1)
        self._resumed = (time.perf_counter(), time.process_time())

    def teardown(self) -> None:
        if self._times:
            self._out.write_text(json.dumps(self._times))
