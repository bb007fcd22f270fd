"""End a run that hangs: a thread looks whether its steps go on, and says where everything stands where they do not."""

from __future__ import annotations

import faulthandler
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path
from types import FrameType
from typing import IO

from lightning.pytorch import Callback, LightningModule, Trainer

from exp.errors import RunError, innermost_frame
from exp.signals import Handler

# Of several ranks the others find it at the same time, and write their stacks, too.
SETTLE_SECONDS = 1.0
# What hangs in Python is ended by an exception there, and gets so long to leave; what hangs below is ended with the
# process.
GRACE_SECONDS = 5.0


class StepWatch(Callback):
    """A callback that ends the run where a step takes longer than it may.

    A step is here what lies between the ends of two batches, of training, validation or test: loading, saving and a
    first compilation count.

    seconds: how long one may take. path: where the stacks of all threads are written, of every rank: train.log.
    hang_path: where they are written when no Python runs any more, because somebody holds its lock.
    give_up: an attribute, called with the error where the thread that hangs does not raise it; it ends the process.
    """

    def __init__(self, *, seconds: float, path: Path, hang_path: Path, rank: int) -> None:
        super().__init__()
        self.seconds, self.path, self.hang_path, self.rank = seconds, path, hang_path, rank
        self.give_up: Callable[[RunError], object] | None = None
        self._beat = 0.0
        self._step = 0
        self._stage = "train"
        self._watched = 0
        self._ended = threading.Event()
        self._error: RunError | None = None
        self._before: Handler = None

    # --- what goes on ---

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("train", trainer)

    def on_train_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._beat, self._step = time.monotonic(), trainer.global_step

    def on_validation_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._beat = time.monotonic()

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._beat = time.monotonic()

    def on_test_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._beat = time.monotonic()

    def on_predict_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._beat = time.monotonic()

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end()

    on_test_end = on_predict_end = on_train_end

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin("test", trainer)

    on_predict_start = on_test_start

    def _begin(self, stage: str, trainer: Trainer) -> None:
        self.end()
        self._stage, self._step, self._beat = stage, trainer.global_step, time.monotonic()
        self._watched, self._ended = threading.get_ident(), threading.Event()
        if threading.current_thread() is threading.main_thread():
            self._before = signal.signal(signal.SIGALRM, self._raise)
        hang_file = self.hang_path.open("a", encoding="utf-8")
        self._arm(hang_file)  # the first step may hang before the thread comes to anything
        threading.Thread(target=self._watch, args=(self._ended, hang_file), name="step_timeout", daemon=True).start()

    def end(self) -> None:
        """Watch no longer. Safe to call twice."""
        self._ended.set()
        faulthandler.cancel_dump_traceback_later()
        if self._before is not None:
            signal.signal(signal.SIGALRM, self._before)
            self._before = None

    # --- what does not ---

    def _arm(self, hang_file: IO[str]) -> None:
        """End the process where nobody comes here again in time; sooner than ranks give up that wait for this one."""
        faulthandler.dump_traceback_later(self.seconds + SETTLE_SECONDS, exit=True, file=hang_file)

    def _watch(self, ended: threading.Event, hang_file: IO[str]) -> None:
        pause = min(1.0, self.seconds / 4)
        with self.path.open("a", encoding="utf-8") as file, hang_file:
            while not ended.wait(pause):
                if time.monotonic() - self._beat > self.seconds:
                    break
                self._arm(hang_file)
            # `end` may have come between the two lines above.
            faulthandler.cancel_dump_traceback_later()
            if ended.is_set():
                return
            place = self._place()
            # Past the logging module, whose lock may be what the other waits for.
            file.write(f"rank {self.rank}: {place}. All of its threads:\n")
            file.flush()
            faulthandler.dump_traceback(file=file, all_threads=True)
            self._end_run(ended, place, hang_file)

    def _end_run(self, ended: threading.Event, place: str, hang_file: IO[str]) -> None:
        time.sleep(SETTLE_SECONDS)
        self._error = RunError(
            f"{place}. The stacks of all threads are in {self.path.name}. Where it is slow and does not hang, give it "
            "longer: runtime.step_timeout"
        )
        if self._before is not None:
            signal.pthread_kill(self._watched, signal.SIGALRM)
        if not ended.wait(GRACE_SECONDS) and self.give_up is not None:
            # Asking a device for its memory, or writing, may hang as well.
            faulthandler.dump_traceback_later(2 * GRACE_SECONDS, exit=True, file=hang_file)
            self.give_up(self._error)

    def _raise(self, signum: int, frame: FrameType | None) -> None:
        if self._error is not None:
            raise self._error

    def _place(self) -> str:
        """Which step it is, and the place in the user's own code, or else the innermost, where its thread stands."""
        what = f"step {self._step + 1}" if self._stage == "train" else "a batch of the test"
        said = f"{what} takes longer than {self.seconds:g} s (runtime.step_timeout)"
        frame = sys._current_frames().get(self._watched)
        if frame is None:
            return said
        at = innermost_frame(traceback.extract_stack(frame))
        return f"{said}: it stands in {at.name}, {at.filename}, line {at.lineno}"
