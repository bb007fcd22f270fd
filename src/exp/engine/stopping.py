"""Callbacks that end a run at max_steps, at max_time, after a signal, or if a step hangs."""

from __future__ import annotations

import faulthandler
import logging
import time
from pathlib import Path
from typing import IO

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import EarlyStopping

from exp.engine.checkpoint import State
from exp.engine.checkpointing import Checkpointing
from exp.engine.progress import Limits, Position, before_batch, in_validation
from exp.errors import Interrupted
from exp.shared_types import Batch
from exp.signals import SignalFlag

STATE = "exp_seconds"
# Approximate time in seconds between two collectives in which the ranks agree on signals and limits.
AGREE_SECONDS = 1.0
# Shortest time in seconds between two starts of faulthandler's timer thread. A start takes 50 us, too long for each
# batch.
SECONDS_BETWEEN_TIMERS = 1.0

log = logging.getLogger(__name__)


class Stopping(Callback):
    """Callback that ends fit at a limit, and any stage after a signal. All ranks stop at the same batch.

    At a limit, the run ends in the same way as after its last epoch: with the validation, the end of the epoch and a
    checkpoint. After a signal, the callback saves the state and raises Interrupted. It does not run a validation that
    is due, because a validation may take a long time. In the Trainer's list, this callback must follow Checkpointing
    and precede the user's callbacks.

    Args:
        limits: Limits of the run. Default: no limits.
        checkpointing: Callback that saves the state after a signal. None: the state is not saved. Default: None.
    """

    def __init__(self, *, limits: Limits | None = None, checkpointing: Checkpointing | None = None) -> None:
        super().__init__()
        self.limits = limits or Limits()
        self.checkpointing = checkpointing
        self._signals = SignalFlag()
        self._agreed = 0
        self._restored_step = 0
        self._is_restored = False
        self._seconds_before = 0.0
        self._started: float | None = None
        self._countdown = self._interval = 1
        self._last_agreed = 0.0
        # Reason why the training ended; None while the training runs.
        self.ended_by: str | None = None

    # --- a limit ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._stop_at_limit(trainer, step=self._restored_step)
        self._restored_step = 0

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()
        self._is_restored = False
        self._started = time.monotonic()

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_restored:  # the checkpoint was loaded, but no training began
            self._is_restored = False
            log.warning(
                "nothing is left to train: %s has reached %s, the limit of the whole run. Raise this limit",
                trainer.ckpt_path,
                self.reason(trainer),
            )

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self._look(trainer)
        if not trainer.should_stop and self.limits.max_steps is not None:
            self._stop_at_limit(trainer, step=trainer.global_step)

    def _stop_at_limit(self, trainer: Trainer, *, step: int) -> None:
        limits = self.limits
        if limits.max_steps is not None and step >= limits.max_steps:
            trainer.should_stop = True
        if limits.max_seconds is not None and self._seconds_before >= limits.max_seconds:
            trainer.should_stop = True

    def reason(self, trainer: Trainer) -> str:
        """Return the reason why the training ended: a limit, or a callback with its settings."""
        if trainer.max_epochs is not None and 0 <= trainer.max_epochs <= trainer.current_epoch:
            return end_by_epochs(trainer.max_epochs)
        limits = self.limits
        if limits.max_steps is not None and trainer.global_step >= limits.max_steps:
            return end_by_steps(limits.max_steps)
        if limits.max_seconds is not None and self.seconds >= limits.max_seconds:
            return f"trainer.max_time, {limits.max_seconds:g} s"
        for callback in vars(trainer)["callbacks"]:
            if isinstance(callback, EarlyStopping) and callback.stopping_reason_message is not None:
                settings = f"patience={callback.patience}, min_delta={abs(callback.min_delta):g}"
                return (
                    f"{type(callback).__name__} ({settings}): {callback.stopping_reason_message.split(' Signaling')[0]}"
                )
        return "a callback or the module, which set trainer.should_stop"

    @property
    def seconds(self) -> float:
        """Training time in seconds, including the time before a resume."""
        return self._seconds_before + (0.0 if self._started is None else time.monotonic() - self._started)

    # --- a signal ---

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_batch(trainer, 0)

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._start_batch(trainer, batch_idx)

    def _start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        """End the run if a signal was received and the batch is the first one of an optimizer step."""
        if trainer.world_size == 1:
            self._agreed = self._signals.received or 0
        if self._agreed and batch_idx % trainer.accumulate_grad_batches == 0:
            self._leave(trainer, before_batch(trainer, batch_idx))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._started, self._seconds_before = None, self.seconds
        # The reason is read now, because callbacks such as EarlyStopping have already set their messages.
        self.ended_by = self.reason(trainer)
        self._countdown = 1
        self._look(trainer)
        if self._agreed:  # the signal came after the last batch; Checkpointing has already saved the state
            last = None if self.checkpointing is None else self.checkpointing.last_path
            raise Interrupted(signum=self._agreed, checkpoint=str(last) if last and last.is_file() else None)
        self._signals.restore()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._begin()
        elif self._agreed and not trainer.sanity_checking:
            self._leave(trainer, in_validation(trainer))

    def on_validation_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._look(trainer)
        if self._agreed and not trainer.sanity_checking:
            self._leave(trainer, in_validation(trainer) if trainer.state.fn == "fit" else None)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._begin()

    on_predict_start = on_test_start

    def on_test_batch_end(self, trainer: Trainer, *_: object) -> None:
        self._look(trainer)
        if self._agreed:
            self._leave(trainer, None)

    def on_predict_batch_end(self, trainer: Trainer, *_: object) -> None:
        self.on_test_batch_end(trainer)

    def _begin(self) -> None:
        # Handlers are installed now and not in setup, because Lightning has just installed its signal handlers.
        self._signals.install()
        self._agreed = 0
        self._countdown = self._interval = 1
        self._last_agreed = time.monotonic()

    def _look(self, trainer: Trainer) -> None:
        """Check whether any rank received a signal, and whether a time limit has passed on rank 0."""
        received, seconds, checkpointing = self._signals.received or 0, self.limits.max_seconds, self.checkpointing
        if trainer.world_size > 1:
            self._countdown -= 1
            if self._countdown:
                return
        is_over = seconds is not None and self.seconds >= seconds
        is_late = checkpointing is not None and checkpointing.is_late
        if trainer.world_size > 1:
            received, is_over, is_late = self._agree(trainer, received, is_over, is_late)
        self._agreed = received
        if checkpointing is not None:
            checkpointing.is_wanted = is_late
        if is_over and trainer.state.fn == "fit":
            trainer.should_stop = True

    def _agree(self, trainer: Trainer, received: int, is_over: bool, is_late: bool) -> tuple[int, bool, bool]:
        """Return the largest signal number that a rank received, and the values of `is_over` and `is_late` on rank 0.

        Only rank 0 decides on time limits, because the clocks of ranks differ.
        """
        now = time.monotonic()
        fitting = max(1, int(self._interval * AGREE_SECONDS / max(now - self._last_agreed, 1e-6)))
        of_first = [int(trainer.is_global_zero and one) for one in (is_over, is_late)]
        # The interval is negated, so that the maximum over ranks is the shortest interval.
        mine = [received, -min(fitting, 2 * self._interval), *of_first]
        agreed = trainer.strategy.reduce(torch.tensor(mine, device=trainer.strategy.root_device), reduce_op="max")
        signum, interval, over, late = agreed.tolist()
        self._interval = self._countdown = -interval
        self._last_agreed = now
        return signum, bool(over), bool(late)

    def _leave(self, trainer: Trainer, position: Position | None) -> None:
        saved = None
        if position is not None and self.checkpointing is not None and position.step:
            self.checkpointing.save(trainer, position, self.checkpointing.last_path)
            self.checkpointing.settle(trainer)
            saved = str(self.checkpointing.last_path)
        raise Interrupted(signum=self._agreed, checkpoint=saved)

    # --- the end, before Lightning restores the first handlers ---

    def on_test_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._signals.restore()

    on_predict_end = on_test_end

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit":
            self._signals.restore()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._signals.restore()

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        checkpoint[STATE] = self.seconds

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self._is_restored = trainer.state.fn == "fit"
        if trainer.state.fn == "fit" and STATE in checkpoint:
            self._seconds_before = checkpoint[STATE]
            self._restored_step = checkpoint["global_step"]


def end_by_epochs(limit: int) -> str:
    return f"trainer.max_epochs={limit}"


def end_by_steps(limit: int | None) -> str:
    return f"trainer.max_steps={limit}"


class StepWatch(Callback):
    """Callback that ends the process of a run if a batch of training, test or prediction takes too long.

    Before the process ends, the stacks of all threads are written to a file.

    The callback measures the time between the ends of two batches. This time includes loading, saving and the first
    compilation. The end of a validation batch also restarts the measurement. faulthandler's timer does not need the
    interpreter lock, so it ends the process even if other code blocks the lock.

    Args:
        seconds: Longest time of a batch in seconds.
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
