"""Calls the hooks of a run at their places in a step and in an evaluation."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Trainer
from torch.optim import Optimizer

from exp.engine.compilation import uncompiled
from exp.engine.cuda_graphs import GraphedNetwork
from exp.engine.module import TrainingModule
from exp.engine.step_replay import update_of
from exp.errors import RunError
from exp.hooks.hook import Boundary, Hook
from exp.hooks.step import Step
from exp.optim.phase import stepping
from exp.precision.plugin import RunPrecision
from exp.strategies.gathering import gather_data, gather_ranks
from exp.strategies.model_parallel import ModelParallel
from exp.types import Batch, Stage

# The first words of tags that the engine writes itself.
ENGINE_TAGS = ("loss", "optimizer", "precision")


def given(
    hook: Hook, method: str, arguments: tuple[Any, ...], *, owners: dict[str, Hook], ending: str = ""
) -> Mapping[str, Any]:
    """What a method of a hook returns, by tag.

    owners: whose each tag is, in which new ones are entered. ending: is added to each tag.
    Raises: RunError where it is no mapping, or a tag is another's; whatever the method raises, with the hook's name.
    """
    try:
        found = getattr(hook, method)(*arguments)
    except Exception as error:
        error.add_note(f"raised in hooks.{hook.name}, by {type(hook).__name__}.{method}")
        raise
    if not found:
        return {}
    if not isinstance(found, Mapping):
        raise RunError(
            f"hooks.{hook.name}: {type(hook).__name__}.{method} returned a {type(found).__name__}; expected a mapping "
            "of tags to values, or None"
        )
    if ending:
        found = {tag + ending: value for tag, value in found.items()}
    for tag in found:
        owner = owners.get(tag)
        if owner is not hook:
            _enter(tag, hook, owner, owners)
    return found


def _enter(tag: str, hook: Hook, owner: Hook | None, owners: dict[str, Hook]) -> None:
    if owner is not None or tag.partition("/")[0] in ENGINE_TAGS:
        whose = "the engine's own" if owner is None else f"given by hooks.{owner.name}, too"
        raise RunError(f"hooks.{hook.name} gives {tag}, which is {whose}; expected a tag of its own. Rename it")
    owners[tag] = hook


log = logging.getLogger(__name__)

STEP_METHODS = (
    "passed", "around_forward", "after_forward", "before_update", "after_backward", "after_clipping", "after_step",
)  # fmt: skip
Found = dict[str, Any]


class Due:
    """The hooks of one step, by the methods that they override."""

    __slots__ = (*STEP_METHODS, "at_modules", "keeps_batches", "watches_forward")

    def __init__(self, hooks: Sequence[Hook]) -> None:
        for method in STEP_METHODS:
            setattr(self, method, [hook for hook in hooks if hook.overrides(method)])
        self.at_modules = [hook for hook in hooks if hook.is_at_modules and not hook.transforms]
        self.keeps_batches = bool(self.before_update) or any(hook.keeps_batches for hook in hooks)
        self.watches_forward = bool(self.around_forward or self.at_modules)


class StepHooks:
    """The hooks, and the step that they see.

    hooks: by name. directory: of the run, where hooks write files.
    """

    def __init__(self, hooks: Mapping[str, Hook], *, directory: Path | None = None) -> None:
        self.hooks = dict(hooks)
        self.directory = directory
        self._all = list(self.hooks.values())
        self._pausing = [hook for hook in self._all if hook.overrides("pause")]
        self._writing = [hook for hook in self._all if hook.overrides("before_write")]
        self._evaluating = [hook for hook in self._all if hook.overrides("evaluated")]
        self._finishing = [hook for hook in self._all if hook.overrides("after_evaluation")]
        # Which hooks are due together repeats: their lists are made once.
        self._kinds: dict[tuple[bool, ...], Due] = {}
        self._due: Due | None = None
        self._step: Step | None = None
        self._index = self._batch_idx = self._size = self._samples = 0
        self._data: Any = None
        self._weight = 1.0
        # Of the step under way: micro-batches with their batch_idx, and the losses of those that are done.
        self._batches: list[tuple[Batch, int]] = []
        self._losses: list[Any] = []
        self._total_steps: int | None = None
        self._same: dict[str, Any] = {}
        # Whose each tag is.
        self._owners: dict[str, Hook] = {}
        self._early: Found = {}

    # --- the run ---

    def attach(self, trainer: Trainer, module: TrainingModule) -> None:
        """In fit all of them; in another stage those that act in one."""
        self._trainer, self._module = trainer, module
        self._due = self._step = None
        self._same = {}
        fitting = trainer.state.fn == "fit"
        self._total_steps = module.lengths()["total_steps"] if fitting else None
        precision = trainer.precision_plugin
        scale = (lambda: precision.loss_scale) if isinstance(precision, RunPrecision) else None
        for name, hook in self.hooks.items():
            if fitting or hook.transforms or hook in self._evaluating or hook in self._finishing:
                hook.attach(module.network, name=name, directory=self.directory, loss_scale=scale)
        module.last.evaluated = self._evaluated if self._evaluating else None

    def detach(self) -> None:
        self._step = self._due = self._data = None
        self._same = {}
        for hook in self._all:
            hook.detach()

    def pause(self) -> None:
        for hook in self._pausing:
            hook.pause()

    def ended(self) -> None:
        for hook in self._all:
            if hook.overrides("ended"):
                hook.ended()

    def before_write(self) -> None:
        for hook in self._writing:
            hook.before_write()

    def failed(self, error: BaseException) -> None:
        # A step that no hook has looked at yet has none.
        step = None if self._due is None else self._step_now()
        for name, hook in self.hooks.items():
            if hook.overrides("on_error"):
                try:
                    hook.on_error(error, step)
                except Exception:
                    log.exception("hooks.%s failed in on_error; the run ends by what came before", name)

    # --- the step ---

    def start_batch(self, batch: Batch, batch_idx: int, *, index: int) -> None:
        """A micro-batch of optimizer step `index` is there."""
        due = self._due
        if due is None:
            kind = tuple([hook.due(index) for hook in self._all])
            due = self._kinds.get(kind)
            if due is None:
                due = self._kinds[kind] = Due([hook for hook, is_due in zip(self._all, kind, strict=True) if is_due])
            self._due = due
            self._index, self._size = index, 0
            self._batches, self._losses = [], []
        self._size += batch.global_size
        self._samples += batch.global_size
        if due.keeps_batches:
            self._batches.append((batch, batch_idx))
        self._batch_idx, self._data, self._weight = batch_idx, batch.data, batch.weight
        if self._step is not None:
            self._bring_up(self._step)
        last = self._module.last
        last.passed = self._passed if due.passed else None
        last.seen = self._seen if due.after_forward or due.passed else None
        last.around = self._around if due.watches_forward else None
        if due.passed:
            self._passed("batch")

    def before_update(self, optimizer: Optimizer) -> None:
        """An optimizer is about to step, also where nothing of it is recorded."""
        due, last = self._due, self._module.last
        if not due.before_update:
            return
        step = self._step_now()
        step.phase = last.phase
        update = update_of(self._module, optimizer, step.batches, [*self._losses, last.loss])
        for hook in due.before_update:
            hook.before_update(step, update)

    def before_step(self, phase: str | None) -> Found:
        """The gradients are true. Returns what the hooks give for them, and what they gave in the forward."""
        found, self._early = self._early, {}
        due = self._due
        for hook in due.at_modules:
            hook.disengage()  # what another hook computes from here on is not the step's
        if due.after_backward:
            found.update(self._called(due.after_backward, "after_backward", phase))
        if due.after_clipping:
            self._module.last.after_clipping = partial(self._clipped, found, phase)
        return found

    def end_batch(self) -> None:
        """After each micro-batch."""
        if self._due.before_update and not self._module.phases:
            self._losses.append(self._module.last.loss)
        for hook in self._due.at_modules:
            hook.disengage()

    def end_step(self) -> Found:
        """The parameters are updated. Returns what the hooks give."""
        due = self._due
        if due.passed and not self._module.phases:
            self._passed("optimizer")
        found = self._called(due.after_step, "after_step", None) if due.after_step else {}
        self._due = self._step = self._data = None
        self._batches, self._losses = [], []
        return found

    def _called(self, hooks: Sequence[Hook], method: str, phase: str | None, *arguments: Any) -> Found:
        step = self._step_now()
        step.phase = phase
        if phase is not None:
            step.clips = any(one.gradient_clip_val for one in self._module.phases if one.name == phase)
        values: Found = {}
        ending = "" if phase is None else f"/{phase}"
        for hook in hooks:
            values.update(given(hook, method, (step, *arguments), owners=self._owners, ending=ending))
        return values

    def _clipped(self, values: Found, phase: str | None) -> None:
        self._module.last.after_clipping = None
        values.update(self._called(self._due.after_clipping, "after_clipping", phase))

    def _passed(self, boundary: Boundary) -> None:
        step = self._step_now()
        step.phase = self._module.last.phase
        for hook in self._due.passed:
            hook.passed(boundary, step)

    def _seen(self, values: Mapping[str, Any]) -> None:
        """Behind a forward and its objective."""
        due = self._due
        if due.after_forward:
            with torch.no_grad():
                self._early.update(self._called(due.after_forward, "after_forward", self._module.last.phase, values))
        if due.passed:
            self._passed("forward")

    def _step_now(self) -> Step:
        step = self._step
        if step is None:
            step = self._step = Step(
                index=self._index,
                epoch=self._trainer.current_epoch,
                accumulated=self._trainer.accumulate_grad_batches,
                # Callbacks may replace and set them between two steps.
                optimizers=stepping(self._trainer.optimizers),
                clips=bool(self._trainer.gradient_clip_val),
                **(self._same or self._same_for_all_steps()),
            )
            self._bring_up(step)
        step.loss = self._module.last.loss
        step.phase = None
        return step

    def _bring_up(self, step: Step) -> None:
        """To the micro-batch that came last."""
        step.batch_idx, step.batch_size = self._batch_idx, self._size
        step.samples_seen, step.seconds_waited = self._samples, self._trainer.datamodule.seconds_waited
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
            "is_graphed": isinstance(module.run_network, GraphedNetwork),
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

    @contextmanager
    def _around(self, data: Any) -> Iterator[None]:
        """Of one forward. A step may have several: of phases, and of optimizers that evaluate their closure again."""
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

    # --- an evaluation ---

    def _evaluated(self, stage: Stage, values: Mapping[str, Any]) -> None:
        for hook in self._evaluating:
            hook.evaluated(stage, values)

    def finish(self, stage: Stage, trainer: Trainer) -> Found:
        """At the end of an evaluation: what the hooks give for it. Every rank must call it."""
        gather: Callable[..., Any] = partial(gather_data, strategy=trainer.strategy)
        values: Found = {}
        for hook in self._finishing:
            values.update(given(hook, "after_evaluation", (stage, gather), owners=self._owners))
        return values
