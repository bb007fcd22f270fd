"""Callback that ends a job of a search early if Optuna's pruner prunes the trial after a validation."""

from __future__ import annotations

import logging
import math
from pathlib import Path

from lightning.pytorch import Callback, LightningModule, Trainer

from exp.engine.progress import is_epoch_complete, is_on_any_rank, total_epochs
from exp.engine.trial_record import TrialOfJob
from exp.shared_types import Pruner

log = logging.getLogger(__name__)


class Pruning(Callback):
    """Callback that ends fit if the pruner prunes the trial. All ranks end at the same batch.

    A pruned run ends in the same way as a run that reaches a limit, such as max_steps.

    Args:
        trial: Number of the trial in the sweep's study.
        monitor: Monitored tag.
        pruner: Name of the pruner.
        sweep: Directory of the sweep.
    """

    def __init__(self, *, trial: int, monitor: str, pruner: Pruner, sweep: Path) -> None:
        super().__init__()
        self.trial, self.monitor, self.pruner = trial, monitor, pruner
        self.sweep = sweep
        self.has_pruned = False
        self._trial: TrialOfJob | None = None
        # Number of validations in the whole run. The pruner uses this number as the step of a value.
        self.validations = 0

    def state_dict(self) -> dict[str, int]:
        return {"validations": self.validations}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self.validations = state_dict["validations"]

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If a job was killed after it was pruned, a resume must not train it again. Only rank 0 calls the pruner.
        if self.validations and is_on_any_rank(trainer, trainer.is_global_zero and self._is_pruned(trainer)):
            self.has_pruned = trainer.should_stop = True

    def on_validation_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn != "fit" or trainer.sanity_checking:
            return
        self.validations += 1
        is_logged = self.monitor in trainer.callback_metrics
        if is_logged and is_on_any_rank(trainer, trainer.is_global_zero and self._report(trainer)):
            self.has_pruned = trainer.should_stop = True

    def _report(self, trainer: Trainer) -> bool:
        value, step = float(trainer.callback_metrics[self.monitor]), self.validations
        if not math.isfinite(value):
            return False  # runtime.non_finite decides whether the run continues
        is_pruned = self._record(trainer).report(value, step=step)
        if is_pruned and is_epoch_complete(trainer) and trainer.current_epoch + 1 == total_epochs(trainer):
            return False  # the run is already complete, so it is not pruned
        if is_pruned:
            log.info("the pruner %s ends the job at validation %d: %s is %.6g", self.pruner, step, self.monitor, value)
        return is_pruned

    def _is_pruned(self, trainer: Trainer) -> bool:
        pruned_at = self._record(trainer).pruned_at
        return pruned_at is not None and self.validations >= pruned_at

    def _record(self, trainer: Trainer) -> TrialOfJob:
        if self._trial is None:
            self._trial = TrialOfJob(self.trial, directory=self.sweep, pruner=self.pruner, epochs=_validations(trainer))
        return self._trial


def _validations(trainer: Trainer) -> int | None:
    """Return the number of validations of the run; None if the number of epochs is unlimited."""
    if trainer.max_epochs is None or trainer.max_epochs < 0 or trainer.check_val_every_n_epoch is None:
        return None
    every, batches = trainer.val_check_batch, trainer.num_training_batches
    if trainer.check_val_every_n_epoch > 1 or not isinstance(every, int) or not isinstance(batches, int):
        return trainer.max_epochs // trainer.check_val_every_n_epoch
    return trainer.max_epochs * max(1, batches // every)
