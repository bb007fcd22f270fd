"""The callback that runs the hooks and feeds the loggers.

for each training batch                                      what Recording does
    on_train_batch_start                                     hooks that are due: at their modules, around_forward
    forward, objective, backward                             after_forward
    on_before_optimizer_step  (gradients true, not clipped)  after_backward of hooks that are due; learning rates
    clipping, optimizer step, schedule                       after_clipping
    on_train_batch_end                                       after_step of hooks that are due; buffers the step
every trainer.log_every_n_steps steps, before a validation,  the buffer to the host and to the loggers; a loss that
a checkpoint and the end                                     is not a number ends the run
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Mapping
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.data.randomness import reseed_epoch
from exp.engine.buffer import Recorded, StepBuffer, on_host_values
from exp.engine.checkpoint import State
from exp.engine.datamodule import RunTrainer
from exp.engine.module import TrainingModule
from exp.engine.non_finite import refuse_lost
from exp.engine.observer import StepResult
from exp.engine.own_module import OwnModule
from exp.engine.progress import is_epoch_complete
from exp.engine.step_hooks import Found, StepHooks
from exp.errors import Interrupted, RunError
from exp.hooks.hook import Hook
from exp.hooks.panels import Panel
from exp.loggers.heat_maps import HeatMaps
from exp.loggers.run_logger import RunLogger
from exp.optim.phase import rate_names
from exp.output import tell_not_written
from exp.precision.plugin import RunPrecision
from exp.shared_types import EPOCH_LOSS, Batch, Stage

log = logging.getLogger(__name__)

STATE = "exp_recording"
# The last point of each tag: for the report of a run that goes on, which may not give all of them again.
LATEST = "exp_latest"


class StepRecording(Callback, ABC):
    """Base class of the callbacks that run hooks and write to loggers.

    Args:
        hooks: Hooks by name.
        directory: Run directory, in which hooks write files.

    Attributes:
        latest: Last value of each tag, also of earlier processes of the run.
    """

    _trainer: RunTrainer
    _module: TrainingModule | OwnModule

    def __init__(self, *, hooks: Mapping[str, Hook] | None = None, directory: Path | None = None) -> None:
        super().__init__()
        self.hooks = dict(hooks or {})
        self.latest: dict[str, float] = {}
        self._step_hooks = StepHooks(self.hooks, directory=directory)
        self._buffer = StepBuffer()
        self._index = self._first = 0
        # What the hooks gave for the step so far.
        self._values: Found | None = None
        self._size = 0
        # The last learning rates of each optimizer, by phase.
        self._rates: dict[str | None, list[float]] = {}
        # The index at which each stage was written last.
        self._stages: dict[Stage, int] = {}
        # The optimizer step of the weights that each stage's last values are of.
        self.stage_steps: dict[Stage, int] = {}
        self._undrawn: set[str] = set()
        self._heat_maps = HeatMaps(directory)

    @abstractmethod
    def flush(self, trainer: Trainer) -> None:
        """Write the steps that wait. Every rank must call it at the same step.

        Raises:
            NonFiniteError: A loss is not finite.
        """

    @abstractmethod
    def _finish(self, stage: Stage, trainer: Trainer) -> None:
        """Write the values of an evaluation."""

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reseed(trainer.current_epoch)

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._step_hooks.attach(trainer, self._module)
        self.flush(trainer)
        self._step_hooks.pause()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish("val", trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.attach(trainer, self._module)

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish("test", trainer)

    def on_predict_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.attach(trainer, self._module)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self.flush(trainer)
        self._save_written()
        self._step_hooks.pause()
        checkpoint[LATEST] = dict(self.latest)

    def _reseed(self, epoch: int) -> None:
        """Set the generators for the hooks of an epoch's start; -1 is the start of training."""
        reseed_epoch(seed=self._module.seed, rank=self._module.rank, epoch=epoch)

    def shown(self) -> dict[str, float]:
        """What the console shows of the last points: a stage's loss and metrics, and not the terms of a loss."""
        return {tag: value for tag, value in self.latest.items() if is_shown(tag)}

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        # What the hooks gave for a test, or a validation alone.
        self._end_writing(trainer)
        self._step_hooks.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._step_hooks.failed(exception)
        self._step_hooks.detach()
        try:
            self._end_writing(trainer)  # what led to it is what a reader looks for
        except Exception:
            log.exception("the heat maps are not drawn to their end; the run ends by what came before")

    def _is_flush(self, index: int) -> bool:
        return is_written(index, first=self._first, every=self._trainer.log_every_n_steps or 50)

    def _add_rates(self, found: Found, optimizer: Optimizer, *, phase: str | None) -> None:
        """Add the learning rates of an optimizer that changed, and all of them if the step is written."""
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._rates.get(phase) or self._is_flush(self._index + 1):
            self._rates[phase] = rates
            names = self._rate_names(optimizer, phase)
            found.update({f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)})

    def _rate_names(self, optimizer: Optimizer, phase: str | None) -> list[str]:
        return rate_names(optimizer, phase=phase)

    def _write(self, values: dict[str, float], index: int, panels: Mapping[str, Panel] | None = None) -> None:
        """Write what optimizer step `index` gave, by tag: Lightning's own loggers take numbers, ours panels, too."""
        self.latest.update(values)
        if self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(values, index)
            self._show(self._heat_maps.shown(panels, index) if panels else {}, index)

    def _show(self, panels: Mapping[str, Panel], index: int) -> None:
        """Draw panels, and give them to exp's own loggers; Lightning's take numbers alone."""
        shown = self._drawn(panels) if panels else {}
        for logger in self._trainer.loggers if shown else ():
            if isinstance(logger, RunLogger):
                logger.log_panels(shown, index)

    def _begin_writing(self, index: int) -> None:
        """Void what an earlier process wrote from this step on, the first of the training."""
        for logger in self._trainer.loggers:
            if isinstance(logger, RunLogger):
                logger.purge(index)
        if self._trainer.is_global_zero:
            self._heat_maps.begin(index)

    def _save_written(self) -> None:
        """Write what is held back: a process that goes on from a checkpoint begins behind it."""
        for logger in self._trainer.loggers:
            logger.save()
        if self._trainer.is_global_zero:
            self._heat_maps.save()

    def _end_writing(self, trainer: Trainer) -> None:
        """Draw the heat maps that have grown since they were drawn last."""
        if trainer.is_global_zero:
            for index, pictures in self._heat_maps.end().items():
                self._show(pictures, index)

    def _drawn(self, panels: Mapping[str, Panel]) -> dict[str, Panel]:
        """Draw panels; one that cannot be drawn is told once, and is no reason to end the run."""
        shown = {}
        for tag, panel in panels.items():
            if tag in self._undrawn:
                continue
            try:
                shown[tag] = panel.drawn()
            except Interrupted:
                raise  # a signal came while it was drawn
            except Exception as error:
                self._undrawn.add(tag)
                tell_not_written(f"the picture {tag}", error)
        return shown

    def _write_stage(self, stage: Stage, values: dict[str, float], panels: Mapping[str, Panel] | None = None) -> None:
        """Write what a stage gave, once an optimizer step: with the same weights a second validation gives the same."""
        if (values or panels) and self._stages.get(stage) != self._index:
            self._stages[stage] = self.stage_steps[stage] = self._index
            self._write(values, self._index, panels)


def is_written(index: int, *, first: int, every: int) -> bool:
    """Return whether a step is written: every `every` steps, and 1, 2, 4, 8 ... steps after step `first`."""
    done = index - first
    return index % every == 0 or (done < every and done & (done - 1) == 0)


def require_loss(values: Mapping[str, float], stage: Stage) -> None:
    """Raise RunError if an evaluation gave no loss."""
    if f"loss/{stage}" not in values:
        raise RunError(
            f"loss/{stage} has no value: no target of the {stage} samples counts; expected one at least that is "
            "not ignored, of a class with a weight above 0. Look at ignore_index and class_weights"
        )


def is_shown(tag: str) -> bool:
    """Return whether a tag is a stage's loss or metric, and not a term of the loss."""
    return tag.count("/") == 1 and tag.endswith(("/train", "/val", "/test"))


class Recording(StepRecording):
    """A callback that runs hooks, collects what they and the steps give, and writes it to every logger of the Trainer.

    It must stand before callbacks that look at `trainer.callback_metrics`.

    hooks: by name. directory: of the run, where hooks write files.
    skips: whether a loss that is not finite is left out, as its step is; else it ends the run.
    metrics: an attribute, what callbacks compare: values of epochs.
    """

    _module: TrainingModule

    def __init__(
        self, *, hooks: Mapping[str, Hook] | None = None, directory: Path | None = None, skips: bool = False
    ) -> None:
        super().__init__(hooks=hooks, directory=directory)
        self.metrics: dict[str, float] = {}
        self._epoch_sum, self._epoch_size, self._epoch_has_loss = 0.0, 0, False
        self._skips = skips
        self._start_window()

    def _start_window(self) -> None:
        """Start a window: the batches of one optimizer step."""
        self._values, self._size, self._rates = None, 0, {}
        # The loss and terms that the gradients of the update come from; of phases None.
        self._result: StepResult | None = None
        # What each phase behind the first gave.
        self._later: list[Found] = []
        self._losses: list[Tensor] = []
        self._micro_batches = 0

    # --- the run ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        assert isinstance(pl_module, TrainingModule)
        self._module, self._trainer = pl_module, cast(RunTrainer, trainer)
        pl_module.values_of("train").leaves_out_lost = self._skips

    def leave_out_lost(self) -> None:
        """Go on behind a loss that is not finite: whoever asks for this, behind `setup`, ends the training itself."""
        self._skips = self._module.values_of("train").leaves_out_lost = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.attach(trainer, self._module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._index = self._first = trainer.global_step
        self._start_window()
        trainer.callback_metrics.update(_tensors(self.metrics))
        self._begin_writing(self._index + 1)
        self._reseed(-1)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._end_writing(trainer)
        # Before an average takes the place of the weights, and whether or not they are saved.
        self._module.require_finite({"state_dict": pl_module.state_dict()})
        self._step_hooks.ended()

    # --- the step ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        self._size += batch.global_size
        vars(self._module)["is_counting"] = True
        self._step_hooks.start_batch(batch, batch_idx, index=self._index + 1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Of phases this is Lightning's empty one; theirs say so themselves.
        if not self._module.phases:
            self._step_hooks.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        turn = self._step_hooks.turn
        if turn.phase is None and self._values is not None:
            return  # an optimizer that evaluates its closure several times in a step
        if turn.phase is None:
            self._result = self._module.last
            vars(self._module)["is_counting"] = False
        self._step_hooks.before_update(optimizer)
        if not turn.is_recorded:
            return
        found = self._step_hooks.before_step()
        if self._values is None:
            # The same mapping: what hooks give after clipping comes into it, too.
            self._values = found
        else:
            self._later.append(found)
        self._add_rates(found, optimizer, phase=turn.phase)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        self._step_hooks.end_batch()
        module, values = self._module, self._values
        loss, parts = self._result or module.last
        if loss is None or (module.phases and values is None):
            return  # the phases run at the last micro-batch, and give the means over all of them
        several = len(parts) > 1 or (module.phases and len(module.objective.terms) > 1)
        losses = [loss, *parts.values()] if several else [loss]
        if values is None or self._losses:
            losses = [a + b for a, b in zip(self._losses, losses, strict=True)] if self._losses else losses
            self._micro_batches += 1
            if values is None:
                self._losses = losses
                return
            losses = [loss / self._micro_batches for loss in losses]
        index = self._index + 1
        for found in self._later:
            values.update(found)
        values.update(self._step_hooks.end_step())
        self._buffer.add(Recorded(index, self._size, losses, values, tuple(parts) if module.phases else None))
        self._index = index
        self._values, self._result, self._size = None, None, 0
        if self._losses or self._later:
            self._losses, self._later, self._micro_batches = [], [], 0
        if self._is_flush(index):
            self.flush(trainer)

    # --- what leaves the device ---

    def flush(self, trainer: Trainer) -> None:
        if not len(self._buffer):
            return
        terms = self._module.values_of("train").terms
        precision = trainer.precision_plugin if isinstance(trainer.precision_plugin, RunPrecision) else None
        if precision is not None and precision.skips:
            # As they are behind the last step that waits, whatever the reason to write it.
            last = self._buffer.last.values
            last["precision/skipped_steps"] = precision.skipped_steps
            if precision.is_scaled:
                last["precision/loss_scale"] = precision.loss_scale
        for step, losses in self._buffer.take(trainer.strategy):
            loss = losses[0]
            if not self._skips:
                refuse_lost(
                    loss, step.index, is_scaled=precision is not None and precision.is_scaled, saved=self._module.saved
                )
            # The mean is over the steps that were taken; of none it is no number.
            is_counted = not self._skips or math.isfinite(loss)
            self._epoch_sum += loss * step.size if is_counted else 0.0
            self._epoch_size += step.size if is_counted else 0
            self._epoch_has_loss = True
            values = step.values
            values["loss/train"] = loss
            named = zip(terms if step.terms is None else step.terms, losses[1:], strict=False)
            values.update({f"loss/train/{term}": part for term, part in named})
            self._write(values, step.index, step.panels)
            if precision is not None:
                precision.written(values, step=step.index)

    # --- epochs ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._step_hooks.pause()
        values = self._module.values_of("train")
        # A limit may end the run within an epoch, whose sums a longer run goes on with.
        sums = self._epoch_sum, self._epoch_size
        state = None if is_epoch_complete(trainer) else self._module.epoch_state()
        # Weighed terms are summed by what they divide by; without them the steps say what the epoch's mean is.
        weighed = self._module.objective.weighed
        found = values.finish(trainer.strategy) if values.measures or weighed else {}
        metrics = {tag: value for tag, value in found.items() if not tag.startswith("loss/")}
        if weighed and "loss/train" in found:
            metrics[EPOCH_LOSS] = found["loss/train"]
        elif self._epoch_has_loss and not weighed:
            metrics[EPOCH_LOSS] = self._epoch_sum / self._epoch_size if self._epoch_size else math.nan
        self._epoch_sum, self._epoch_size, self._epoch_has_loss = 0.0, 0, False
        if state is not None:
            self._epoch_sum, self._epoch_size = sums
            self._module.restore_epoch(state)
        self._write_stage("train", metrics)
        if EPOCH_LOSS in metrics:
            metrics = {**metrics, "loss/train": metrics[EPOCH_LOSS]}
        self._publish(trainer, metrics)

    def _finish(self, stage: Stage, trainer: Trainer) -> None:
        values = self._module.values_of(stage).finish(trainer.strategy)
        if trainer.sanity_checking:
            return
        require_loss(values, stage)
        found, panels = on_host_values(self._step_hooks.finish(stage, trainer))
        values |= found
        self._write_stage(stage, values, panels)
        self._publish(trainer, values)

    def _publish(self, trainer: Trainer, values: Mapping[str, float]) -> None:
        """Give values to callbacks and schedules, past self.log, which would cost half a millisecond a value.

        Relied on, and tested: `trainer.callback_metrics` is the dict that Lightning keeps (seen in 2.6.6).
        """
        self.metrics.update(values)
        trainer.callback_metrics.update(_tensors(values))

    # --- checkpoints ---

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        super().on_save_checkpoint(trainer, pl_module, checkpoint)
        checkpoint[STATE] = {
            "metrics": dict(self.metrics),
            "epoch_sum": self._epoch_sum,
            "epoch_size": self._epoch_size,
        }

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self._index = checkpoint["global_step"]
        if trainer.state.fn == "fit" and STATE in checkpoint:
            state = checkpoint[STATE]
            self.metrics.update(state["metrics"])
            self._epoch_sum, self._epoch_size = state["epoch_sum"], state["epoch_size"]
            self._epoch_has_loss = bool(self._epoch_size)
        if trainer.state.fn == "fit" and LATEST in checkpoint:
            self.latest.update(checkpoint[LATEST])


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    """Make of values what Lightning's own callbacks compare; in the precision of a report."""
    return {tag: torch.tensor(value, dtype=torch.float64) for tag, value in values.items()}
