"""The adapter of Lightning's private training epoch loop: several batches in one call of it, and nothing done in vain.

Lightning's own loop                                here
    for each batch: done? validate? stop?               for each execution: done? validate? stop?
        a fetch through three iterators                     for each batch of it
        ask every callback for every hook                       fetch
        closure in closure in optimizer.step                    the hooks that act, by lists made once an execution
        results of self.log, of which there are none            forward, backward, clipping, optimizer, schedule

Counters, hooks and their order are Lightning's at every point where a callback can look. An execution ends before
whatever the outer loop has to do: a validation, an epoch's end, a stop. So it may be short, and never runs too far. And
it looks up everything anew: callbacks may have changed anything since (tens of us, against Lightning's half a ms).

Relied on, and tested (lightning 2.6.6): `trainer.fit_loop.epoch_loop` may be replaced before fit; `_TrainingEpochLoop`
calls `on_run_start` once an epoch and then `advance` and `on_advance_end` by turns until `done`; the names and the
order of its progress counters, `_batches_that_stepped` and `_should_check_val_fx`; `_DataFetcher.fetched`, `done`,
`length`, and below it a `CombinedLoader` over a `_MaxSizeCycle` of one iterator.
"""

from __future__ import annotations

import logging
import time
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.utilities.combined_loader import _MaxSizeCycle

from exp.engine.lean_reasons import why_one_by_one
from exp.engine.lean_step import LeanStep

log = logging.getLogger(__name__)

# Where nobody says how many: as many as fit in this. Lightning's share of an execution is half a millisecond.
EXECUTION_SECONDS = 0.1


class LeanEpochLoop(_TrainingEpochLoop):
    """Runs up to so many batches in one call of `advance`.

    steps_per_execution: batches; None takes as many as fit in a tenth of a second, which is one of a large network; 1
        is Lightning's own loop. Where something asks for that, the log says so.
    """

    def __init__(self, trainer: Trainer, *, steps_per_execution: int | None, **limits: Any) -> None:
        super().__init__(trainer, **limits)
        self.steps_per_execution = steps_per_execution
        self._one_by_one = False
        self._told: str | None = None

    @property
    def global_step(self) -> int:
        # Without Lightning's look for manual optimization, which exp has not: callbacks ask for it at every batch.
        return self.automatic_optimization.optim_progress.optimizer.step.total.completed

    def on_run_start(self, data_fetcher: _DataFetcher) -> None:
        super().on_run_start(data_fetcher)
        self._one_by_one = self.steps_per_execution == 1

    def _find_step(self) -> LeanStep | None:
        """As this execution has it; None where Lightning's own loop is wanted, which then ends the epoch."""
        if self._one_by_one or self.restarting:
            return None
        reason = why_one_by_one(self.trainer)
        if reason is None:
            return LeanStep(self)
        self._one_by_one = True
        if reason != self._told:
            log.log(
                logging.INFO if self.steps_per_execution is None else logging.WARNING,
                "runtime.steps_per_execution is 1, and each step goes through Lightning's own loop: %s",
                reason,
            )
            self._told = reason
        return None

    def advance(self, data_fetcher: _DataFetcher) -> None:
        lean = self._find_step()
        if lean is None:
            super().advance(data_fetcher)
            return
        self.val_loop.restarting = False
        count = self.steps_per_execution
        left = min(self._batches_to_validation(), float("inf") if count is None else count)
        ends = None if count is not None else time.monotonic() + EXECUTION_SECONDS
        while True:
            self._do_batch(lean, data_fetcher)
            left -= 1
            if left <= 0 or self._is_wanted_outside() or (ends is not None and time.monotonic() >= ends):
                return
            # What on_advance_end does where no validation is due.
            if lean.plateau_by_step:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            if not lean.accumulates:
                self._batches_that_stepped += 1

    def _do_batch(self, lean: LeanStep, data_fetcher: _DataFetcher) -> None:
        batch = _fetch(data_fetcher)
        trainer, progress = self.trainer, self.batch_progress
        module = lean.module
        batch_idx = progress.current.ready
        progress.is_last_batch = data_fetcher.done
        batch = lean.place(batch)
        progress.increment_ready()
        for hook in lean.on_batch_start:
            hook(trainer, module, batch, batch_idx)
        progress.increment_started()
        is_last = progress.is_last_batch or batch_idx + 1 == lean.batches
        lean.run(batch, batch_idx, is_last=is_last)
        progress.increment_processed()
        if lean.schedules and not lean.accumulates:
            self._step_schedules(lean, batch_idx)
        if is_last:
            self.update_lr_schedulers("epoch", update_plateau_schedulers=False)
        for hook in lean.on_batch_end:
            hook(trainer, module, lean.outputs, batch, batch_idx)
        progress.increment_completed()

    def _step_schedules(self, lean: LeanStep, batch_idx: int) -> None:
        for config in lean.schedules:
            if (batch_idx + 1) % config.frequency == 0:
                self.scheduler_progress.increment_ready()
                lean.module.lr_scheduler_step(config.scheduler, None)
                self.scheduler_progress.increment_completed()

    def _is_wanted_outside(self) -> bool:
        """Whether the outer loop has something to do, or might, behind the batch that was done last."""
        trainer, progress = self.trainer, self.batch_progress
        return (
            trainer.should_stop
            or progress.is_last_batch
            or progress.current.ready == trainer.num_training_batches
            or (self.max_steps != -1 and self.global_step >= self.max_steps)
            or trainer.received_sigterm
        )

    def _batches_to_validation(self) -> float:
        """How many batches may be done until `_should_check_val_fx` has to be asked; at an epoch's end it is anyway."""
        trainer = self.trainer
        if not self._should_check_val_epoch():
            return float("inf")
        if trainer._val_check_time_interval is not None:
            return 1
        every, limit = trainer.val_check_batch, trainer.limit_train_batches
        if every == float("inf") and isinstance(limit, int):
            every = limit
        if every is None or every == float("inf"):
            return float("inf")
        progress = self.batch_progress
        done = progress.total.ready if trainer.check_val_every_n_epoch is None else progress.current.ready
        return every - done % every


def run_several_at_once(trainer: Trainer, *, steps_per_execution: int | None) -> None:
    """Puts LeanEpochLoop in the place of the Trainer's own loop; before fit."""
    own = trainer.fit_loop.epoch_loop
    trainer.fit_loop.epoch_loop = LeanEpochLoop(
        trainer, steps_per_execution=steps_per_execution, min_steps=own.min_steps, max_steps=own.max_steps
    )


def _fetch(fetcher: _DataFetcher) -> Any:
    """The next batch. Of a stream without a length Lightning reads one ahead, to know the last one: by its own."""
    combined = fetcher.iterator
    cycle = None if combined is None else combined._iterator
    if fetcher.length is None or type(cycle) is not _MaxSizeCycle or len(cycle.iterators) != 1:
        return next(fetcher)[0]
    try:
        batch = next(cycle.iterators[0])
    except StopIteration:
        cycle._consumed[0] = True
        fetcher.done = True
        raise
    cycle._idx += 1
    fetcher.fetched += 1
    fetcher.done = fetcher.fetched >= fetcher.length
    return batch
