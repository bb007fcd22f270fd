"""The position of a run in Lightning's loops, for which engine/progress.py uses private names of Lightning."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

from lightning.pytorch import Callback

from exp.engine.progress import Position, after_fit, before_batch, fit_loop_state, in_validation


def test_a_restored_loop_counts_as_the_position_says(tmp_path: Path, small_run: ModuleType) -> None:
    trainer = small_run.Small(tmp_path).trainer
    trainer.fit_loop.load_state_dict(fit_loop_state(trainer, Position(epoch=2, batch=3, step=17, batches=17)))
    assert (trainer.current_epoch, trainer.global_step) == (2, 17)
    assert trainer.fit_loop.restarting
    start = Position(epoch=3, batch=0, step=21, batches=21)
    trainer.fit_loop.load_state_dict(fit_loop_state(trainer, start))
    assert (trainer.current_epoch, trainer.global_step) == (3, 21)
    # A position at the start of an epoch is no restart within the epoch.
    assert not trainer.fit_loop.restarting


class Look(Callback):
    """Callback that records the positions of a run."""

    def __init__(self) -> None:
        self.before: list[Position] = []
        self.validating: list[Position] = []
        self.after: list[Position] = []

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self.before.append(before_batch(trainer, batch_idx))

    def on_validation_start(self, trainer: Any, pl_module: Any) -> None:
        self.validating.append(in_validation(trainer))

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        self.after.append(after_fit(trainer))


def test_the_positions_of_a_run(tmp_path: Path, small_run: ModuleType) -> None:
    look = Look()
    small_run.Small(tmp_path, callbacks=(look,), max_epochs=2, accumulate_grad_batches=2, max_steps=7).fit()
    # The seven batches of an epoch are steps of 2, 2, 2 and 1 batches. The position is that of the start of the step.
    places = [(one.epoch, one.batch, one.step, one.batches) for one in look.before]
    assert places[:8] == [
        (0, 0, 0, 0),
        (0, 0, 0, 0),
        (0, 2, 1, 2),
        (0, 2, 1, 2),
        (0, 4, 2, 4),
        (0, 4, 2, 4),
        (0, 6, 3, 6),
        (1, 0, 4, 7),
    ]
    assert look.validating[0] == Position(epoch=0, batch=7, step=4, batches=7, validation_due=True, epoch_complete=True)
    # The run ends by max_steps in the middle of the second epoch, which Lightning counts as complete.
    assert look.after == [Position(epoch=1, batch=6, step=7, batches=13)]
    small_run.Small(tmp_path / "whole", callbacks=(look,), max_epochs=2).fit()
    assert look.after[1] == Position(epoch=2, batch=0, step=14, batches=14)
