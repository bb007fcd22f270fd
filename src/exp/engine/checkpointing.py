"""The callback that writes last.ckpt and best.ckpt, at points from which a run goes on exactly."""

from __future__ import annotations

import dataclasses
import logging
import math
import shutil
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Literal

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from torch import Tensor

from exp.engine.checkpoint import (
    CHECKPOINTS,
    CURRENT,
    AtomicCheckpointIO,
    State,
    ThreadedCheckpointIO,
    copy_checkpoint,
    on_host,
    read_checkpoint,
)
from exp.engine.module import TrainingModule
from exp.engine.progress import (
    Position,
    after_fit,
    before_batch,
    fit_loop_state,
    forget_restart,
)
from exp.errors import RunError
from exp.files import is_locked, remove_partial_files
from exp.shared_types import EPOCH_LOSS, Mode, Stage, best_scalars, split_tag
from exp.spelling import among, did_you_mean

log = logging.getLogger(__name__)

POSITION, BEST, KEPT, CONFIG = "exp_position", "exp_best", "exp_kept", "exp_config"
# Below checkpoints/: what callbacks of Lightning save without a dirpath. Their last.ckpt must not replace ours.
OF_LIGHTNING = "lightning"
# What a checkpoint keeps of the best.
BEST_KEYS = ("metric", "value", "step", "epoch", "metrics")
# Of a best.ckpt whose state_dict is what was scored, and whose run had other weights when it was written.
SCORED = "exp_scored"


class Checkpointing(Callback):
    """Writes checkpoints/last.ckpt and checkpoints/best.ckpt of a run directory.

    Both are written just before a training batch, or at the end of fit: there an optimizer step, its schedules, the
    validation behind it and its callbacks are all done, so that the state is one that a run passes through.
    BeforeOthers calls `start_batch` before the hooks of other callbacks, which a resumed run calls again.

    directory: the run directory.
    every_n_steps, every_n_minutes: optimizer steps, or time, between two last.ckpt within an epoch; None for both is at
        the end of each epoch only. The time is rank 0's.
    keep: how many of the best are kept: best.ckpt, and with more than one best-<step>.ckpt of each.
    save_last, save_best: whether there is one.
    monitor, mode: the tag whose best value best.ckpt has, and whether the best is the smallest or the largest. A value
        that is not finite is never the best. Without a tag there is no best.
    is_compared: at the end of which part of an epoch; "given": of the part that gives it, validation or training; None:
        as the tag says.
    config: text to keep in the checkpoint, such as the config's YAML.
    holds_scored: whether to hold a copy of the weights of each validation, so that best.ckpt has them whatever other
        callbacks did to the module behind it. The weights that training goes on with are beside them then.
    """

    def __init__(
        self,
        *,
        directory: Path | str,
        monitor: str | None = "loss/val",
        mode: Mode = "min",
        every_n_steps: int | None = None,
        every_n_minutes: float | None = None,
        keep: int = 1,
        save_last: bool = True,
        save_best: bool = True,
        config: str | None = None,
        holds_scored: bool = False,
        is_compared: Literal["train", "val", "given"] | None = None,
    ) -> None:
        super().__init__()
        self._is_compared = is_compared
        # The optimizer step of the last validation.
        self._validated_at: int | None = None
        self._earlier: Tensor | None = None
        # Which checkpoint is good, in words.
        self.saved = "no checkpoint was saved before it"
        self.holds_scored = holds_scored
        # The weights of the validation that is being done, and of the best one, until its file is written.
        self._validated: State | None = None
        self._scored: State | None = None
        self._writes_scored = self._is_changed = False
        self.directory = Path(directory) / CHECKPOINTS
        self.monitor, self.mode = monitor, mode
        self.every_n_steps, self.every_n_minutes = every_n_steps, every_n_minutes
        self.keep = keep
        # Those that are kept, the best first: value and step.
        self.kept: list[dict[str, Any]] = []
        self._kept_paths: set[Path] = set()
        self._is_kept = False
        # Stopping sets it, on all ranks at the same batch.
        self.is_wanted = False
        self._saved_at = 0.0
        self.is_saving_last, self.is_saving_best = save_last, save_best and monitor is not None
        self.config = config
        self.best: dict[str, Any] | None = None
        self._is_better = False
        self._is_restored = False
        # What the run goes on from lies elsewhere: its own last.ckpt is written in any case.
        self._owes_last = False
        self._saved_step = 0
        self._position: Position | None = None
        # Where a resumed run begins, for BeforeOthers.
        self.resumed: Position | None = None

    @property
    def last_path(self) -> Path:
        return self.directory / "last.ckpt"

    @property
    def best_path(self) -> Path:
        return self.directory / "best.ckpt"

    @property
    def is_late(self) -> bool:
        """Whether this rank's clock says that it is time to save."""
        minutes = self.every_n_minutes
        return minutes is not None and time.monotonic() - self._saved_at >= 60.0 * minutes

    def settle(self, trainer: Trainer) -> None:
        """Return when all that was saved is written. Every rank must call it.

        Raises: OSError of a write, on rank 0.
        """
        io = _io(trainer)
        io.settle()
        if isinstance(io, ThreadedCheckpointIO):
            trainer.strategy.barrier("checkpoints")

    def save(self, trainer: Trainer, position: Position, path: Path) -> None:
        """Write the state at a position. Every rank must call it.

        Raises: OSError of the write, on rank 0; RunError of a loss that is not a number.
        """
        self._position = position
        try:
            with _io(trainer).in_background():
                trainer.save_checkpoint(path, weights_only=False)
        finally:
            self._position = None
        self._tell(trainer, f"checkpoints/{path.name} is of step {position.step}, and good")

    def _tell(self, trainer: Trainer, saved: str) -> None:
        self.saved = saved
        if isinstance(module := trainer.lightning_module, TrainingModule):
            module.saved = saved

    # --- when ---

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
        if self._is_restored:
            self._is_restored = False
            forget_restart(trainer)
            self._bring(trainer)

    def start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        """Write what is due before a batch, of an epoch's first one as the epoch starts. Every rank must call it."""
        step = trainer.global_step
        if step == self._saved_step and not (self._is_better or self._is_kept):
            return
        is_window = batch_idx % trainer.accumulate_grad_batches == 0
        every = self.every_n_steps
        # Steps since the last one, and not multiples: a step within accumulated batches must not be missed.
        by_steps = every is not None and step // every > self._saved_step // every
        is_due = is_window and (batch_idx == 0 or by_steps or self.is_wanted)
        if is_due or self._is_better or self._is_kept:
            self._write(trainer, before_batch(trainer, batch_idx), is_due=is_due)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.end(trainer, after_fit(trainer))

    def end(self, trainer: Trainer, position: Position) -> None:
        """Write the last state, unless it is written, and wait for all that is not. Every rank must call it."""
        self.settle(trainer)  # what is not written yet cannot be missed
        if trainer.global_step != self._saved_step or self._is_better or self._is_kept or self._owes_last:
            self._write(trainer, position, is_due=True)
        self.settle(trainer)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_restored:  # at its end: there was nothing left to train
            self._is_restored = False
            self._bring(trainer)
            source = Path(str(trainer.ckpt_path))
            if self.is_saving_last and trainer.is_global_zero and not _is_same(source, self.last_path):
                self.directory.mkdir(parents=True, exist_ok=True)
                copy_checkpoint(source, self.last_path)

    def _write(self, trainer: Trainer, position: Position, *, is_due: bool) -> None:
        if is_due:
            self._saved_step, self._saved_at = position.step, time.monotonic()
            self.is_wanted = False
        best = [self.best_path] if self._is_better else []
        best += [self._kept_path(trainer.global_step)] if self._is_kept else []
        source = None
        if is_due and self.is_saving_last:
            self._owes_last = False
            self.save(trainer, position, self.last_path)
            # One file does for both, unless a callback has changed the weights since they were scored.
            is_other = self._scored is not None and trainer.strategy.broadcast(self._is_changed)
            source = None if is_other else self.last_path
        if best:
            self._write_best(trainer, position, best, source=source)
        if trainer.is_global_zero and (best or source is not None):
            self._prune(trainer)

    def _write_best(self, trainer: Trainer, position: Position, paths: list[Path], *, source: Path | None) -> None:
        """Write what was scored, by a copy where a file that holds it is written already."""
        if source is None:
            source, *paths = paths
            self._writes_scored = True
            try:
                self.save(trainer, position, source)
            finally:
                self._writes_scored = False
        self._is_better = self._is_kept = False
        self._scored = None
        if trainer.is_global_zero:
            for path in paths:
                _io(trainer).copy_checkpoint(source, path)

    def _kept_path(self, step: int) -> Path:
        return self.directory / f"best-{step}.ckpt"

    def _prune(self, trainer: Trainer) -> None:
        """Remove what is among the best no longer, or was written behind the checkpoint that the run goes on from."""
        kept = {self._kept_path(entry["step"]) for entry in self.kept}
        # Those that a thread has yet to write are no files yet.
        there = {*self.directory.glob("best-*.ckpt"), *self._kept_paths} if self.keep > 1 else set()
        for path in there - kept:
            _io(trainer).remove_checkpoint(path)
        self._kept_paths = kept

    # --- the best ---

    def hold(self, trainer: Trainer) -> None:
        """Hold a copy of the module's weights: those that the value to come is of. Every rank must call it."""
        if self.holds_scored and self.is_saving_best:
            self._validated = on_host(_unpruned(trainer.strategy.lightning_module_state_dict()))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._earlier = trainer.callback_metrics.get(str(self.monitor))

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._validated_at = trainer.global_step
            # Lightning keeps the value of the last step under the name of a whole epoch's, as the object that it was.
            found = trainer.callback_metrics.get(str(self.monitor))
            if self._is_compared == "given" and found is not None and found is not self._earlier:
                self._is_compared = "val"
            if self._is_compared != "given":
                self._compare(trainer, stage="val")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        is_there = self.monitor in trainer.callback_metrics
        if self._is_compared == "given" and (is_there or self._validated_at is not None):
            self._is_compared = "train"
        if self.watches_training:
            self._compare(trainer, stage="train")
        if self.best is not None and self.best["epoch"] == trainer.current_epoch:
            note_metrics(self.best, trainer.callback_metrics, stage="train")

    @property
    def watches_training(self) -> bool:
        if not self.is_saving_best:
            return False
        if self._is_compared is not None:
            return self._is_compared == "train"
        return is_of_training(self.monitor)

    def _compare(self, trainer: Trainer, *, stage: str) -> None:
        if not self.is_saving_best or self.monitor is None or (self.watches_training and stage == "val"):
            return
        value = monitored_value(trainer.callback_metrics, self.monitor)
        if not math.isfinite(value):
            log.warning("%s is %s at step %d: not the best", self.monitor, value, trainer.global_step)
            return
        if is_better(value, self.best, mode=self.mode):
            place = {"step": trainer.global_step, "epoch": trainer.current_epoch}
            self.best = restored_best({"metric": self.monitor, "value": value, **place}, self.best_path)
            if self._validated_at == trainer.global_step:
                note_metrics(self.best, trainer.callback_metrics, stage="val")
            self._is_better = True
            for logger in trainer.loggers if trainer.is_global_zero else ():
                logger.log_metrics(best_scalars(self.best), trainer.global_step)
        if self.keep > 1:
            entry = {"value": value, "step": trainer.global_step}
            others = [one for one in self.kept if one["step"] != entry["step"]]
            # Of equal ones the earlier.
            ranking = sorted([*others, entry], key=lambda one: one["value"], reverse=self.mode == "max")
            self.kept = ranking[: self.keep]
            self._is_kept = entry in self.kept
        if self._is_better or self._is_kept:
            self._scored = self._validated
        self._validated = None

    def _bring(self, trainer: Trainer) -> None:
        """Take along the best checkpoints that are next to the checkpoint of a run that resumes in another directory.

        A best.ckpt of a later step, which is done again or was given up, is not the best of this run.
        """
        best, kept = self.best, self.kept if self.keep > 1 else []
        if trainer.is_global_zero:
            source = Path(str(trainer.ckpt_path))
            if best is not None and not _copied(
                source, self.best_path, best["step"] == trainer.global_step, _is_best(best)
            ):
                best = None
            for entry in list(kept):
                path = self._kept_path(entry["step"])
                if not _copied(source, path, entry["step"] == trainer.global_step, Path.is_file):
                    kept.remove(entry)
            self._prune(trainer)
        best, self.kept = trainer.strategy.broadcast((best, kept))
        if best is None and self.best is not None:
            log.warning("the best.ckpt of step %d is missing: the best is sought anew from here", self.best["step"])
        self.best = best

    # --- what is in it ---

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if self._position is None:
            return  # a callback of the user's saves: good to evaluate, not to go on from
        checkpoint[POSITION] = dataclasses.asdict(self._position)
        # Without the path: one that comes out of a file is not followed.
        checkpoint[BEST] = self.best and {key: self.best[key] for key in BEST_KEYS}
        checkpoint[KEPT] = [dict(entry) for entry in self.kept]
        if self.config is not None:
            checkpoint[CONFIG] = self.config
        # A value of the training itself is of no weights in particular: an average stays what is kept.
        is_average = self.watches_training and CURRENT in checkpoint
        is_held = self._scored is None or is_average or _holds(checkpoint["state_dict"], self._scored)
        self._is_changed = not is_held
        if self._writes_scored and self._is_changed:
            # An average has the weights that are trained there already.
            checkpoint.setdefault(CURRENT, checkpoint["state_dict"])
            checkpoint["state_dict"], checkpoint[SCORED] = self._scored, True

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != "fit":
            if any(isinstance(callback, WeightAveraging) for callback in vars(trainer)["callbacks"]):
                # Where it has fitted before, it has just put the weights that were trained in the place of the average.
                trainer.strategy.load_model_state_dict(checkpoint, strict=trainer.lightning_module.strict_loading)
            return
        if POSITION not in checkpoint:
            raise RunError(
                f"{trainer.ckpt_path} says nothing of its position in the data, so no run can go on from it exactly; "
                "expected a last.ckpt or best.ckpt of exp. It can be evaluated: train=false test=true"
            )
        position = Position.of(checkpoint[POSITION])
        checkpoint["loops"]["fit_loop"] = fit_loop_state(
            trainer, position, is_manual=not pl_module.automatic_optimization
        )
        if SCORED in checkpoint:
            pl_module.load_state_dict(checkpoint[CURRENT])
        self._is_restored, self.resumed = True, position
        self._tell(trainer, f"{trainer.ckpt_path} is of step {position.step}, and good")
        found = checkpoint[BEST]
        if self.is_saving_best and found is not None and found["metric"] == self.monitor:
            self.best = restored_best(found, self.best_path)
            self.kept = checkpoint.get(KEPT, [])[: self.keep]

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            _io(trainer).settle()
        except OSError as error:
            # The first error is the one to tell, of which this one may be another face.
            log.error("%s", error)
        # A best that was seen and not yet written is not there.
        if self._is_better and not self.best_path.is_file():
            self.best = None


def position_in(path: Path | str) -> Position | None:
    """Return the position in a checkpoint that was looked at before; None if it holds none."""
    state = torch.load(path, map_location="cpu", mmap=True, weights_only=True)
    return Position.of(state[POSITION]) if POSITION in state else None


def monitored_value(values: Mapping[str, Any], monitor: str) -> float:
    """Return the value of the monitored tag.

    Raises:
        RunError: Nothing gives the tag.
    """
    if monitor not in values:
        known = sorted(values)
        fix = did_you_mean(monitor, known)
        raise RunError(
            f"monitor is {monitor}, which nothing gives; expected one of {among(known)}" + (f". {fix}" if fix else "")
        )
    return float(values[monitor])


def is_of_training(monitor: str | None) -> bool:
    """Return whether a monitored tag is a value of training, which no validation gives."""
    return monitor is not None and (monitor.endswith("/train") or monitor == EPOCH_LOSS)


def is_better(value: float, best: Mapping[str, Any] | None, *, mode: Mode) -> bool:
    """Return whether a value is better than the best so far. None: there is no best."""
    if best is None:
        return True
    return bool(value < best["value"] if mode == "min" else value > best["value"])


def note_metrics(best: dict[str, Any], values: Mapping[str, Any], *, stage: Stage) -> None:
    """Add a stage's loss and metrics to those of the best weights."""
    best["metrics"] |= {tag: float(value) for tag, value in values.items() if split_tag(tag)[1] == stage}


def restored_best(found: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """Return the best that a checkpoint describes; older checkpoints have no metrics of it."""
    return {"epoch": -1, "metrics": {}, **found, "checkpoint": str(path)}


def _unpruned(state: State) -> State:
    """Return the weights that a network computed with, under their own names, where torch.nn.utils.prune split them."""
    split = [name.removesuffix("_mask") for name in state if name.endswith("_mask")]
    split = [name for name in split if f"{name}_orig" in state and name not in state]
    own = {name: state[f"{name}_orig"] * state[f"{name}_mask"] for name in split}
    parts = {f"{name}{end}" for name in split for end in ("_orig", "_mask")}
    return {**{name: value for name, value in state.items() if name not in parts}, **own} if split else state


def _holds(state: State, scored: State) -> bool:
    """Whether a checkpoint's weights are those that were scored; an average may be kept in a wider dtype."""
    return state.keys() == scored.keys() and all(
        torch.equal(state[name].to(value), value) if isinstance(value, Tensor) else state[name] == value
        for name, value in scored.items()
    )


def sweep_run(directory: Path) -> None:
    """Remove what a killed run left half written in its run directory, if it is one."""
    if not (directory / CHECKPOINTS).is_dir():
        return
    remove_partial_files(directory, levels=1)
    remove_partial_files(directory / CHECKPOINTS / OF_LIGHTNING)
    if not is_locked(directory / "config.yaml"):
        for exchange in directory.glob(".launch-*"):  # where its ranks exchanged words
            shutil.rmtree(exchange, ignore_errors=True)


def _is_same(one: Path, other: Path) -> bool:
    return other.is_file() and one.samefile(other)


def _is_best(best: Mapping[str, Any]) -> Callable[[Path], bool]:
    """Return a function that says whether a file is the best.ckpt of a step."""

    def is_it(path: Path) -> bool:
        try:
            found = read_checkpoint(path)[BEST]
        except (RunError, KeyError):
            return False
        return found is not None and int(found["step"]) == best["step"]

    return is_it


def _copied(source: Path, path: Path, is_source: bool, is_it: Callable[[Path], bool]) -> bool:
    """Copy one of the best checkpoints from next to `source`, unless it is at its path. Return whether it is.

    is_source: whether it is `source` itself, which a kill has kept from being copied.
    """
    for there in (path, source.parent / path.name):
        if is_it(there):
            break
    else:
        there = source
        if not is_source:
            return False
    if there != path:
        path.parent.mkdir(parents=True, exist_ok=True)
        copy_checkpoint(there, path)
    return True


def _io(trainer: Trainer) -> AtomicCheckpointIO:
    io = trainer.strategy.checkpoint_io
    # Another one knows nothing of a thread.
    return io if isinstance(io, AtomicCheckpointIO) else AtomicCheckpointIO()
