"""Where a run is, and the adapter that tells Lightning's loops so after a resume.

Lightning restores its counters as they stood in the middle of whatever hook saved them, and continues wrongly from most
of them (docs/resume.md). Here a checkpoint holds a position, and the counters are made from it anew.

Relied on, and tested: the names in `fit_loop.state_dict()`, and that a loop restored to them goes on as said beside
each (seen in lightning 2.6.6).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from lightning.pytorch import Trainer


@dataclass(frozen=True, kw_only=True)
class Position:
    """How much of a run is done: what comes next is batch `batch` of epoch `epoch`, both counted from 0.

    step: optimizer steps done. batches: training batches done, over all epochs.
    validation_due: the validation behind batch `batch - 1` comes first.
    epoch_complete: that batch was the last one of its epoch, so that nothing but the validation is left of it.
    """

    epoch: int
    batch: int
    step: int
    batches: int
    validation_due: bool = False
    epoch_complete: bool = False


def before_batch(trainer: Trainer, batch_idx: int) -> Position:
    """In on_train_batch_start: nothing of batch `batch_idx` is done yet.

    Between accumulated batches it is the first of them: the parameters have not changed since, and doing the others
    again gives the same gradients.
    """
    again = batch_idx % trainer.accumulate_grad_batches
    return Position(
        epoch=trainer.current_epoch,
        batch=batch_idx - again,
        step=trainer.global_step,
        batches=trainer.fit_loop.total_batch_idx - again,
    )


def in_validation(trainer: Trainer) -> Position:
    """While fit validates: the validation has to be done again."""
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
    """In on_train_end. Lightning counts an epoch as done, too, when it stopped in the middle of it."""
    batch, batches = trainer.fit_loop.batch_idx + 1, trainer.fit_loop.total_batch_idx + 1
    if is_epoch_complete(trainer):
        return Position(epoch=trainer.current_epoch, batch=0, step=trainer.global_step, batches=batches)
    again = batch % trainer.accumulate_grad_batches
    return Position(
        epoch=trainer.current_epoch - 1, batch=batch - again, step=trainer.global_step, batches=batches - again
    )


def is_epoch_complete(trainer: Trainer) -> bool:
    """Whether the batch that was done last is the last one of its epoch."""
    return trainer.is_last_batch or trainer.fit_loop.batch_idx + 1 == trainer.num_training_batches


def next_batch(trainer: Trainer) -> tuple[int, int]:
    """The epoch and the batch in it that the training loader has to give next, when it is asked for an iterator."""
    return trainer.current_epoch, trainer.fit_loop.epoch_loop.batch_progress.current.ready


def fit_loop_state(trainer: Trainer, position: Position) -> dict[str, Any]:
    """The state that makes Lightning's fit loop go on at a position."""
    state = trainer.fit_loop.state_dict()
    inside = position.batch > 0
    # Inside an epoch: it has started and is not processed, so no on_train_epoch_start. At its start: nothing is open,
    # and Lightning does not count it as a restart at all.
    started = position.epoch + inside
    epochs = {"ready": started, "started": started, "processed": position.epoch, "completed": position.epoch}
    state["epoch_progress"] = {"total": epochs, "current": dict(epochs)}
    # One batch processed but not completed is the end of a batch, whose validation counts as done; all completed is
    # behind it, and a validation loop that stands inside a batch is run again from its start.
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
    # The x axis of a user's self.log. Inside an epoch, Lightning adds the step of the batch that it counts as open.
    state["epoch_loop.state_dict"] = {"_batches_that_stepped": max(0, position.step - inside)}
    return state


def forget_restart(trainer: Trainer) -> None:
    """In on_train_start: the rest of the epoch is an epoch like any other.

    Lightning takes all of it for a restart, and leaves out the update of a schedule on plateau at its end.
    """
    trainer.fit_loop._restarting = False


def _counts(processed: int, completed: int) -> dict[str, int]:
    return {"ready": processed, "started": processed, "processed": processed, "completed": completed}
