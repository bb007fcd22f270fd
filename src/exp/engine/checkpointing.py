"""Callback that writes last.ckpt and best.ckpt at points from which a run resumes exactly."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor

from exp.engine.checkpoint import (
    CHECKPOINTS,
    AtomicCheckpointIO,
    State,
    ThreadedCheckpointIO,
    copy_checkpoint,
    read_checkpoint,
)
from exp.engine.module import TrainingModule
from exp.engine.progress import (
    Position,
    after_fit,
    before_batch,
    fit_loop_state,
    forget_restart,
    is_epoch_complete,
)
from exp.errors import RunError
from exp.files import is_locked, remove_partial_files
from exp.shared_types import Batch, Mode, Stage, best_scalars, split_tag
from exp.spelling import among, did_you_mean

log = logging.getLogger(__name__)

POSITION, BEST, CONFIG = "exp_position", "exp_best", "exp_config"
# Folder inside checkpoints/ for Lightning's ModelCheckpoint without a dirpath. In a separate folder, its last.ckpt does
# not replace the last.ckpt of exp.
OF_LIGHTNING = "lightning"
# Fields of the best value that are saved in a checkpoint.
BEST_KEYS = ("metric", "value", "step", "epoch", "metrics")


class Checkpointing(Callback):
    """Callback that writes checkpoints/last.ckpt and checkpoints/best.ckpt in the run directory.

    Checkpoints are written before a training batch or at the end of fit. At these points, the last optimizer step is
    complete, including its schedules, validation and callbacks. Therefore, a resumed run computes the same states. This
    callback must precede the user's callbacks in the Trainer's list, because a resumed run calls the hooks of the next
    batch again.

    Args:
        directory: Run directory.
        monitor: Tag of the value that selects the best checkpoint. Values that are not finite are ignored. None:
            best.ckpt is not written. Default: loss/val.
        mode: `min` if the smallest value is the best, `max` if the largest value is the best. Default: min.
        every_n_steps: Number of optimizer steps between two writes of last.ckpt within an epoch. None: last.ckpt is not
            written by steps. Default: None.
        every_n_minutes: Minutes between two writes of last.ckpt within an epoch, by the clock of rank 0. None:
            last.ckpt is not written by time. Default: None.
        save_last: Whether to write last.ckpt. Default: True.
        save_best: Whether to write best.ckpt. Default: True.
        config: Text that is saved in each checkpoint, such as the config as YAML. Default: None.
    """

    def __init__(
        self,
        *,
        directory: Path | str,
        monitor: str | None = "loss/val",
        mode: Mode = "min",
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        save_last: bool = True,
        save_best: bool = True,
        config: str | None = None,
    ) -> None:
        super().__init__()
        # Optimizer step at which the last validation ran.
        self._validated_at: int | None = None
        # Monitored value before the last validation, and the last monitored value that was compared with the best
        # value.
        self._before_validation: Tensor | None = None
        self._compared: Tensor | None = None
        self.directory = Path(directory) / CHECKPOINTS
        self.last_path, self.best_path = self.directory / "last.ckpt", self.directory / "best.ckpt"
        self.monitor, self.mode = monitor, mode
        self.every_n_steps, self.every_n_minutes = every_n_steps, every_n_minutes
        # True if Stopping requests a checkpoint. It requests a checkpoint on all ranks at the same batch.
        self.is_wanted = False
        self._saved_at = 0.0
        self.is_saving_last, self.is_saving_best = save_last, save_best and monitor is not None
        self.config = config
        self.best: dict[str, Any] | None = None
        self._is_better = False
        self._is_restored = False
        # True after a resume from another directory, until this run has written its own last.ckpt.
        self._owes_last = False
        self._saved_step = 0
        self._position: Position | None = None

    @property
    def is_late(self) -> bool:
        """True if `every_n_minutes` have passed on this rank since the last write."""
        minutes = self.every_n_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes

    def settle(self, trainer: Trainer) -> None:
        """Wait until all pending writes have finished. Every rank must call this method.

        Raises:
            OSError: A write failed. Raised on rank 0.
        """
        io = _io(trainer)
        io.settle()
        if isinstance(io, ThreadedCheckpointIO):
            trainer.strategy.barrier("checkpoints")

    def save(self, trainer: Trainer, position: Position, path: Path) -> None:
        """Write a checkpoint with the current state and a position. Every rank must call this method.

        Raises:
            OSError: The write failed. Raised on rank 0.
            RunError: A loss is not a number.
        """
        self._position = position
        try:
            with _io(trainer).in_background():
                trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._position = None

    # --- the points at which checkpoints are written ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # A ModelCheckpoint without a dirpath would write to the folder of a logger.
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint) and one.dirpath is None:
                one.dirpath = str(self.directory / OF_LIGHTNING)

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not trainer.is_global_zero:
            return
        sweep_run(self.directory.parent)
        if trainer.ckpt_path is not None:
            sweep_run(Path(trainer.ckpt_path).absolute().parent.parent)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._saved_step, self._saved_at = trainer.global_step, time.monotonic()
        self.is_wanted = False
        self._owes_last = self._is_restored
        # Recording has just restored the values of the checkpoint, which are not new.
        self._compared = trainer.callback_metrics.get(str(self.monitor))
        if self._is_restored:
            self._is_restored = False
            forget_restart(trainer)
            self._copy_best(trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._start_batch(trainer, 0)  # before other callbacks start the epoch

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._start_batch(trainer, batch_idx)

    def _start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        """Write the checkpoints that are due before a batch. Every rank must call this method."""
        step = trainer.global_step
        if step == self._saved_step and not self._is_better:
            return
        is_window = batch_idx % trainer.accumulate_grad_batches == 0
        every = self.every_n_steps
        # The quotients are compared. `step % every == 0` would miss a step if batches are still being accumulated.
        by_steps = every is not None and step // every > self._saved_step // every
        is_due = is_window and (batch_idx == 0 or by_steps or self.is_wanted)
        if is_due or self._is_better:
            self._write(trainer, before_batch(trainer, batch_idx), is_due=is_due)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._end(trainer, after_fit(trainer))

    def _end(self, trainer: Trainer, position: Position) -> None:
        """Write last.ckpt unless the current state is already written, and wait for all writes.

        Every rank must call this method.
        """
        self.settle(trainer)
        if trainer.global_step != self._saved_step or self._is_better or self._owes_last:
            self._write(trainer, position, is_due=True)
        self.settle(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_restored:  # the run was already complete
            self._is_restored = False
            self._copy_best(trainer)
            source = Path(str(trainer.ckpt_path))
            if self.is_saving_last and trainer.is_global_zero:
                self.directory.mkdir(parents=True, exist_ok=True)
                copy_checkpoint(source, self.last_path)

    def _write(self, trainer: Trainer, position: Position, *, is_due: bool) -> None:
        if is_due:
            self._saved_step, self._saved_at = position.step, time.monotonic()
            self.is_wanted = False
        if is_due and self.is_saving_last:
            self._owes_last = False
            self.save(trainer, position, self.last_path)
        if self._is_better:
            self._is_better = False
            if not (is_due and self.is_saving_last):
                self.save(trainer, position, self.best_path)
            elif trainer.is_global_zero:
                _io(trainer).copy_checkpoint(self.last_path, self.best_path)

    # --- the best value ---

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._before_validation = trainer.callback_metrics.get(str(self.monitor))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self._validated_at = trainer.global_step
        # If no new value was logged, Lightning keeps the same object under the tag.
        found = trainer.callback_metrics.get(str(self.monitor))
        if found is not None and found is not self._before_validation:
            self._compare(trainer, found)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        found = trainer.callback_metrics.get(str(self.monitor))
        if found is not None and found is not self._compared:
            self._compare(trainer, found)
        # For a TrainingModule, the check has already verified the tag. A user's module may log the tag in a later
        # validation.
        is_checked = isinstance(pl_module, TrainingModule) or trainer.enable_validation
        if found is None and self.is_saving_best and (self._validated_at is not None or not is_checked):
            monitored_value(trainer.callback_metrics, str(self.monitor))  # raises an error
        if self.best is not None and self.best["epoch"] == trainer.current_epoch:
            note_metrics(self.best, trainer.callback_metrics, stage="train")
        if not is_epoch_complete(trainer):
            # A limit ends the run within an epoch. The checkpoint is written now, because other callbacks may next act
            # as if the epoch had ended.
            self._end(trainer, before_batch(trainer, trainer.fit_loop.batch_idx + 1))

    def _compare(self, trainer: Trainer, found: Tensor) -> None:
        """Compare a new monitored value with the best value."""
        self._compared, value = found, float(found)
        if not self.is_saving_best:
            return
        if not math.isfinite(value):
            log.warning("%s is %s at step %d, which is never the best", self.monitor, value, trainer.global_step)
        elif is_better(value, self.best, mode=self.mode):
            place = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self.best = best_from({"metric": self.monitor, "value": value, **place}, self.best_path)
            if self._validated_at == trainer.global_step:
                note_metrics(self.best, trainer.callback_metrics, stage="val")
            self._is_better = True
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(best_scalars(self.best), trainer.global_step)

    def _copy_best(self, trainer: Trainer) -> None:
        """Copy best.ckpt from the run directory of the checkpoint that this run resumes from.

        If best.ckpt was written after the resumed step, it is not copied, because this run trains those steps again.
        """
        best = self.best
        if best is not None and trainer.is_global_zero:
            best = find_best(best, Path(str(trainer.ckpt_path)), self.best_path, step=trainer.global_step)
        best = trainer.strategy.broadcast(best)
        if best is None and self.best is not None:
            log.warning(
                "best.ckpt of step %d is missing. From now on, the run searches for a new best value", self.best["step"]
            )
        self.best = best

    # --- the content of a checkpoint ---

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if self._position is None:
            return  # a user's callback saves the checkpoint, which can be evaluated but not resumed
        checkpoint[POSITION] = dataclasses.asdict(self._position)
        # The path of best.ckpt is not saved, because a path read from a file is not trusted.
        checkpoint[BEST] = self.best and {key: self.best[key] for key in BEST_KEYS}
        if self.config is not None:
            checkpoint[CONFIG] = self.config

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != "fit":
            return
        if POSITION not in checkpoint:
            raise RunError(
                f"{trainer.ckpt_path} has no position in the data, so a run cannot resume from the file exactly; "
                "expected a last.ckpt or best.ckpt of exp. To evaluate the file, write train=false test=true"
            )
        position = Position.of(checkpoint[POSITION])
        checkpoint["loops"]["fit_loop"] = fit_loop_state(
            trainer, position, is_manual=not pl_module.automatic_optimization
        )
        self._is_restored = True
        found = checkpoint[BEST]
        if self.is_saving_best and found is not None and found["metric"] == self.monitor:
            self.best = best_from(found, self.best_path)

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            _io(trainer).settle()
        except OSError as error:
            log.error("%s", error)  # not raised, because an earlier error ends the run and may be the cause
        # Delete a best value for which best.ckpt was never written, so that the report does not contain the value.
        if self._is_better and not self.best_path.is_file():
            self.best = None


def position_in(path: Path | str) -> Position | None:
    """Return the position in a checkpoint; None if the checkpoint has no position.

    Args:
        path: Path of a checkpoint. The checksums of the file are not verified.
    """
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return Position.of(state[POSITION]) if POSITION in state else None


def monitored_value(values: Mapping[str, Any], monitor: str) -> float:
    """Return the current value of the monitored tag.

    Raises:
        RunError: No value was logged under the tag.
    """
    if monitor not in values:
        known = sorted(values)
        fix = did_you_mean(monitor, known)
        raise RunError(
            f"monitor is {monitor}, which nothing logs; expected one of {among(known)}" + (f". {fix}" if fix else "")
        )
    return float(values[monitor])


def is_better(value: float, best: Mapping[str, Any] | None, *, mode: Mode) -> bool:
    """Return whether a value is better than the best value so far. If `best` is None, every value is better."""
    if best is None:
        return True
    return bool(value < best["value"] if mode == "min" else value > best["value"])


def note_metrics(best: dict[str, Any], values: Mapping[str, Any], *, stage: Stage) -> None:
    """Add the loss and the metrics of a stage to the metrics of the best value."""
    best["metrics"] |= {tag: float(value) for tag, value in values.items() if split_tag(tag)[1] == stage}


def best_from(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Complete the best value that a checkpoint contains, and return it.

    Checkpoints of old versions of exp have no epoch and no metrics of the best value. The defaults are -1 and {}.

    Args:
        found: Fields of the best value in the checkpoint.
        path: Path of best.ckpt, which is added to the fields.
    """
    return {"epoch": -1, "metrics": {}, **found, "checkpoint": str(path)}


def sweep_run(directory: Path) -> None:
    """Remove partial files that a killed run left in the run directory."""
    if not (directory / CHECKPOINTS).is_dir():
        return
    remove_partial_files(directory, levels=1)
    remove_partial_files(directory / CHECKPOINTS / OF_LIGHTNING)
    if not is_locked(directory / "config.yaml"):
        for exchange in directory.glob(".launch-*"):  # files with messages between ranks
            shutil.rmtree(exchange, ignore_errors=True)


def _is_best(path: Path, best: Mapping[str, Any]) -> bool:
    """Return whether a checkpoint was saved as the best at the step of `best`."""
    try:
        found = read_checkpoint(path)[BEST]
    except (RunError, KeyError):
        return False
    return found is not None and int(found["step"]) == best["step"]


def find_best(best: dict[str, Any], source: Path, path: Path, *, step: int) -> dict[str, Any] | None:
    """Make sure that `path` is the checkpoint of the best value, by copying it if necessary.

    Args:
        best: Best value of a run.
        source: Checkpoint that the run resumes from.
        path: Path of this run's best.ckpt.
        step: Optimizer step of `source`.

    Returns:
        The best value. None if no file has the weights of the best value.
    """
    found = next((one for one in (path, source.with_name("best.ckpt")) if _is_best(one, best)), None)
    if found is None and best["step"] == step:
        found = source  # the process was killed before the copy, so only last.ckpt has the best state
    if found is None:
        return None
    if found != path:
        path.parent.mkdir(parents=True, exist_ok=True)
        copy_checkpoint(found, path)
    return best


def _io(trainer: Trainer) -> AtomicCheckpointIO:
    io = trainer.strategy.checkpoint_io
    return io if isinstance(io, AtomicCheckpointIO) else AtomicCheckpointIO()
