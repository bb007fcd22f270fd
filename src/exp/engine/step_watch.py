"""Callback that ends the process of a hanging run and writes the stack of each thread."""

from __future__ import annotations

import faulthandler
import time
from pathlib import Path
from typing import IO

from lightning.pytorch import Callback

# The timer is a thread of faulthandler. Starting a new timer for each batch would take 50 us per batch.
SECONDS_BETWEEN_TIMERS = 1.0


class StepWatch(Callback):
    """Callback that ends the process if a batch of training, test or prediction takes longer than a limit.

    The measured time is between the ends of two batches. It includes loading, saving and the first compilation. The end
    of a validation batch restarts the timer, too. faulthandler's timer runs without Python. It therefore also ends a
    process in which code blocks the interpreter lock.

    Args:
        seconds: Limit in seconds.
        path: File to which the stacks of all threads are appended.
    """

    def __init__(self, *, seconds: float, path: Path) -> None:
        super().__init__()
        self.seconds, self.path = seconds, path
        self._between = min(SECONDS_BETWEEN_TIMERS, seconds / 4)
        self._file: IO[str] | None = None
        self._started = 0.0

    def _begin(self, *_: object, **__: object) -> None:
        self._end()
        self._file = self.path.open("a", encoding="utf-8")
        self._start_timer(self._file)

    def _restart(self, *_: object, **__: object) -> None:
        if self._file is not None and time.monotonic() - self._started >= self._between:
            self._start_timer(self._file)

    def _end(self, *_: object, **__: object) -> None:
        faulthandler.cancel_dump_traceback_later()
        if self._file is not None:
            self._file.close()
            self._file = None

    def _start_timer(self, file: IO[str]) -> None:
        self._started = time.monotonic()
        faulthandler.dump_traceback_later(self.seconds + self._between, exit=True, file=file)

    on_train_start = on_test_start = on_predict_start = _begin
    on_train_batch_end = on_validation_batch_end = on_validation_end = _restart
    on_test_batch_end = on_predict_batch_end = _restart
    on_train_end = on_test_end = on_predict_end = on_exception = _end
