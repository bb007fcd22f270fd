"""The callback that acts before other callbacks do: saves before their hooks, and restores what a resume calls again.

A resumed run calls the hooks of a start again: on_train_start, and within an epoch on_train_epoch_start. In the
unbroken run they were called once. What they set must be there, and the saved state must not change twice:

    on_train_start of the others            the saved state is put back: weights, optimizers, schedules, callbacks
    on_train_epoch_start of the others      at an epoch's start: as in the unbroken run. Within an epoch: the saved
                                            state is put back, and attributes get the values that they had when the
                                            checkpoint was written

Where there is such a hook, a checkpoint within an epoch holds the attributes of the module and the callbacks that were
set since the epoch started, and those of layers that the hooks set, if they are plain values. Other objects, such as a
loss, are what the hooks set when they are called again.
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

from exp.engine.checkpoint import State, is_plain
from exp.engine.checkpointing import OF_LIGHTNING, Checkpointing, Values
from exp.engine.datamodule import RunTrainer
from exp.engine.lean_loop import is_own, overridden
from exp.engine.module import TrainingModule
from exp.engine.progress import accumulation_scheduler, before_batch, is_epoch_complete
from exp.engine.stopping import Stopping
from exp.errors import RunError
from exp.nested import moved, tensors_in
from exp.optim.phase import PhaseSchedule
from exp.optim.schedules import ScheduleState, take_length
from exp.shared_types import Batch

log = logging.getLogger(__name__)

MODULE, LAYER = "module", "module."
START_HOOKS = ("on_train_start", "on_train_epoch_start")


class BeforeOthers(Callback):
    """Acts for Checkpointing and Stopping before the user's callbacks do: stands before them in the Trainer's list.

    Saves before their hooks of a batch and of an epoch. Holds the weights that were validated, and saves the last state
    before the others end the training. Some put other weights into the module then, as Lightning's WeightAveraging
    does, and a longer run would go on from these.
    """

    _trainer: RunTrainer

    def __init__(self, checkpointing: Checkpointing, stopping: Stopping) -> None:
        super().__init__()
        self.checkpointing, self.stopping = checkpointing, stopping
        checkpointing.values_at_start = self._values
        self._put_back: Callable[[], None] | None = None
        # What others held before their hooks of the epoch under way; of layers what the hooks set alone.
        self._before: Values = {}
        self._is_starting = self._has_hooks = False
        self._fresh: list[tuple[LRScheduler, ScheduleState]] = []
        self._window = 1

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # By Lightning's rule they would write below the folder of a logger.
        for one in trainer.checkpoint_callbacks:
            if isinstance(one, ModelCheckpoint) and one.dirpath is None:
                one.dirpath = str(self.checkpointing.directory / OF_LIGHTNING)

    # --- the start ---

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Nothing of a checkpoint is in optimizers and schedules yet.
        self._fresh = [(one, ScheduleState.of(one)) for one in _schedules(trainer)]
        self._window = trainer.accumulate_grad_batches

    def _take_lengths(self) -> None:
        there = list(_schedules(self._trainer))  # without those that a callback has replaced
        for schedule, fresh in self._fresh:
            if schedule in there and take_length(schedule, fresh) and self._trainer.is_global_zero:
                name = type(schedule).__name__
                log.info("the schedule %s has another length than before: its rates are those of the new one", name)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._trainer = cast(RunTrainer, trainer)
        if self.checkpointing.resumed is not None:
            self._take_lengths()
        if self.checkpointing.resumed is not None and any(_others(self._trainer, START_HOOKS)):
            self._put_back = _way_back(self._trainer)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._put_back is None:
            self._start_batch(trainer, 0)
        else:
            self._put_back()
        self._is_starting = self._has_hooks = any(_others(self._trainer, START_HOOKS[1:]))
        self._before = _attributes(self._trainer) if self._has_hooks else {}

    def _epoch_has_started(self) -> None:
        """See what the hooks did at the start of the epoch; after a resume, put the saved state back."""
        self._is_starting = False
        self._refuse_other_windows()
        now = _attributes(self._trainer) if self._has_hooks else {}
        for key in now:
            if key.startswith(LAYER):  # whose forward may hold values of each batch, such as its outputs
                before = self._before.get(key, {})
                self._before[key] = {
                    name: before.get(name, self) for name, one in now[key].items() if before.get(name, self) is not one
                }
        if self._put_back is not None:
            if self.checkpointing.resumed is not None and self.checkpointing.resumed.is_inside:
                self._put_back()
                self._restore()
            self._put_back = None
        self.checkpointing.resumed = None

    def _refuse_other_windows(self) -> None:
        """Raise for another number of accumulated batches than the length of a schedule was made with."""
        trainer, module = self._trainer, self._trainer.lightning_module
        window = trainer.accumulate_grad_batches
        if window == self._window or accumulation_scheduler(trainer) is not None:
            return
        # A callback may have put another schedule in its place.
        is_there = any(schedule in _schedules(trainer) for schedule, _ in self._fresh)
        if is_there and isinstance(module, TrainingModule) and module.needs_total_steps:
            raise RunError(
                f"trainer.accumulate_grad_batches was set to {window} in epoch {trainer.current_epoch}, and the "
                f"schedule is as long as a run with {self._window}; expected callbacks with Lightning's "
                "GradientAccumulationScheduler, whose steps are known. Or give scheduler.total_steps"
            )

    def _restore(self) -> None:
        owners = _owners(self._trainer)
        for key, values in self.checkpointing.restored_values.items():
            for name, value in values.items() if key in owners else ():
                first = next(tensors_in(getattr(owners[key], name, None)), None)
                device = self._trainer.strategy.root_device if first is None else first.device
                setattr(owners[key], name, moved(value, device))

    def _values(self) -> Values | None:
        """What others have set since the epoch started, its hooks included, if it is plain; None without such hooks."""
        if not self._has_hooks:
            return None
        found: Values = {}
        for key, values in _attributes(self._trainer).items():
            before = self._before.get(key, {})
            names = [name for name in values if name in before or not key.startswith(LAYER)]
            changed = [name for name in names if values[name] is not before.get(name, self)]
            if plain := {name: values[name] for name in changed if is_plain(values[name])}:
                found[key] = plain
        return found

    # --- before other callbacks ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if self._is_starting or self._put_back is not None:
            self._epoch_has_started()
        self._start_batch(trainer, batch_idx)

    def _start_batch(self, trainer: Trainer, batch_idx: int) -> None:
        self.checkpointing.start_batch(trainer, batch_idx)
        self.stopping.start_batch(trainer, batch_idx)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_starting or self._put_back is not None:
            self._epoch_has_started()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "fit" and not (trainer.sanity_checking or self.checkpointing.watches_training):
            self.checkpointing.hold(trainer)

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.checkpointing.watches_training:
            self.checkpointing.hold(trainer)
        elif not is_epoch_complete(trainer):
            # A limit ends the run within an epoch, and the others may act as at its end, which a longer run has later.
            self.checkpointing.end(trainer, before_batch(trainer, trainer.fit_loop.batch_idx + 1))

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.checkpointing.on_train_end(trainer, pl_module)


def _schedules(trainer: Trainer) -> Iterator[LRScheduler]:
    """Yield the schedules that count steps; those on plateau look at values."""
    for config in trainer.lr_scheduler_configs:
        schedule = config.scheduler.schedule if isinstance(config.scheduler, PhaseSchedule) else config.scheduler
        if isinstance(schedule, LRScheduler) and not isinstance(schedule, ReduceLROnPlateau):
            yield schedule


def _others(trainer: RunTrainer, hooks: tuple[str, ...]) -> Iterator[object]:
    """Yield the callbacks and the module, those of exp left out, that give one of the hooks a body."""
    owners: list[tuple[object, type]] = [(callback, Callback) for callback in trainer.callbacks]
    for owner, base in [*owners, (trainer.lightning_module, LightningModule)]:
        if not is_own(owner) and any(overridden(owner, base, hook) for hook in hooks):
            yield owner


def _owners(trainer: RunTrainer) -> dict[str, object]:
    """Return by name the module, its layers and the callbacks; not those of exp and Lightning, which keep their own."""
    parts = {LAYER + name if name else MODULE: part for name, part in trainer.lightning_module.named_modules()}
    owners: dict[str, object] = {**parts, **{callback.state_key: callback for callback in trainer.callbacks}}
    return {
        key: one for key, one in owners.items() if type(one).__module__.partition(".")[0] not in ("exp", "lightning")
    }


def _attributes(trainer: RunTrainer) -> Values:
    """Return what `_owners` hold, what torch and Lightning keep with every module left out."""
    known = vars(LightningModule()).keys()
    return {
        key: {name: value for name, value in vars(owner).items() if name not in known}
        for key, owner in _owners(trainer).items()
    }


def _way_back(trainer: RunTrainer) -> Callable[[], None]:
    """Copy the state that a checkpoint holds; return what puts it back, any number of times."""
    held: list[tuple[Callable[[Any], object], State]] = []

    def hold(load: Callable[[Any], object], state: State) -> None:
        held.append((load, copy.deepcopy(state)))

    module = trainer.lightning_module
    hold(lambda state: nn.Module.load_state_dict(module, state, strict=False), module.state_dict())
    for optimizer in trainer.optimizers:
        if isinstance(optimizer, Optimizer):  # those of deepspeed hold theirs elsewhere
            hold(optimizer.load_state_dict, optimizer.state_dict())
    for config in trainer.lr_scheduler_configs:
        hold(config.scheduler.load_state_dict, dict(config.scheduler.state_dict()))
    for callback in trainer.callbacks:
        if not is_own(callback) and (state := callback.state_dict()):
            hold(callback.load_state_dict, state)

    def put_back() -> None:
        for load, state in held:
            load(copy.deepcopy(state))

    return put_back
