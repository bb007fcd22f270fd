"""What the adapter of Lightning's loops relies on. Seen in lightning 2.6.6."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch import Callback

from exp.engine.progress import Position, after_fit, before_batch, fit_loop_state, in_validation

pytestmark = [
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]


def test_the_names_in_a_fit_loops_state(tmp_path: Path, small_run: ModuleType) -> None:
    state = small_run.Small(tmp_path).trainer.fit_loop.state_dict()
    assert {
        "epoch_progress",
        "epoch_loop.state_dict",
        "epoch_loop.batch_progress",
        "epoch_loop.automatic_optimization.optim_progress",
        "epoch_loop.val_loop.batch_progress",
    } <= state.keys()
    assert state["epoch_loop.state_dict"] == {"_batches_that_stepped": 0}
    counts = {"ready": 0, "completed": 0, "started": 0, "processed": 0}
    assert state["epoch_progress"] == {"total": counts, "current": counts}
    assert state["epoch_loop.batch_progress"] == {"total": counts, "current": counts, "is_last_batch": False}
    optimizer = state["epoch_loop.automatic_optimization.optim_progress"]["optimizer"]
    assert optimizer["step"]["total"] == {"ready": 0, "completed": 0}
    assert optimizer["zero_grad"]["total"] == {"ready": 0, "completed": 0, "started": 0}


def test_a_restored_loop_counts_as_the_position_says(tmp_path: Path, small_run: ModuleType) -> None:
    trainer = small_run.Small(tmp_path).trainer
    trainer.fit_loop.load_state_dict(fit_loop_state(trainer, Position(epoch=2, batch=3, step=17, batches=17)))
    assert (trainer.current_epoch, trainer.global_step) == (2, 17)
    assert trainer.fit_loop.restarting
    start = Position(epoch=3, batch=0, step=21, batches=21)
    trainer.fit_loop.load_state_dict(fit_loop_state(trainer, start))
    assert (trainer.current_epoch, trainer.global_step) == (3, 21)
    # At an epoch's start nothing is open: it is no restart.
    assert not trainer.fit_loop.restarting


class Look(Callback):
    """Notes the positions that a run passes."""

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
    # Seven batches an epoch are windows of 2, 2, 2 and 1; the positions are the windows' beginnings.
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
    # max_steps came in the middle of the second epoch, which Lightning counts as done.
    assert look.after == [Position(epoch=1, batch=6, step=7, batches=13)]


def test_after_its_last_epoch_a_run_stands_at_the_next_ones_start(tmp_path: Path, small_run: ModuleType) -> None:
    look = Look()
    small_run.Small(tmp_path, callbacks=(look,), max_epochs=2).fit()
    assert look.after == [Position(epoch=2, batch=0, step=14, batches=14)]
