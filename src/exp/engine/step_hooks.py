"""Observer that calls the hooks of a run during steps and evaluations.

Hooks return values at four points of a step. StepRecord collects the values until the step ends:

forward     after_forward: after each micro-batch; the values of the last micro-batch are kept
backward    after_backward: the gradients are unscaled and not clipped
clipping    after_clipping
step        after_step: the parameters are updated
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.engine.datamodule import RunTrainer, StagedData
from exp.engine.forward import Values as ForwardValues
from exp.engine.module import TrainingModule
from exp.engine.observer import UNOBSERVED, WHOLE_STEP, StepObserver, Turn
from exp.engine.own_module import OwnModule
from exp.engine.runtime import run_uncompiled
from exp.errors import RunError
from exp.hooks.hook import Boundary, Hook, Values
from exp.hooks.panels import Panel
from exp.hooks.step import Step, Update, Window
from exp.optim.phase import each_optimizer
from exp.precision.plugin import RunPrecision
from exp.shared_types import STAGES, Batch, Stage
from exp.strategies.model_parallel import ModelParallel, gather_data, gather_ranks

log = logging.getLogger(__name__)

# First parts of the tags that the engine itself writes.
ENGINE, ENGINE_TAGS = "the engine", ("loss", "optimizer", "precision")
Found = dict[str, Tensor | float | Panel]
# Maps each tag to a text that names the hook and the method that log the tag, or the engine.
Owners = dict[str, str]


class Due:
    """Hooks that are due in a step, in one list for each method.

    Args:
        hooks: Due hooks. The value of each hook contains the names of methods that do nothing in this step.
    """

    def __init__(self, hooks: Mapping[Hook, frozenset[str]]) -> None:
        self.passed = _busy(hooks, "passed")
        self.around_forward = _busy(hooks, "around_forward")
        self.after_forward = _busy(hooks, "after_forward")
        self.before_update = _busy(hooks, "before_update")
        self.after_backward = _busy(hooks, "after_backward")
        self.after_clipping = _busy(hooks, "after_clipping")
        self.after_step = _busy(hooks, "after_step")
        self.at_modules = [hook for hook in hooks if hook.is_at_modules and not hook.transforms]
        self.keeps_batches = bool(self.before_update) or any(hook.keeps_batches for hook in hooks)
        self.watches_forward = bool(self.around_forward or self.at_modules)


@dataclass(slots=True)
class StepRecord:
    """Record of the current optimizer step.

    Attributes:
        index: Number of the optimizer step, counted from 1.
        due: Hooks that are due.
        size: Number of samples in the global batches of the step so far.
        batch_idx: Number of the last micro-batch in the epoch.
        data: Data of the last micro-batch.
        weight: Weight of the last micro-batch's loss.
        batches: Micro-batches with their numbers in the epoch; empty if no due hook needs the micro-batches.
        losses: Losses of the micro-batches; empty if no due hook needs the losses.
        found: Values of hooks by tag.
        is_stepped: True if an optimizer is stepping or has stepped.
        is_clipping: True if the hooks with `after_clipping` still have to be called in this step.
        seen: Step object that hooks receive; None until a hook needs it.
    """

    index: int
    due: Due
    size: int = 0
    batch_idx: int = 0
    data: object = None
    weight: float = 1.0
    batches: list[tuple[Batch, int]] = field(default_factory=list)
    losses: list[Tensor] = field(default_factory=list)
    found: Found = field(default_factory=dict)
    is_stepped: bool = False
    is_clipping: bool = False
    seen: Step | None = None


class StepHooks(StepObserver):
    """Observer that calls the hooks of a run.

    The callback Recording reports the start and the end of batches and steps. The module reports the events within a
    step.

    Args:
        hooks: Hooks by name.
        directory: Run directory, in which hooks write files. Default: None.

    Attributes:
        turn: Current pass over the micro-batches.
        record: Record of the current step; None between two steps.
    """

    _trainer: RunTrainer
    _module: TrainingModule | OwnModule

    def __init__(self, hooks: Mapping[str, Hook], *, directory: Path | None = None) -> None:
        self.hooks = dict(hooks)
        self.directory = directory
        self.turn = WHOLE_STEP
        self.record: StepRecord | None = None
        self._all = list(self.hooks.values())
        self._pausing = _hooks_with(self._all, "pause")
        self._evaluating = _hooks_with(self._all, "evaluated")
        self._finishing = _hooks_with(self._all, "after_evaluation")
        # Cache of Due objects, one for each combination of due hooks.
        self._kinds: dict[tuple[frozenset[str] | None, ...], Due] = {}
        self._samples = 0
        self._total_steps: int | None = None
        self._same: dict[str, Any] = {}
        self._owners: Owners = {}

    def __deepcopy__(self, memo: object) -> StepObserver:
        """Return an observer that does nothing, because callbacks that average weights copy the module."""
        return UNOBSERVED

    # --- the run ---

    def attach(self, trainer: Trainer, module: TrainingModule | OwnModule) -> None:
        """Attach the hooks to the network. Outside of fit, attach only hooks that observe evaluations."""
        self._trainer, self._module = cast(RunTrainer, trainer), module
        self._end_step()
        self.turn, self._same = WHOLE_STEP, {}
        fitting = trainer.state.fn == "fit"
        self._total_steps = module.lengths()[0] if fitting else None
        precision = trainer.precision_plugin
        scale = (lambda: precision.loss_scale) if isinstance(precision, RunPrecision) else None
        given = self._trainer.datamodule
        classes = given.class_names if isinstance(given, StagedData) else {}
        self._owners |= {f"{name}/{one}": ENGINE for one in STAGES for name in module.metric_names(one)}
        for name, hook in self.hooks.items():
            if fitting or hook.transforms or hook in self._evaluating or hook in self._finishing:
                hook.fit_periods(self._total_steps)
                hook.attach(module.network, name=name, directory=self.directory, loss_scale=scale, class_names=classes)
        module.observer = self

    def detach(self) -> None:
        self._end_step()
        self._same = {}
        for hook in self._all:
            hook.detach()

    def pause(self) -> None:
        for hook in self._pausing:
            hook.pause()

    def ended(self) -> None:
        for hook in _hooks_with(self._all, "ended"):
            hook.ended()

    def report_failure(self, error: BaseException) -> None:
        step = None if self.record is None else self._step_of(self.record)
        for name, hook in self.hooks.items():
            if hook.overrides("on_error"):
                try:
                    hook.on_error(error, step)
                except Exception:
                    log.exception("on_error of hooks.%s failed. The run ends with its earlier error", name)

    # --- the step, as Recording reports it ---

    def start_batch(self, batch: Batch, batch_idx: int, *, index: int) -> None:
        """Begin a micro-batch of optimizer step `index`."""
        record = self.record
        if record is None:
            record = self.record = StepRecord(index, self._due_at(index))
            self.watches_forward = record.due.watches_forward
        record.size += batch.global_size
        self._samples += batch.global_size
        record.batch_idx, record.data, record.weight = batch_idx, batch.data, batch.weight
        if record.due.keeps_batches:
            record.batches.append((batch, batch_idx))
        if record.seen is not None:
            self._update(record, record.seen)
        self._pass_boundary("batch")

    def _due_at(self, index: int) -> Due:
        kind = tuple([hook.idle_at(index) if hook.due(index) else None for hook in self._all])
        due = self._kinds.get(kind)
        if due is None:
            found = zip(self._all, kind, strict=True)
            due = self._kinds[kind] = Due({hook: idle for hook, idle in found if idle is not None})
        return due

    def before_update(self, optimizer: Optimizer) -> None:
        """Call before_update of the due hooks.

        With phases, this method is called in every pass over the micro-batches, also in passes that are not recorded.
        """
        record = self.record
        if record is None or not record.due.before_update:
            return
        step = self._step_of(record)
        losses = [*record.losses, *self._last_loss()]
        assert isinstance(self._module, TrainingModule)  # the check rejects such a hook for other modules
        precision = self._trainer.precision_plugin
        window = Window(batches=tuple(record.batches), epoch=step.epoch, phase=self.turn.phase, turn=self.turn.places)
        update = Update(
            window=window,
            optimizer=optimizer,
            losses=tuple(losses),
            scale=precision.loss_scale if isinstance(precision, RunPrecision) and precision.is_scaled else None,
            module=self._module,
        )
        for hook in record.due.before_update:
            hook.before_update(step, update)

    def before_step(self) -> Found:
        """Call after_backward of the due hooks on unscaled gradients. Return the dict with the values of the step."""
        record = self.record
        assert record is not None
        record.is_stepped, record.is_clipping = True, bool(record.due.after_clipping)
        for hook in record.due.at_modules:
            hook.disengage()  # other hooks may run the network after this point
        self._call(record.due.after_backward, "after_backward")
        return record.found

    def end_batch(self, *, ends_step: bool = False) -> StepRecord | None:
        """End a micro-batch. Return the record if the step has ended; None otherwise.

        Args:
            ends_step: Whether the step ends with this micro-batch in any case. If false, the step ends only if an
                optimizer has made a step. Default: False.
        """
        record = self.record
        assert record is not None
        due = record.due
        if due.before_update and not self._module.phases:
            record.losses += self._last_loss()
        for hook in due.at_modules:
            hook.disengage()
        if not (record.is_stepped or ends_step):
            return None
        if not self._module.phases:
            self._pass_boundary("optimizer")
        self._call(due.after_step, "after_step")
        self._end_step()
        return record

    # --- the step, as the module reports it: see StepObserver ---

    @contextmanager
    def around_forward(self, data: object) -> Iterator[None]:
        # A step may have several forwards: with phases, or with an optimizer that calls its closure several times.
        record = self.record
        assert record is not None
        record.data = data
        step = self._step_of(record)
        step.data, step.loss = data, None
        with ExitStack() as stack:
            if record.due.at_modules:
                stack.enter_context(run_uncompiled(self._module.network))
            for hook in record.due.at_modules:
                stack.enter_context(hook.engaged())
            for hook in record.due.around_forward:
                if (context := hook.around_forward(step)) is not None:
                    stack.enter_context(context)
            yield

    def after_forward(self, values: ForwardValues) -> None:
        record = self.record
        if record is not None and record.due.after_forward:
            with torch.no_grad():
                self._call(record.due.after_forward, "after_forward", values)
        self._pass_boundary("forward")

    def after_backward(self) -> None:
        self._pass_boundary("backward")

    def after_clipping(self) -> None:
        record = self.record
        if record is not None and record.is_clipping:
            record.is_clipping = False
            self._call(record.due.after_clipping, "after_clipping")

    def after_phase(self) -> None:
        self._pass_boundary("optimizer")

    def begin_turn(self, turn: Turn) -> None:
        self.turn = turn

    def _pass_boundary(self, boundary: Boundary) -> None:
        record = self.record
        if record is not None and record.due.passed:
            step = self._step_of(record)
            for hook in record.due.passed:
                hook.passed(boundary, step)

    def _call(self, hooks: Sequence[Hook], method: str, *arguments: object) -> None:
        """Call a method of several hooks and record the returned values.

        With phases, the phase's name is appended to the tags.
        """
        record, phase = self.record, self.turn.phase
        if record is None or not hooks:
            return
        step = self._step_of(record)
        if phase is not None:
            step.clips = any(one.gradient_clip_val for one in self._module.phases if one.name == phase)
        ending = "" if phase is None else f"/{phase}"
        for hook in hooks:
            found = values_of(hook, method, (step, *arguments), owners=self._owners, place=method, ending=ending)
            record.found.update(found)

    # --- the step for hooks ---

    def _end_step(self) -> None:
        self.record, self.watches_forward = None, False

    def _last_loss(self) -> list[Tensor]:
        """Return a list with the loss of the last training step or phase. The list is empty if there is no loss."""
        loss = self._module.last.loss
        return [] if loss is None else [loss]

    def _step_of(self, record: StepRecord) -> Step:
        step = record.seen
        if step is None:
            step = record.seen = Step(
                index=record.index,
                epoch=self._trainer.current_epoch,
                accumulated=self._trainer.accumulate_grad_batches,
                # These fields are read in each step, because callbacks may replace optimizers and settings.
                optimizers=each_optimizer(self._trainer.optimizers),
                clips=bool(self._trainer.gradient_clip_val),
                **(self._same or self._same_for_all_steps()),
            )
            self._update(record, step)
        step.loss = self._module.last.loss
        step.phase = self.turn.phase
        return step

    def _update(self, record: StepRecord, step: Step) -> None:
        """Set the fields of a step that depend on the last micro-batch."""
        step.batch_idx, step.batch_size = record.batch_idx, record.size
        step.samples_seen, step.seconds_waited = self._samples, self._module.seconds_waited
        step.data, step.weight, step.batches = record.data, record.weight, record.batches

    def _same_for_all_steps(self) -> dict[str, Any]:
        # These fields are cached, because reading Lightning's properties takes time in every step.
        trainer, module = self._trainer, self._module
        self._same = {
            "network": module.network,
            "batch_size": 0,
            "device": trainer.strategy.root_device,
            "seed": module.seed,
            "rank": module.rank,
            "world_size": trainer.world_size,
            "total_steps": self._total_steps,
            "loss_with": module.loss_with,
            "gather": gather_ranks,
            "autocast": trainer.precision_plugin.train_step_context,
        }
        if isinstance(trainer.precision_plugin, RunPrecision):
            self._same["kept"] = trainer.precision_plugin.kept
        if isinstance(trainer.strategy, ModelParallel):
            self._same |= {"norms": trainer.strategy.norms, "parts": trainer.strategy}
        return self._same

    # --- an evaluation ---

    def evaluated(self, stage: Stage, values: ForwardValues) -> None:
        for hook in self._evaluating:
            hook.evaluated(stage, values)

    def finish(self, stage: Stage, trainer: Trainer) -> Found:
        """Return the values of hooks at the end of an evaluation. Every rank must call this method."""
        gather, place = partial(gather_data, strategy=trainer.strategy), f"after_evaluation of {stage}"
        found: Found = {}
        for hook in self._finishing:
            found.update(values_of(hook, "after_evaluation", (stage, gather), owners=self._owners, place=place))
        return found


def _busy(hooks: Mapping[Hook, frozenset[str]], method: str) -> list[Hook]:
    return [hook for hook, idle in hooks.items() if hook.overrides(method) and method not in idle]


def _hooks_with(hooks: Sequence[Hook], method: str) -> list[Hook]:
    return [hook for hook in hooks if hook.overrides(method)]


def values_of(
    hook: Hook, method: str, arguments: tuple[object, ...], *, owners: Owners, place: str, ending: str = ""
) -> Values:
    """Call a method of a hook, and return the values that the hook logs, by tag.

    Args:
        hook: The hook.
        method: Name of the method.
        arguments: Arguments of the method.
        owners: Text that names the hook and the place of each tag. New tags are added to this dict.
        place: Name of the method, with the stage of an evaluation. Each tag may be logged at only one place, because
            two places would log two values at one step.
        ending: Text appended to each tag. Default: empty.

    Raises:
        RunError: The method did not return a mapping, or another hook or place already logs a tag.
    """
    try:
        found: Values | None = getattr(hook, method)(*arguments)
    except Exception as error:
        error.add_note(f"raised in hooks.{hook.name}, by {type(hook).__name__}.{method}")
        raise
    if not found:
        return {}
    if type(found) is not dict and not isinstance(found, Mapping):  # isinstance alone takes 7 times as long
        raise RunError(
            f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(found).__name__}; expected a mapping "
            "of tags to values, or None"
        )
    if ending:
        found = {tag + ending: value for tag, value in found.items()}
    own = f"hooks.{hook.name} in {place}"
    for tag in found:
        if owners.get(tag) != own:
            owner = ENGINE if tag.partition("/")[0] in ENGINE_TAGS else owners.setdefault(tag, own)
            if owner != own:
                raise RunError(f"{own} logs {tag}, a tag of {owner}; expected a tag that is not in use. Rename the tag")
    return found
