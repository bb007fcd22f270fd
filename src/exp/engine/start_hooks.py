"""Callback that restores the state of a resumed run after the start hooks have been called again.

The start hooks are on_train_start and on_train_epoch_start. An uninterrupted run calls each start hook once, before the
checkpoint is saved. A resumed run calls on_train_start again, and on_train_epoch_start if it resumes within an epoch.
These repeated calls must not change the loaded state.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable, Iterator
from typing import Any, cast

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from exp.engine.checkpoint import State
from exp.engine.checkpointing import POSITION
from exp.engine.datamodule import RunTrainer
from exp.engine.lean_loop import find_override, is_own
from exp.engine.progress import Position
from exp.optim.phase import PhaseSchedule
from exp.optim.schedules import lengths_of, take_length
from exp.shared_types import Batch

log = logging.getLogger(__name__)

START_HOOKS = ("on_train_start", "on_train_epoch_start")


class StartHooks(Callback):
    """Callback that restores weights, optimizers, schedules and callbacks after the start hooks of a resumed run.

    The state is restored after on_train_start of all callbacks. If the run resumes within an epoch, the state is
    restored again after on_train_epoch_start. This callback must precede the user's callbacks in the Trainer's list.
    """

    def __init__(self) -> None:
        super().__init__()
        self._resumed: Position | None = None
        self._restore: Callable[[], None] | None = None
        self._lengths: list[tuple[LRScheduler, State]] = []

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn == "fit":
            self._resumed = Position.of(checkpoint[POSITION])

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The lengths are read now, because Lightning loads a checkpoint into the schedules after this hook.
        self._lengths = [(one, lengths_of(one)) for one in _schedules(trainer)]

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._resumed is not None:
            self._take_lengths(trainer)
            if any(_others(cast(RunTrainer, trainer), START_HOOKS)):
                self._restore = _hold_state(cast(RunTrainer, trainer))

    def _take_lengths(self, trainer: Trainer) -> None:
        current = list(_schedules(trainer))  # a callback may have replaced schedules
        for schedule, lengths in self._lengths:
            if schedule in current and take_length(schedule, lengths) and trainer.is_global_zero:
                log.info("the new length of the run changes the learning rates of %s", type(schedule).__name__)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restore is not None:
            self._restore()

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self._restore is not None:
            self._end_start()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._restore is not None:
            self._end_start()

    def _end_start(self) -> None:
        if self._restore is not None and self._resumed is not None and self._resumed.is_inside:
            self._restore()
        self._restore = self._resumed = None


def _schedules(trainer: Trainer) -> Iterator[LRScheduler]:
    """Yield the schedules that count steps. Schedules of type ReduceLROnPlateau are excluded."""
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler.schedule if isinstance(config.scheduler, PhaseSchedule) else config.scheduler
        if isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau):
            yield schedule


def _others(trainer: RunTrainer, hooks: tuple[str, ...]) -> Iterator[object]:
    """Yield each callback of users, and the user's module, if it overrides at least one of the hooks."""
    owners: list[tuple[object, type]] = [(callback, Callback) for callback in trainer.callbacks]
    for owner, base in [*owners, (trainer.lightning_module, LightningModule)]:
        if not is_own(owner) and any(find_override(owner, base, hook) for hook in hooks):
            yield owner


def _hold_state(trainer: RunTrainer) -> Callable[[], None]:
    """Copy the state that a checkpoint contains, and return a function that loads the copy."""
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
