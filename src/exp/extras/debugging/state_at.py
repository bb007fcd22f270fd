"""Callback that saves the state of a run at a given position, and then ends the run."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer

from exp.engine.checkpoint import VERIFIED
from exp.engine.checkpointing import Checkpointing
from exp.engine.progress import Position, before_batch, in_validation
from exp.shared_types import Batch


class StateAt(Callback):
    """Callback of `exp.resume RUN --verify`, which trains a run again up to a position and saves the state.

    The callback is not needed for the last state of a run, because last.ckpt contains this state.

    Args:
        position: Values of some or all fields of exp.engine.progress.Position. The state is saved at the first position
            with these values.
    """

    def __init__(self, *, position: Mapping[str, int | bool | None]) -> None:
        super().__init__()
        self.position = position

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._save(trainer, before_batch(trainer, 0))

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._save(trainer, before_batch(trainer, batch_idx))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer, in_validation(trainer))

    def _save(self, trainer: Trainer, position: Position) -> None:
        found = dataclasses.asdict(position)
        if trainer.should_stop or any(found[name] != value for name, value in self.position.items()):
            return
        (checkpointing,) = [one for one in vars(trainer)["callbacks"] if isinstance(one, Checkpointing)]
        checkpointing.save(trainer, position, checkpointing.directory / VERIFIED)
        trainer.should_stop = True
