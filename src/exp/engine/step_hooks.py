"""Call the hooks of a run at their places in a step and in an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.compilation import uncompiled
from exp.engine.datamodule import RunTrainer, StagedData
from exp.engine.forward import Values as ForwardValues
from exp.engine.module import TrainingModule
from exp.engine.observer import UNOBSERVED, WHOLE_STEP, StepObserver, Turn
from exp.engine.own_module import OwnModule
from exp.errors import RunError
from exp.hooks.hook import Boundary, Hook, Values
from exp.hooks.panels import Panel
from exp.hooks.step import Look, Step, Update, Window
from exp.optim.phase import each_optimizer
from exp.precision.plugin import RunPrecision
from exp.shared_types import STAGES, Batch, Stage
from exp.strategies.model_parallel import ModelParallel, gather_data, gather_ranks

log = logging.getLogger(__name__)

# The first words of tags that the engine writes itself.
ENGINE_TAGS = ("loss", "optimizer", "precision")
Found = dict[str, Tensor | float | Panel]
# By tag; None is the engine.
Owners = dict[str, tuple[Hook | None, str]]


class Due:
    """The hooks of one step, by the methods that they override."""

    def __init__(self, hooks: Mapping[Hook, frozenset[str]]) -> None:
        """hooks: with the methods of each that have nothing to do."""
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


class StepHooks(StepObserver):
    """The hooks, and the step that they see. Recording tells it of batches and steps, the module of what is between.

    hooks: by name. directory: of the run, where hooks write files.
    turn: an attribute, the pass of phases that is under way.
    """

    _trainer: RunTrainer
    _module: TrainingModule | OwnModule

    def __init__(self, hooks: Mapping[str, Hook], *, directory: Path | None = None) -> None:
        self.hooks = dict(hooks)
        self.directory = directory
        self.turn = WHOLE_STEP
        self._all = list(self.hooks.values())
        self._pausing = _overriding(self._all, "pause")
        self._evaluating = _overriding(self._all, "evaluated")
        self._finishing = _overriding(self._all, "after_evaluation")
        # Which hooks are due together repeats: their lists are made once.
        self._kinds: dict[tuple[frozenset[str] | None, ...], Due] = {}
        self._due = self._nothing = Due({})
        self._is_within_step = False
        self._step: Step | None = None
        self._index = self._batch_idx = self._size = self._samples = 0
        self._data: object = None
        self._weight = 1.0
        # Of the step under way: micro-batches with their batch_idx, and the losses of those that are done.
        self._batches: list[tuple[Batch, int]] = []
        self._losses: list[Tensor] = []
        self._total_steps: int | None = None
        self._same: dict[str, Any] = {}
        # Whose each tag is, and where it is given.
        self._owners: Owners = {}
        self._early: Found = {}
        # What hooks gave for a step whose gradients are not yet clipped, where some look at them behind that.
        self._unclipped: Found | None = None

    def __deepcopy__(self, memo: object) -> StepObserver:
        """Leave a copy of a module without an observer: callbacks that average weights make one."""
        return UNOBSERVED

    # --- the run ---

    def attach(self, trainer: Trainer, module: TrainingModule | OwnModule) -> None:
        """Attach the hooks: in fit all of them; in another stage those that act in one."""
        self._trainer, self._module = cast(RunTrainer, trainer), module
        self._forget_step()
        self.turn, self._same = WHOLE_STEP, {}
        fitting = trainer.state.fn == "fit"
        self._total_steps = module.lengths()[0] if fitting else None
        precision = trainer.precision_plugin
        scale = (lambda: precision.loss_scale) if isinstance(precision, RunPrecision) else None
        given = self._trainer.datamodule
        classes = given.class_names if isinstance(given, StagedData) else {}
        self._owners |= {f"{name}/{one}": (None, one) for one in STAGES for name in module.metric_names(one)}
        for name, hook in self.hooks.items():
            if fitting or hook.transforms or hook in self._evaluating or hook in self._finishing:
                hook.fit_periods(self._total_steps)
                hook.attach(module.network, name=name, directory=self.directory, loss_scale=scale, class_names=classes)
        module.observer = self

    def detach(self) -> None:
        self._forget_step()
        self._same = {}
        for hook in self._all:
            hook.detach()

    def pause(self) -> None:
        for hook in self._pausing:
            hook.pause()

    def ended(self) -> None:
        for hook in _overriding(self._all, "ended"):
            hook.ended()

    def failed(self, error: BaseException) -> None:
        # A step that no hook has looked at yet has none.
        step = self._step_now() if self._is_within_step else None
        for name, hook in self.hooks.items():
            if hook.overrides("on_error"):
                try:
                    hook.on_error(error, step)
                except Exception:
                    log.exception("hooks.%s failed in on_error; the run ends by what came before", name)

    # --- the step, as Recording tells of it ---

    def start_batch(self, batch: Batch, batch_idx: int, *, index: int) -> None:
        """Take a micro-batch of optimizer step `index`."""
        if not self._is_within_step:
            kind = tuple([hook.idle_at(index) if hook.due(index) else None for hook in self._all])
            due = self._kinds.get(kind)
            if due is None:
                found = zip(self._all, kind, strict=True)
                due = self._kinds[kind] = Due({hook: idle for hook, idle in found if idle is not None})
            self._due, self._is_within_step = due, True
            self.watches_forward = due.watches_forward
            self._index, self._size = index, 0
            self._batches, self._losses = [], []
        self._size += batch.global_size
        self._samples += batch.global_size
        if self._due.keeps_batches:
            self._batches.append((batch, batch_idx))
        self._batch_idx, self._data, self._weight = batch_idx, batch.data, batch.weight
        if self._step is not None:
            self._bring_up(self._step)
        if self._due.passed:
            self._passed("batch")

    def before_update(self, optimizer: Optimizer) -> None:
        """Call the hooks before an optimizer steps, also where nothing of it is recorded."""
        if not self._due.before_update:
            return
        step = self._step_now()
        step.phase = self.turn.phase
        losses = [*self._losses, *self._last_loss()]
        assert isinstance(self._module, TrainingModule)  # of others such a hook is refused
        update = _update_of(self._module, optimizer, step.batches, losses, self.turn)
        for hook in self._due.before_update:
            hook.before_update(step, update)

    def before_step(self) -> Found:
        """Return what the hooks give for true gradients, and what they gave in the forward."""
        found, self._early = self._early, {}
        due = self._due
        for hook in due.at_modules:
            hook.disengage()  # what another hook computes from here on is not the step's
        if due.after_backward:
            self._call(due.after_backward, "after_backward", into=found)
        if due.after_clipping:
            self._unclipped = found
        return found

    def end_batch(self) -> None:
        """End a micro-batch."""
        if self._due.before_update and not self._module.phases:
            self._losses += self._last_loss()
        for hook in self._due.at_modules:
            hook.disengage()

    def end_step(self) -> Found:
        """Return what the hooks give for updated parameters, and end the step."""
        due = self._due
        if due.passed and not self._module.phases:
            self._passed("optimizer")
        found: Found = {}
        if due.after_step:
            self._call(due.after_step, "after_step", into=found)
        self._forget_step()
        return found

    # --- the step, as the module tells of it: see StepObserver ---

    @contextmanager
    def around_forward(self, data: object) -> Iterator[None]:
        # A step may have several: of phases, and of optimizers that evaluate their closure again.
        self._data = data
        due, step = self._due, self._step_now()
        step.data, step.loss = data, None
        with ExitStack() as stack:
            if due.at_modules:
                stack.enter_context(uncompiled(self._module.network))
            for hook in due.at_modules:
                stack.enter_context(hook.engaged())
            for hook in due.around_forward:
                if (context := hook.around_forward(step)) is not None:
                    stack.enter_context(context)
            yield

    def after_forward(self, values: ForwardValues) -> None:
        due = self._due
        if due.after_forward:
            with torch.no_grad():
                self._call(due.after_forward, "after_forward", values, into=self._early)
        if due.passed:
            self._passed("forward")

    def after_backward(self) -> None:
        if self._due.passed:
            self._passed("backward")

    def after_clipping(self) -> None:
        found, self._unclipped = self._unclipped, None
        if found is not None:
            self._call(self._due.after_clipping, "after_clipping", into=found)

    def after_phase(self) -> None:
        if self._due.passed:
            self._passed("optimizer")

    def begin_turn(self, turn: Turn) -> None:
        self.turn = turn

    def _passed(self, boundary: Boundary) -> None:
        step = self._step_now()
        step.phase = self.turn.phase
        for hook in self._due.passed:
            hook.passed(boundary, step)

    def _call(self, hooks: Sequence[Hook], method: str, *arguments: object, into: Found) -> None:
        """Put what these hooks give for the step into a mapping, by tags that end with the phase under way."""
        step, phase = self._step_now(), self.turn.phase
        step.phase = phase
        if phase is not None:
            step.clips = any(one.gradient_clip_val for one in self._module.phases if one.name == phase)
        ending = "" if phase is None else f"/{phase}"
        for hook in hooks:
            found = given(hook, method, (step, *arguments), owners=self._owners, place="a step", ending=ending)
            if method != "after_forward" and not into.keys().isdisjoint(found):
                twice = next(tag for tag in found if tag in into)
                raise RunError(f"hooks.{hook.name} gives {twice} twice in a step; expected once. Rename one of the two")
            into.update(found)

    # --- what the hooks see of it ---

    def _forget_step(self) -> None:
        self._due, self._is_within_step = self._nothing, False
        self.watches_forward = False
        self._step, self._data, self._unclipped = None, None, None
        self._batches, self._losses = [], []

    def _last_loss(self) -> list[Tensor]:
        """Return the loss of the training step that was last; of phases, of the last that ran."""
        loss = self._module.last.loss
        return [] if loss is None else [loss]

    def _step_now(self) -> Step:
        step = self._step
        if step is None:
            step = self._step = Step(
                index=self._index,
                epoch=self._trainer.current_epoch,
                accumulated=self._trainer.accumulate_grad_batches,
                # Callbacks may replace and set them between two steps.
                optimizers=each_optimizer(self._trainer.optimizers),
                clips=bool(self._trainer.gradient_clip_val),
                **(self._same or self._same_for_all_steps()),
            )
            self._bring_up(step)
        step.loss = self._module.last.loss
        step.phase = None
        return step

    def _bring_up(self, step: Step) -> None:
        """Bring a step up to the micro-batch that came last."""
        step.batch_idx, step.batch_size = self._batch_idx, self._size
        step.samples_seen, step.seconds_waited = self._samples, self._module.seconds_waited
        step.data, step.weight, step.batches = self._data, self._weight, self._batches

    def _same_for_all_steps(self) -> dict[str, Any]:
        # Once: Lightning's properties look each of them up through others.
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
        """Return what the hooks give for an evaluation, at its end. Every rank must call it."""
        gather = partial(gather_data, strategy=trainer.strategy)
        found: Found = {}
        for hook in self._finishing:
            found.update(given(hook, "after_evaluation", (stage, gather), owners=self._owners, place=stage))
        return found


def _busy(hooks: Mapping[Hook, frozenset[str]], method: str) -> list[Hook]:
    return [hook for hook, idle in hooks.items() if hook.overrides(method) and method not in idle]


def _overriding(hooks: Sequence[Hook], method: str) -> list[Hook]:
    return [hook for hook in hooks if hook.overrides(method)]


def given(
    hook: Hook, method: str, arguments: tuple[object, ...], *, owners: Owners, place: str, ending: str = ""
) -> Values:
    """Call a method of a hook, and hold what it returns to tags of its own.

    owners: whose each tag is, in which new ones are entered. place: a step, or the stage: of both a tag would have two
        points at one step. ending: is added to each tag.
    Raises: RunError where it is no mapping, or a tag is another's; whatever the method raises, with the hook's name.
    """
    try:
        found: Values | None = getattr(hook, method)(*arguments)
    except Exception as error:
        error.add_note(f"raised in hooks.{hook.name}, by {type(hook).__name__}.{method}")
        raise
    if not found:
        return {}
    if type(found) is not dict and not isinstance(found, Mapping):  # the first takes a seventh of the time
        raise RunError(
            f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(found).__name__}; expected a mapping "
            "of tags to values, or None"
        )
    if ending:
        found = {tag + ending: value for tag, value in found.items()}
    own = (hook, place)
    for tag in found:
        if owners.get(tag) != own:
            _enter(tag, hook, place, owners)
    return found


def _enter(tag: str, hook: Hook, place: str, owners: Owners) -> None:
    owner, where = owners.get(tag, (None, ""))
    if owner is hook:
        cure = "expected a tag for each, such as one that ends with the stage. Rename it"
        raise RunError(f"hooks.{hook.name} gives {tag} in {where} and in {place}; {cure}")
    if where or tag.partition("/")[0] in ENGINE_TAGS:
        whose = "the engine's own" if owner is None else f"given by hooks.{owner.name}, too"
        raise RunError(f"hooks.{hook.name} gives {tag}, which is {whose}; expected a tag of its own. Rename it")
    owners[tag] = (hook, place)


def _update_of(
    module: TrainingModule,
    optimizer: Optimizer,
    batches: Sequence[tuple[Batch, int]],
    losses: Sequence[Tensor],
    turn: Turn,
) -> Update:
    """Return what a hook is given before this optimizer steps. losses: of the micro-batches."""
    trainer = module.trainer
    precision = trainer.precision_plugin
    own = precision if isinstance(precision, RunPrecision) else None
    return Update(
        window=Window(batches=tuple(batches), epoch=trainer.current_epoch, phase=turn.phase, turn=turn.places),
        optimizer=optimizer,
        losses=tuple(losses),
        scale=own.loss_scale if own is not None and own.is_scaled else None,
        objective=module.objective,
        again=partial(_run_again, module),
        save=_save,
    )


def _save(path: Path, contents: Mapping[str, Any]) -> None:
    AtomicCheckpointIO().save_checkpoint(dict(contents), path)


def _run_again(module: TrainingModule, window: Window, place: int, look: Look) -> tuple[Tensor, dict[str, Tensor]]:
    """Run forward and backward of one micro-batch of a window, observed by `look` alone.

    Parameters, their gradients and the optimizer do not change; buffers do. Random numbers are those of the step. A
    compiled network runs uncompiled.

    Returns: the loss, 0-d and detached, and the gradients of the parameters that the step changes and that have one.
    """
    named = module.trained_in(window)
    observer, module.observer = module.observer, UNOBSERVED
    try:
        with torch.enable_grad(), uncompiled(module.network):
            with look.forward():
                loss = module.scaled_loss(window, place)
            if not loss.requires_grad:
                return loss, {}
            look.backward(loss)
            # Not loss.backward(), which would call the hooks of ddp at the parameters.
            found = torch.autograd.grad(loss, list(named.values()), allow_unused=True)
    finally:
        module.observer = observer
    pairs = zip(named, found, strict=True)
    return loss.detach(), {name: gradient for name, gradient in pairs if gradient is not None}
