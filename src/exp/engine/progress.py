"""The position, the limits and the number of steps of a run.

Lightning saves its counters with their values in the current hook, and cannot resume correctly from most hooks
(docs/resume.md). A checkpoint of exp contains a position instead. On resume, Lightning's counters are computed from the
position.

Tested with Lightning 2.6.6: the names in `fit_loop.state_dict()`, and the behavior of a loop that loaded such a state.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch
from lightning.pytorch import Trainer

from exp.shared_types import span_seconds


@dataclass(frozen=True, kw_only=True)
class Limits:
    """Limits that exp enforces, because Lightning's limits end a resumed run too early.

    Attributes:
        max_steps: Largest number of optimizer steps of the whole run, including steps before a resume. None: no limit.
            Default: None.
        max_seconds: Longest training time of the whole run in seconds. None: no limit. Default: None.
        resumed: Position from which the run resumes; None for a new run. Default: None.
    """

    max_steps: int | None = None
    max_seconds: float | None = None
    resumed: Position | None = None


def take_limits(trainer: Mapping[str, Any]) -> tuple[dict[str, Any], Limits]:
    """Split the config's node `trainer` into the arguments of Lightning's Trainer and exp's limits.

    If steps or time are limited and max_epochs is not set, the number of epochs is unlimited.
    """
    arguments = dict(trainer)
    max_steps, max_time = arguments.pop("max_steps", -1), arguments.pop("max_time", None)
    limits = Limits(
        max_steps=None if max_steps is None or max_steps < 0 else max_steps,
        max_seconds=None if max_time is None else seconds_of(max_time),
    )
    if arguments.get("max_epochs") is None and (limits.max_steps is not None or limits.max_seconds is not None):
        arguments["max_epochs"] = -1
    return arguments, limits


def seconds_of(max_time: float | str | Mapping[str, float]) -> float:
    """Return the value of trainer.max_time in seconds.

    Args:
        max_time: Number of seconds, a duration such as 1h30m, or one of Lightning's formats: dd:hh:mm:ss or a mapping.
    """
    if isinstance(max_time, Mapping):
        return timedelta(**max_time).total_seconds()
    if isinstance(max_time, str) and ":" in max_time:
        days, hours, minutes, seconds = map(int, max_time.split(":"))
        return timedelta(days=days, hours=hours, minutes=minutes, seconds=seconds).total_seconds()
    return span_seconds(max_time) if isinstance(max_time, str) else float(max_time)


def is_on_any_rank(trainer: Trainer, flag: bool) -> bool:
    """Return whether the flag is true on at least one rank. Every rank must call this function."""
    if trainer.world_size == 1:
        return flag
    mine = torch.tensor(int(flag), device=trainer.strategy.root_device)
    return bool(trainer.strategy.reduce(mine, reduce_op="max"))


def total_epochs(trainer: Trainer) -> int | None:
    """Return the number of epochs of the whole run; None if it is unlimited."""
    return None if trainer.max_epochs is None or trainer.max_epochs < 0 else trainer.max_epochs


def epoch_batches(trainer: Trainer, batches: int | None) -> int | None:
    """Return the number of global batches that a run trains on per epoch; None if the number is unknown.

    Args:
        trainer: The Trainer.
        batches: Number of batches of the training data per epoch; None if unknown.
    """
    limit = trainer.limit_train_batches
    if batches is not None:
        # limit_train_batches is a number of batches if it is an integer, and a fraction of the data if it is a float.
        return min(limit, batches) if isinstance(limit, int) else int(limit * batches)
    return limit if isinstance(limit, int) else None


def total_steps(trainer: Trainer, limits: Limits, batches: int | None) -> int | None:
    """Return the number of optimizer steps of the whole run; None if the number is unknown.

    Args:
        trainer: The Trainer.
        limits: Limits of the run.
        batches: Number of batches of the training data per epoch; None if unknown.
    """
    batches = epoch_batches(trainer, batches)
    epochs = total_epochs(trainer)
    known = [steps for steps in (limits.max_steps, trainer.max_steps) if steps is not None and steps >= 0]
    if batches is not None and epochs is not None:
        # The batch size may have changed at a resume, so completed and remaining steps are counted separately.
        done = limits.resumed or Position(epoch=0, batch=0, step=0, batches=0)
        count = trainer.accumulate_grad_batches
        steps_of_epoch = math.ceil(batches / count)
        passed = done.batch // count if done.batch < batches else steps_of_epoch
        known.append(done.step - passed + steps_of_epoch * (epochs - done.epoch))
    return min(known) if known else None


@dataclass(frozen=True, kw_only=True)
class Position:
    """The position of a run: the next batch, and the numbers of completed steps and batches.

    Attributes:
        epoch: Epoch of the next batch, counted from 0.
        batch: Number of the next batch in the epoch, counted from 0.
        step: Number of completed optimizer steps.
        batches: Number of completed training batches over all epochs.
        validation_due: Whether the validation after the previous batch (`batch - 1`) runs next. Default: False.
        epoch_complete: Whether the previous batch was the last one of its epoch, so that only the validation remains.
            Default: False.
    """

    epoch: int
    batch: int
    step: int
    batches: int
    validation_due: bool = False
    epoch_complete: bool = False

    @classmethod
    def of(cls, saved: Mapping[str, Any]) -> Position:
        """Return the position saved in a checkpoint. Ignore the field `samples` of old versions of exp."""
        return cls(**{name: value for name, value in saved.items() if name != "samples"})

    @property
    def is_inside(self) -> bool:
        """True if at least one batch of the epoch is completed."""
        return self.batch > 0


def before_batch(trainer: Trainer, batch_idx: int) -> Position:
    """Return the position before a batch, for calls in on_train_batch_start.

    If batches are accumulated, the position is the first batch of the current optimizer step. No optimizer step follows
    this batch, so a resumed run computes the same gradients again. For batch 0, the function can also be called in
    on_train_epoch_start.
    """
    again = batch_idx % trainer.accumulate_grad_batches
    return Position(
        epoch=trainer.current_epoch,
        batch=batch_idx - again,
        step=trainer.global_step,
        batches=trainer.fit_loop.epoch_loop.batch_progress.total.completed - again,
    )


def in_validation(trainer: Trainer) -> Position:
    """Return the position during a validation in fit. A run that resumes from it repeats the whole validation."""
    batch, batches = trainer.fit_loop.batch_idx + 1, trainer.fit_loop.total_batch_idx + 1
    complete = is_epoch_complete(trainer)
    again = 0 if complete else batch % trainer.accumulate_grad_batches
    return Position(
        epoch=trainer.current_epoch,
        batch=batch - again,
        step=trainer.global_step,
        batches=batches - again,
        validation_due=not again,
        epoch_complete=complete,
    )


def after_fit(trainer: Trainer) -> Position:
    """Return the position after training, for calls in on_train_end.

    If the training stopped within an epoch, Lightning has already counted this epoch as completed.
    """
    batch, batches = trainer.fit_loop.batch_idx + 1, trainer.fit_loop.total_batch_idx + 1
    if is_epoch_complete(trainer):
        return Position(epoch=trainer.current_epoch, batch=0, step=trainer.global_step, batches=batches)
    again = batch % trainer.accumulate_grad_batches
    return Position(
        epoch=trainer.current_epoch - 1,
        batch=batch - again,
        step=trainer.global_step,
        batches=batches - again,
    )


def is_epoch_complete(trainer: Trainer) -> bool:
    """Return whether the batch that was trained last was the last batch of its epoch."""
    return trainer.is_last_batch or trainer.fit_loop.batch_idx + 1 == trainer.num_training_batches


def next_batch(trainer: Trainer) -> tuple[int, int]:
    """Return the start of a new training iterator: the epoch, and the number of the batch in the epoch."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready


def fit_loop_state(trainer: Trainer, position: Position, *, is_manual: bool = False) -> dict[str, Any]:
    """Return a state dict for Lightning's fit loop, which makes the loop continue at a position.

    Args:
        trainer: The Trainer.
        position: Position to continue from.
        is_manual: Whether the module uses manual optimization. A batch may then have several optimizer steps, and
            batches are not accumulated. Default: False.
    """
    state = trainer.fit_loop.state_dict()
    inside = position.batch > 0
    # Inside an epoch, the epoch is marked as ready but not started, so that Lightning calls on_train_epoch_start again.
    # At the start of an epoch, no epoch is open, and Lightning does not treat it as a restart.
    epochs = _counts(position.epoch, position.epoch) | {"ready": position.epoch + inside}
    state["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    # If the validation after a batch is due, all batches count as completed, and Lightning restarts the validation.
    # Otherwise, the last batch counts as processed but not completed, because Lightning still has to run the end of the
    # batch.
    open_batches = int(inside and not position.validation_due)
    state["epoch_loop.batch_progress"] = {
        "total": _counts(position.batches, position.batches - open_batches),
        "current": _counts(position.batch, position.batch - open_batches),
        "is_last_batch": position.validation_due and position.epoch_complete,
    }
    state["epoch_loop.val_loop.batch_progress"]["total"] = (
        {"ready": 1, "started": 1, "processed": 0, "completed": 0} if position.validation_due else _counts(0, 0)
    )
    steps = {"ready": position.step, "completed": position.step}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    optimizer["step"]["total"] = steps
    optimizer["zero_grad"]["total"] = {**steps, "started": position.step}
    stepped = position.step
    if is_manual:
        state["epoch_loop.manual_optimization.optim_step_progress"]["total"] = dict(steps)
        stepped = position.batches
    # Number of steps on the x axis of self.log. Inside an epoch, Lightning adds 1 for the batch that is not completed.
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": max(0, stepped - inside)}
    return state


def forget_restart(trainer: Trainer) -> None:
    """Make Lightning treat the rest of a resumed epoch like a normal epoch. Call this function in on_train_start.

    Otherwise, Lightning does not update ReduceLROnPlateau schedules at the end of the resumed epoch.
    """
    is_inside = trainer.fit_loop.epoch_loop.restarting
    # This also sets the loops inside. They keep their value, which is true if the run resumes within an epoch.
    trainer.fit_loop.restarting = False
    trainer.fit_loop.epoch_loop.restarting = is_inside
    # Set the value of an uninterrupted run, because Lightning counts a restarted epoch differently.
    epochs = trainer.fit_loop.epoch_progress
    epochs.current.ready = epochs.total.ready


def _counts(processed: int, completed: int) -> dict[str, int]:
    return {"ready": processed, "started": processed, "processed": processed, "completed": completed}
