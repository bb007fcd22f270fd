"""Callback that runs the hooks and passes values to the loggers.

in each training batch                                       Recording
    on_train_batch_start                                     due hooks: at their modules, around_forward
    forward, objective, backward                             after_forward
    on_before_optimizer_step  (unscaled, not clipped)        after_backward of due hooks; learning rates
    clipping, optimizer step, schedule                       after_clipping
    on_train_batch_end                                       after_step of due hooks; adds the step to a buffer
every trainer.log_every_n_steps steps, before a validation,  copies the buffer to the host and writes it to the loggers;
a checkpoint and the end                                     a loss that is not a number ends the run
"""

from __future__ import annotations

import logging
import math
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import cast

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.data.randomness import reseed_epoch
from exp.engine.buffer import Recorded, on_host_values, take_to_host
from exp.engine.checkpoint import State
from exp.engine.datamodule import RunTrainer
from exp.engine.module import TrainingModule
from exp.engine.non_finite import refuse_lost
from exp.engine.observer import StepResult
from exp.engine.own_module import OwnModule
from exp.engine.progress import is_epoch_complete
from exp.engine.step_hooks import StepHooks, StepRecord
from exp.errors import Interrupted, RunError
from exp.hooks.hook import Hook
from exp.hooks.panels import Panel
from exp.loggers.heat_maps import HeatMaps
from exp.loggers.run_logger import RunLogger
from exp.optim.phase import name_rates
from exp.output import warn_not_written
from exp.precision.plugin import RunPrecision
from exp.shared_types import EPOCH_LOSS, Batch, Stage

log = logging.getLogger(__name__)

STATE = "exp_recording"
# Checkpoint entry with the last value of each tag. The report of a resumed run needs it if a tag is not logged again.
LATEST = "exp_latest"


class StepRecording(Callback, ABC):
    """Base class of the callbacks that run hooks and write to loggers.

    Args:
        hooks: Hooks by name. None: no hooks. Default: None.
        directory: Run directory, in which hooks write files. Default: None.
        skips: Whether the run skips steps with a non-finite loss. If false, such a loss ends the run. Default: False.

    Attributes:
        latest: Last value of each tag, including values of earlier processes of the run.
        stage_steps: For each stage, the optimizer step of the weights that were evaluated last.
        first_point: Number of the first step on the x axis of the loggers.
    """

    first_point = 1
    _trainer: RunTrainer
    _module: TrainingModule | OwnModule

    def __init__(
        self, *, hooks: Mapping[str, Hook] | None = None, directory: Path | None = None, skips: bool = False
    ) -> None:
        super().__init__()
        self.hooks = dict(hooks or {})
        self.latest: dict[str, float] = {}
        self.stage_steps: dict[Stage, int] = {}
        self._skips = skips
        self._step_hooks = StepHooks(self.hooks, directory=directory)
        self._buffer: list[Recorded] = []
        self._index = self._first = 0
        # Last learning rates of each optimizer, by phase.
        self._rates: dict[str | None, list[float]] = {}
        # For each stage, the optimizer step at which its values were last written.
        self._stages: dict[Stage, int] = {}
        self._undrawn: set[str] = set()
        self._heat_maps = HeatMaps(directory)

    @abstractmethod
    def _take(self, step: Recorded, losses: Sequence[float]) -> None:
        """Add the losses of a step to the values of the step, before these are logged."""

    @abstractmethod
    def _finish(self, stage: Stage, trainer: Trainer) -> None:
        """Write the values of an evaluation to the loggers."""

    # --- the run ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._trainer = cast(RunTrainer, trainer)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first, self._rates = self._index, {}
        for logger in self._run_loggers():
            logger.purge(self._index + self.first_point)
        if trainer.is_global_zero:
            self._heat_maps.begin(self._index + self.first_point)
        self._reseed(-1)

    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._reseed(trainer.current_epoch)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._end_writing(trainer)
        # Checked at this point, because later a callback may replace the weights by averages. The check of checkpoints
        # is not enough, because a run may save none.
        self._module.require_finite({"state_dict": pl_module.state_dict()})
        self._step_hooks.ended()

    def on_validation_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == "validate":
            self._step_hooks.attach(trainer, self._module)
        self.flush(trainer)
        self._step_hooks.pause()

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish("val", trainer)

    def on_test_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.attach(trainer, self._module)

    on_predict_start = on_test_start

    def on_test_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._finish("test", trainer)

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        self.flush(trainer)
        # All values up to this point must be written, because a run that resumes from the checkpoint does not compute
        # them again.
        for logger in self._trainer.loggers:
            logger.save()
        if trainer.is_global_zero:
            self._heat_maps.save()
        self._step_hooks.pause()
        checkpoint[LATEST] = dict(self.latest)

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn == "fit" and LATEST in checkpoint:
            self.latest.update(checkpoint[LATEST])

    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end_writing(trainer)  # ends the writing of a test or of a separate validation
        self._step_hooks.detach()

    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._step_hooks.report_failure(exception)
        self._step_hooks.detach()
        try:
            self._end_writing(trainer)
        except Exception:
            log.exception("the heat maps cannot be drawn. The run ends with its earlier error")

    def _reseed(self, epoch: int) -> None:
        """Seed the random generators at the start of an epoch, for hooks. Epoch -1 stands for the start of training."""
        reseed_epoch(seed=self._module.seed, rank=self._module.rank, epoch=epoch)

    # --- the step ---

    def _record_update(self, optimizer: Optimizer) -> None:
        """Run after_backward of the due hooks on unscaled gradients, and record the optimizer's learning rates.

        Learning rates are recorded if they changed, or if the values of this step are written to the loggers.
        """
        found, phase = self._step_hooks.before_step(), self._step_hooks.turn.phase
        rates = [float(group["lr"]) for group in optimizer.param_groups]
        if rates != self._rates.get(phase) or self._is_flush(self._index + 1):
            self._rates[phase] = rates
            found.update(name_rates(optimizer, rates, phase=phase))

    def _add(self, record: StepRecord, losses: Sequence[Tensor], terms: Sequence[str] | None = None) -> None:
        """Add a completed step to the buffer, and write the buffer to the loggers if it is due."""
        self._index += 1
        self._buffer.append(Recorded(self._index, record.size, losses, record.found, terms))
        if self._is_flush(self._index):
            self.flush(self._trainer)

    def _is_flush(self, index: int) -> bool:
        return is_written(index, first=self._first, every=self._trainer.log_every_n_steps or 50)

    # --- writing ---

    def flush(self, trainer: Trainer) -> None:
        """Write the buffered steps to the loggers. Every rank must call this method at the same step.

        Raises:
            NonFiniteError: A loss is not finite.
        """
        if not self._buffer:
            return
        precision = trainer.precision_plugin if isinstance(trainer.precision_plugin, RunPrecision) else None
        is_scaled = precision is not None and precision.is_scaled
        if precision is not None and precision.skips:
            # The following values belong to the last buffered step.
            last = self._buffer[-1].values
            last["precision/skipped_steps"] = precision.skipped_steps
            if is_scaled:
                last["precision/loss_scale"] = precision.loss_scale
        steps, self._buffer = self._buffer, []
        for step, losses in take_to_host(steps, trainer.strategy):
            if not self._skips:
                refuse_lost(losses[0], step.index, is_scaled=is_scaled)
            self._take(step, losses)
            self._write(step.values, step.index - 1 + self.first_point, step.panels)
            if precision is not None:
                precision.check_scale(step.values, step=step.index)

    def progress_values(self) -> dict[str, float]:
        """Return the latest losses and metrics of stages by tag, for the console.

        Single terms of a loss are left out.
        """
        return {tag: value for tag, value in self.latest.items() if is_shown(tag)}

    def _write(self, values: dict[str, float], index: int, panels: Mapping[str, Panel] | None = None) -> None:
        """Write values to all loggers, and panels to exp's loggers, because Lightning's loggers accept only numbers."""
        self.latest.update(values)
        if self._trainer.is_global_zero:
            for logger in self._trainer.loggers:
                logger.log_metrics(values, index)
            self._show(self._heat_maps.replace_columns(panels, index) if panels else {}, index)

    def _show(self, panels: Mapping[str, Panel], index: int) -> None:
        """Draw panels as pictures and log them. If a panel cannot be drawn, warn once and continue the run."""
        shown = {}
        for tag, panel in panels.items():
            try:
                if tag not in self._undrawn:
                    shown[tag] = panel.draw()
            except Interrupted:
                raise  # a signal arrived while the panel was drawn
            except Exception as error:
                self._undrawn.add(tag)
                warn_not_written(f"the picture {tag}", error)
        for logger in self._run_loggers() if shown else ():
            logger.log_panels(shown, index)

    def _run_loggers(self) -> Iterator[RunLogger]:
        return (logger for logger in self._trainer.loggers if isinstance(logger, RunLogger))

    def _end_writing(self, trainer: Trainer) -> None:
        """Draw and log the heat maps that have new columns."""
        if trainer.is_global_zero:
            for index, pictures in self._heat_maps.end().items():
                self._show(pictures, index)

    def _write_stage(self, stage: Stage, values: dict[str, float], panels: Mapping[str, Panel] | None = None) -> None:
        """Write the values of a stage, at most once per optimizer step."""
        if (values or panels) and self._stages.get(stage) != self._index:
            self._stages[stage] = self.stage_steps[stage] = self._index
            self._write(values, self._index, panels)


def is_written(index: int, *, first: int, every: int) -> bool:
    """Return whether the values of a step are written to the loggers.

    The values are written if the number of the step is a multiple of `every`. During the first `every` steps of a
    process, they are also written 1, 2, 4, 8, ... steps after step `first`.

    Args:
        index: Number of the step, counted from 1.
        first: Number of the last step before this process. 0 if the run was not resumed.
        every: Value of trainer.log_every_n_steps.
    """
    done = index - first
    return index % every == 0 or (done < every and done & (done - 1) == 0)


def require_loss(values: Mapping[str, float], stage: Stage) -> None:
    """Raise RunError if an evaluation computed no loss."""
    if f"loss/{stage}" not in values:
        raise RunError(
            f"loss/{stage} has no value, because the objective ignores all targets of the {stage} samples; expected at "
            "least one target that ignore_index and class_weights of the objective do not exclude"
        )


def is_shown(tag: str) -> bool:
    """Return whether a tag is the loss or a metric of a stage, such as `loss/val`. Terms of the loss are excluded."""
    return tag.count("/") == 1 and tag.endswith(("/train", "/val", "/test"))


class Recording(StepRecording):
    """Callback that runs hooks, and writes the values of hooks and steps to all loggers.

    The callback must precede callbacks that read `trainer.callback_metrics` in the Trainer's list.

    Args:
        hooks: Hooks by name. None: no hooks. Default: None.
        directory: Run directory, in which hooks write files. Default: None.
        skips: Whether steps with a non-finite loss are skipped. Default: False.

    Attributes:
        metrics: Latest values of epochs by tag, for callbacks that compare values.
    """

    _module: TrainingModule

    def __init__(
        self, *, hooks: Mapping[str, Hook] | None = None, directory: Path | None = None, skips: bool = False
    ) -> None:
        super().__init__(hooks=hooks, directory=directory, skips=skips)
        self.metrics: dict[str, float] = {}
        self._epoch_sum, self._epoch_size, self._epoch_has_loss = 0.0, 0, False
        self._start_window()

    def _start_window(self) -> None:
        """Reset the losses of the current optimizer step."""
        # Result of the forward that computed the gradients of the optimizer step; None with phases.
        self._result: StepResult | None = None
        self._losses: list[Tensor] = []
        self._micro_batches = 0

    # --- the run ---

    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        super().setup(trainer, pl_module, stage)
        assert isinstance(pl_module, TrainingModule)
        self._module = pl_module
        pl_module.values_of("train").leaves_out_lost = self._skips

    def leave_out_lost(self) -> None:
        """Leave non-finite losses out of the epoch's mean instead of ending the run. Call this method after `setup`."""
        self._skips = self._module.values_of("train").leaves_out_lost = True

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._step_hooks.attach(trainer, self._module)

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._index = trainer.global_step
        self._start_window()
        trainer.callback_metrics.update(_tensors(self.metrics))
        super().on_train_start(trainer, pl_module)

    # --- the step ---

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        vars(self._module)["is_counting"] = True
        self._step_hooks.start_batch(batch, batch_idx, index=self._index + 1)

    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # With phases, Lightning calls this hook after a backward that does nothing. The phases report their backward
        # directly.
        if not self._module.phases:
            self._step_hooks.after_backward()

    def on_before_optimizer_step(self, trainer: Trainer, pl_module: LightningModule, optimizer: Optimizer) -> None:
        hooks, turn = self._step_hooks, self._step_hooks.turn
        if turn.phase is None:
            if self._result is not None:
                return  # the optimizer calls its closure several times in a step
            self._result = self._module.last
            vars(self._module)["is_counting"] = False
        hooks.before_update(optimizer)
        if turn.is_recorded:
            self._record_update(optimizer)

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: Batch, batch_idx: int
    ) -> None:
        record, module = self._step_hooks.end_batch(), self._module
        if module.phases and record is None:
            return  # phases run at the last micro-batch, and return means over all of them
        loss, parts = self._result or module.last
        assert loss is not None
        several = len(parts) > 1 or (module.phases and len(module.objective.terms) > 1)
        losses = [loss, *parts.values()] if several else [loss]
        if record is None or self._losses:
            losses = [a + b for a, b in zip(self._losses, losses, strict=True)] if self._losses else losses
            self._micro_batches += 1
            if record is None:
                self._losses = losses
                return
            losses = [loss / self._micro_batches for loss in losses]
        self._add(record, losses, tuple(parts) if module.phases else None)
        self._start_window()

    def _take(self, step: Recorded, losses: Sequence[float]) -> None:
        loss = losses[0]
        # The loss of the epoch is the mean over the steps that were not skipped. It is nan if all steps were skipped.
        if not self._skips or math.isfinite(loss):
            self._epoch_sum += loss * step.size
            self._epoch_size += step.size
        self._epoch_has_loss = True
        step.values["loss/train"] = loss
        terms = self._module.values_of("train").terms if step.terms is None else step.terms
        step.values.update({f"loss/train/{term}": part for term, part in zip(terms, losses[1:], strict=False)})

    # --- epochs ---

    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.flush(trainer)
        self._step_hooks.pause()
        values = self._module.values_of("train")
        # If a limit ends the run within an epoch, a run that resumes with a larger limit continues with these sums.
        sums = self._epoch_sum, self._epoch_size
        # If the objective has weighted terms, the mean of the epoch is computed from sums and divisors. Otherwise, it
        # is computed from the losses of the steps.
        weighed = self._module.objective.weighed
        state = None if is_epoch_complete(trainer) else values.state(trainer.strategy, with_losses=bool(weighed))
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
        """Make values available to callbacks and schedules, without self.log, which takes half a millisecond per value.

        Tested with Lightning 2.6.6: `trainer.callback_metrics` is the dict that Lightning stores, not a copy.
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
        super().on_load_checkpoint(trainer, pl_module, checkpoint)
        self._index = checkpoint["global_step"]
        if trainer.state.fn == "fit" and STATE in checkpoint:
            state = checkpoint[STATE]
            self.metrics.update(state["metrics"])
            self._epoch_sum, self._epoch_size = state["epoch_sum"], state["epoch_size"]
            self._epoch_has_loss = bool(self._epoch_size)


def _tensors(values: Mapping[str, float]) -> dict[str, Tensor]:
    """Return values as float64 tensors, because Lightning's callbacks compare tensors."""
    return {tag: torch.tensor(value, dtype=torch.float64) for tag, value in values.items()}
