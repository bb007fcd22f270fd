"""Hook of benchmarks/hooks.py that makes two runs alternate step by step and measures the steps of its run."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path

from exp.hooks.hook import Hook
from exp.hooks.step import Step


class Turns(Hook):
    """Hook that waits after each step until the other run has done a step.

    Args:
        own: path of the named pipe from which this run reads that it may continue
        other: path of the named pipe by which this run lets the other one continue
        begins: if this run makes the first step
        steps: number of steps of the run; it does not wait after the last step
        out: path of the JSON file with the times of the steps, [wall, processor] in seconds
    """

    def __init__(self, *, own: str, other: str, begins: bool, steps: int, out: str) -> None:
        super().__init__()
        # Open for reading and writing: a pipe that is opened only for one of them blocks until the other end is open.
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
