"""Save the state of a run where it is at a position, and end it: to hold it against what another run saved there."""

from __future__ import annotations

from collections.abc import Mapping

from lightning.pytorch import Callback, LightningModule, Trainer

from exp.engine.checkpointing import Checkpointing
from exp.engine.progress import Position, before_batch, in_validation
from exp.types import Batch

# Among the checkpoints of the run.
STATE = "state.ckpt"


class StateAt(Callback):
    """A callback for `python -m exp.resume RUN --verify`, which names the position of a checkpoint.

    The last state of a run is its own last.ckpt: this one looks at all before it.

    position: the fields of exp.engine.progress.Position.
    """

    def __init__(self, *, position: Mapping[str, int | bool]) -> None:
        super().__init__()
        self.position = Position(**position)  # type: ignore[arg-type]  # as a config has it

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._save(trainer, before_batch(trainer, batch_idx))

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not trainer.sanity_checking:
            self._save(trainer, in_validation(trainer))

    def _save(self, trainer: Trainer, position: Position) -> None:
        if position != self.position or trainer.should_stop:
            return
        (checkpointing,) = [one for one in vars(trainer)["callbacks"] if isinstance(one, Checkpointing)]
        checkpointing.save(trainer, position, checkpointing.directory / STATE)
        trainer.should_stop = True
