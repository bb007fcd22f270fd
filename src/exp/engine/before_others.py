"""Callback that saves checkpoints before the hooks of other callbacks run.

A resumed run calls the start hooks again: on_train_start, and within an epoch on_train_epoch_start. The uninterrupted
run called them once, before the checkpoint was saved. Therefore a repeated start hook must not change the loaded state.
This callback restores weights, optimizers, schedules and callbacks after on_train_start of the other callbacks. Within
an epoch, it restores them again after on_train_epoch_start.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from exp.engine.checkpoint import State
from exp.engine.checkpointing import OF_LIGHTNING, Checkpointing
from exp.engine.datamodule import RunTrainer
from exp.engine.lean_loop import find_override, is_own
from exp.engine.progress import before_batch, is_epoch_complete
from exp.engine.stopping import Stopping
from exp.optim.phase import PhaseSchedule
from exp.optim.schedules import ScheduleState, take_length
from exp.shared_types import Batch

log = logging.getLogger(__name__)

START_HOOKS = ("on_train_start", "on_train_epoch_start")


class BeforeOthers(Callback):
    """Callback that runs the tasks of Checkpointing and Stopping before the user's callbacks.

    It precedes the user's callbacks in the Trainer's list. Before their hooks of a batch or an epoch, it saves
    checkpoints and copies the validated weights. It also saves the last state before other callbacks end the training.
    Some callbacks, such as Lightning's WeightAveraging, replace the module's weights at that point. A longer run must
    not resume from the replaced weights.
    """

    _trainer: RunTrainer

    def __init__(self, checkpointing: Checkpointing, stopping: Stopping) -> None:
        super().__init__()
        self.checkpointing, self.stopping = checkpointing, stopping
        self._restore: Callable[[], None] | None = None
        self._is_starting = False
        self._fresh: list[tuple[LRScheduler, ScheduleState]] = []

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # Without a dirpath, these callbacks would write to the folder of a logger.
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint) and one.dirpath is None:
                one.dirpath = str(self.checkpointing.directory / OF_LIGHTNING)

    # --- the start ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Copied before a checkpoint is loaded into optimizers and schedules.
        self._fresh = [(one, ScheduleState.of(one)) for one in _schedules(trainer)]

    def _take_lengths(self) -> None:
        current = list(_schedules(self._trainer))  # a callback may have replaced schedules
        for schedule, fresh in self._fresh:
            if schedule in current and take_length(schedule, fresh) and self._trainer.is_global_zero:
                name = type(schedule).__name__
                log.info(
                    "the schedule %s has another length than before the resume; its rates change accordingly", name
                )

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = cast(RunTrainer, trainer)
        if self.checkpointing.resumed is not None:
            self._take_lengths()
        if self.checkpointing.resumed is not None and any(_others(self._trainer, START_HOOKS)):
            self._restore = _hold_state(self._trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._is_starting = True
        if self._restore is None:
            self._start_batch(trainer, 0)
        else:
            self._restore()

    def _epoch_has_started(self) -> None:
        """Restore the saved state after the epoch's start hooks, which a resume calls again."""
        self._is_starting = False
        if self._restore is not None:
            if self.checkpointing.resumed is not None and self.checkpointing.resumed.is_inside:
                self._restore()
            self._restore = None
        self.checkpointing.resumed = None

    # --- before other callbacks ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self._is_starting or self._restore is not None:
            self._epoch_has_started()
        self._start_batch(trainer, batch_idx)

    def _start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        self.checkpointing.start_batch(trainer, batch_idx)
        self.stopping.start_batch(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_starting or self._restore is not None:
            self._epoch_has_started()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not (trainer.sanity_checking or self.checkpointing.watches_training):
            self.checkpointing.hold(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.checkpointing.watches_training:
            self.checkpointing.hold(trainer)
        elif not is_epoch_complete(trainer):
            # A limit ends the run within an epoch. Other callbacks may act now, although a longer run would not end the
            # epoch at this batch.
            self.checkpointing.end(trainer, before_batch(trainer, trainer.fit_loop.batch_idx + 1))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpointing.on_train_end(trainer, pl_module)


def _schedules(trainer: Trainer) -> Iterator[LRScheduler]:
    """Yield the schedules that count steps. Schedules of type ReduceLROnPlateau are excluded."""
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler.schedule if isinstance(config.scheduler, PhaseSchedule) else config.scheduler
        if isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau):
            yield schedule


def _others(trainer: RunTrainer, hooks: tuple[str, ...]) -> Iterator[object]:
    """Yield the callbacks, and the module, that override at least one of the hooks. Classes of exp are excluded."""
    owners: list[tuple[object, type]] = [(callback, Callback) for callback in trainer.callbacks]
    for owner, base in [*owners, (trainer.lightning_module, LightningModule)]:
        if not is_own(owner) and any(find_override(owner, base, hook) for hook in hooks):
            yield owner


def _hold_state(trainer: RunTrainer) -> Callable[[], None]:
    """Copy the state that a checkpoint would contain, and return a function that restores the copy."""
    held: list[tuple[Callable[[Any], object], State]] = []

    def hold(load: Callable[[Any], object], state: State) -> None:
        held.append((load, copy.deepcopy(state)))

    module = trainer.lightning_module
    hold(lambda state: nn.Module.load_state_dict(module, state, strict=False), module.state_dict())
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer):  # DeepSpeed's optimizers are not torch optimizers
            hold(optimizer.load_state_dict, optimizer.state_dict())
    for config in trainer.lr_scheduler_configs:
        hold(config.scheduler.load_state_dict, dict(config.scheduler.state_dict()))
    for callback in trainer.callbacks:
        if not is_own(callback) and (state := callback.state_dict()):
            hold(callback.load_state_dict, state)

    def restore() -> None:
        for load, state in held:
            load(copy.deepcopy(state))

    return restore
