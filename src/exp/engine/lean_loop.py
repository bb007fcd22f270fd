"""Loops that replace Lightning's private loops of fit and run several batches in one call.

Lightning's own loop                                this module
    for each batch: done? validate? stop?               for each execution: done? validate? stop?
        fetch through three iterators                       for each batch of the execution
        call every hook of every callback                       fetch
        closure in closure in optimizer.step                    call only overridden hooks, listed once per execution
        results of self.log, which are always empty             forward, backward, clipping, optimizer, schedule

An execution is one call of `advance`. Whenever a callback reads the counters, they equal those of Lightning's loop.
Hooks are called in the same order. An execution ends before each task of the outer loop: a validation, the end of an
epoch, a stop. Each execution looks up all parts again, because callbacks may have changed the parts. The lookup takes
tens of microseconds. One iteration of Lightning's loop takes half a millisecond.

docs/engine.md lists the private names of Lightning with their tests, and the steps to support a new version of
Lightning. The private names (2.6.6) are `_EvaluationLoop` with `_evaluation_step`, `_has_run` and
`_seen_batches_per_dataloader`; `_TrainingEpochLoop` with `_batches_that_stepped`, `_should_check_val_fx` and
`_should_check_val_epoch`; `_DataFetcher`.
"""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.core.optimizer import LightningOptimizer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from lightning.pytorch.loops.fetchers import _DataFetcher
from lightning.pytorch.loops.training_epoch_loop import _TrainingEpochLoop
from lightning.pytorch.profilers import PassThroughProfiler
from lightning.pytorch.strategies import DDPStrategy, ParallelStrategy, SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.trainer.states import RunningStage, TrainerFn
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.optim import LBFGS, Optimizer

from exp.engine.datamodule import Batches, RunData, RunTrainer
from exp.engine.module import TrainingModule
from exp.errors import UserCodeError, user_frames
from exp.optim.direct_step import DirectStep
from exp.precision.plugin import RunPrecision, ScaledPrecision
from exp.shared_types import Batch
from exp.strategies.strategy import WrapsModule

log = logging.getLogger(__name__)

TRAINING_HOOKS = (
    "on_train_batch_start",
    "on_train_batch_end",
    "on_before_zero_grad",
    "on_before_backward",
    "on_after_backward",
    "on_before_optimizer_step",
)
VALIDATION_HOOKS = ("on_validation_batch_start", "on_validation_batch_end")
NEED = "one_step_a_call"
# Duration of an execution in seconds if steps_per_execution is not set. Lightning's own work takes half a millisecond
# per execution.
EXECUTION_SECONDS = 0.1


def run_several_at_once(trainer: Trainer, *, steps_per_execution: int | None) -> None:
    """Replace the Trainer's loops by LeanEpochLoop and LeanValidationLoop. Call this function before fit.

    Args:
        trainer: The Trainer.
        steps_per_execution: Number of batches per execution; see LeanEpochLoop.
    """
    own = trainer.fit_loop.epoch_loop
    lean = LeanEpochLoop(
        trainer, steps_per_execution=steps_per_execution, min_steps=own.min_steps, max_steps=own.max_steps
    )
    if steps_per_execution != 1:
        lean.val_loop = LeanValidationLoop(trainer)
    trainer.fit_loop.epoch_loop = lean


class LeanEpochLoop(_TrainingEpochLoop):
    """Training loop of an epoch that runs several batches in one call of `advance`.

    If a callback or another part of the run needs Lightning's own loop, Lightning's loop runs, and the log states the
    reason.

    Args:
        trainer: The Trainer.
        steps_per_execution: Number of batches per call. None: as many batches as fit into a tenth of a second, at least
            one. 1: Lightning's own loop runs.
        min_steps: Argument of Lightning's loop: smallest number of optimizer steps.
        max_steps: Argument of Lightning's loop: largest number of optimizer steps.
    """

    trainer: RunTrainer

    def __init__(
        self, trainer: Trainer, *, steps_per_execution: int | None, min_steps: int | None, max_steps: int
    ) -> None:
        super().__init__(trainer, min_steps=min_steps, max_steps=max_steps)
        self.steps_per_execution = steps_per_execution
        self.is_one_by_one = steps_per_execution == 1

    @property
    def global_step(self) -> int:
        # Lightning's property checks for manual optimization first; callbacks read this property in each batch.
        return self.automatic_optimization.optim_progress.optimizer.step.total.completed

    def _find_step(self) -> LeanStep | None:
        """Return the parts of a step; None if Lightning's own loop has to run the next batch."""
        if self.is_one_by_one or self.restarting:
            return None
        reason = why_one_by_one(self.trainer)
        if reason is None:
            return LeanStep(self)
        self.is_one_by_one = True
        log.log(
            logging.INFO if self.steps_per_execution is None else logging.WARNING,
            "runtime.steps_per_execution is 1 from now on, so each step uses the slower loop of Lightning: %s",
            reason,
        )
        return None

    def advance(self, data_fetcher: _DataFetcher) -> None:
        try:
            self._advance(data_fetcher)
        except StopIteration as error:
            # Lightning would treat a StopIteration of the user's code as the end of the data.
            if user_frames(error):
                raise UserCodeError.of(error, what="a step of training") from error
            raise

    def _advance(self, data_fetcher: _DataFetcher) -> None:
        lean = self._find_step()
        if lean is None:
            super().advance(data_fetcher)
            return
        self.val_loop.restarting = False
        count = self.steps_per_execution
        left = min(self._batches_to_validation(), float("inf") if count is None else count)
        ends = None if count is not None else time.monotonic() + EXECUTION_SECONDS
        fetch = make_fetcher(data_fetcher)
        while True:
            self._do_batch(lean, fetch, data_fetcher)
            left -= 1
            if left <= 0 or self._is_wanted_outside() or (ends is not None and time.monotonic() >= ends):
                return
            # These tasks are the same as in on_advance_end if no validation is due.
            if lean.plateau_by_step:
                self.update_lr_schedulers("step", update_plateau_schedulers=True)
            if not lean.accumulates:
                self._batches_that_stepped += 1

    def _do_batch(self, lean: LeanStep, fetch: Callable[[], Batch], data_fetcher: _DataFetcher) -> None:
        batch = fetch()
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
        """Return whether the execution must end after this batch, because of a stop or the end of the epoch."""
        trainer, progress = self.trainer, self.batch_progress
        return (
            trainer.should_stop
            or progress.is_last_batch
            or progress.current.ready == trainer.num_training_batches
            or (self.max_steps != -1 and self.global_step >= self.max_steps)
            or trainer.received_sigterm
        )

    def _batches_to_validation(self) -> float:
        """Return the number of batches until Lightning next checks whether to validate within the epoch."""
        trainer = self.trainer
        if not self._should_check_val_epoch():
            return float("inf")
        every: float | None = trainer.val_check_batch
        if every is None:  # the validation interval is a time
            return 1
        limit = trainer.limit_train_batches
        if every == float("inf") and isinstance(limit, int):
            every = limit
        if every == float("inf"):
            return every
        progress = self.batch_progress
        done = progress.total.ready if trainer.check_val_every_n_epoch is None else progress.current.ready
        return every - done % every


class LeanValidationLoop(_EvaluationLoop):
    """Validation loop of fit that calls only overridden hooks and collects no results of self.log.

    Counters, limits and the order of hooks are the same as in Lightning's loop. Lightning's own loop runs in two cases:
    a callback of another package overrides a batch hook of validation, or the run has several validation loaders.
    """

    trainer: RunTrainer

    def __init__(self, trainer: Trainer) -> None:
        own = trainer.fit_loop.epoch_loop.val_loop
        super().__init__(
            trainer,
            TrainerFn.FITTING,
            RunningStage.VALIDATING,
            verbose=own.verbose,
            inference_mode=own.inference_mode,
        )
        self._is_lean = False

    def on_run_start(self) -> None:
        self._is_lean = False
        super().on_run_start()
        # Checked after the start hooks of validation, because such a hook may change any part.
        self._is_lean = not any(self._reasons())
        if self._is_lean:
            trainer, module = self.trainer, self.trainer.lightning_module
            self._place = make_placer(trainer)
            self._on_batch_start = acting(trainer, VALIDATION_HOOKS[0])
            self._on_batch_end = acting(trainer, VALIDATION_HOOKS[1])
            strategy: LightningStrategy = trainer.strategy
            is_plain = strategy.model is module and type(trainer.precision_plugin.forward_context()) is nullcontext
            self._step: Callable[[Batch, int], Any] = module.validation_step if is_plain else strategy.validation_step

    def _reasons(self) -> Iterator[str]:
        yield from foreign_parts(self.trainer, VALIDATION_HOOKS, often="at every batch of a validation")
        if self.num_dataloaders != 1:
            yield f"there are {self.num_dataloaders} loaders"

    def _evaluation_step(
        self, batch: Batch, batch_idx: int, dataloader_idx: int, dataloader_iter: Iterator[Batch] | None
    ) -> None:
        trainer, progress = self.trainer, self.batch_progress
        if not self._is_lean:
            super()._evaluation_step(batch, batch_idx, dataloader_idx, dataloader_iter)
            return
        module = trainer.lightning_module
        batch = self._place(batch)
        progress.increment_ready()
        for hook in self._on_batch_start:
            hook(trainer, module, batch, batch_idx)
        progress.increment_started()
        outputs = self._step(batch, batch_idx)
        progress.increment_processed()
        for hook in self._on_batch_end:
            hook(trainer, module, outputs, batch, batch_idx)
        progress.increment_completed()
        if not trainer.sanity_checking:
            self._has_run = True
            self._seen_batches_per_dataloader[dataloader_idx] += 1
        if not progress.is_last_batch and trainer.received_sigterm:
            raise SIGTERMException


def report_stop_iterations(callbacks: Iterable[Callback]) -> None:
    """Wrap the hooks of callbacks so that a StopIteration in a hook ends the run with an error.

    Lightning's loops would treat a StopIteration as the end of the data. Hooks of a training step are not wrapped,
    because `LeanEpochLoop.advance` already handles their errors.
    """
    for callback in callbacks:
        for name in dir(Callback):
            is_hook = not name.startswith(("_", "on_train_batch", "on_before", "on_after"))
            if is_hook and (hook := find_override(callback, Callback, name)) is not None and callable(hook):
                setattr(callback, name, functools.partial(_call_hook, callback, name, hook))


def _call_hook(
    callback: Callback, name: str, hook: Callable[..., object], *arguments: object, **named: object
) -> object:
    try:
        return hook(*arguments, **named)
    except StopIteration as error:
        raise UserCodeError.of(error, what=f"callback {type(callback).__name__}, in {name},") from error


def make_fetcher(fetcher: _DataFetcher) -> Callable[[], Batch]:
    """Return a function that fetches the next training batch, and raises StopIteration at the end of the data."""
    loaders = fetcher.combined_loader.flattened
    length, batches = fetcher.length, loaders[0]
    if length is None or len(loaders) != 1 or not isinstance(batches, Batches) or batches.ahead is None:
        return lambda: next(fetcher)[0]
    ahead = batches.ahead

    def fetch() -> Batch:
        batch = next(ahead, None)
        if batch is None:
            fetcher.done = True
            raise StopIteration
        fetcher.fetched += 1
        fetcher.done = fetcher.fetched >= length
        return batch

    return fetch


def make_placer(trainer: RunTrainer) -> Callable[[Batch], Batch]:
    """Return a function that converts a batch to the dtype of the precision and moves it to the device."""
    device, precision = trainer.strategy.root_device, trainer.precision_plugin
    moves = functools.partial(trainer.datamodule.transfer_batch_to_device, device=device, dataloader_idx=0)
    to_device: Callable[[Batch], Batch] | None = None if device.type == "cpu" else moves
    converts = isinstance(precision, RunPrecision) and precision.word.double

    def place(batch: Batch) -> Batch:
        if converts:
            batch = precision.convert_input(batch)
        return batch if to_device is None else to_device(batch)

    return place


def find_override(owner: object, base: type, name: str) -> Callable[..., Any] | None:
    """Return a hook of a callback or module if the object or its class overrides the hook; None otherwise.

    Args:
        owner: Callback or module.
        base: Class of Lightning that defines the hook.
        name: Name of the hook.
    """
    found: Callable[..., Any] = getattr(owner, name)
    return None if name not in vars(owner) and getattr(type(owner), name) is getattr(base, name) else found


def acting(trainer: RunTrainer, name: str) -> list[Callable[..., Any]]:
    """Return the hooks with a name that callbacks override, in the order of the callbacks."""
    found = (find_override(callback, Callback, name) for callback in trainer.callbacks)
    return [hook for hook in found if hook is not None]


class LeanStep:
    """Parts of a training step, looked up once per execution. A step skips parts that do nothing.

    place the batch                          on the device, if Lightning's strategy would also place it
    training_step                            under the precision's forward context
    zero_grad                                at the first batch of an optimizer step; before training_step, if no hook
                                             reads gradients
    scale, backward                          with overridden on_before_backward and on_after_backward
    at the last batch of an optimizer step:
        unscale; overridden on_before_optimizer_step; clipping; optimizer step; update of the loss scale

    If a strategy, a module or an optimizer overrides a part, a step calls the overriding method in the same way as
    Lightning.

    Attributes:
        accumulates: True if the optimizer step needs more batches after the batch that was run last.
        batches: Number of batches per epoch; infinite if unknown.
        schedules: Schedules that step after each optimizer step, except ReduceLROnPlateau.
        plateau_by_step: True if a ReduceLROnPlateau schedule steps after each optimizer step.
    """

    def __init__(self, loop: LeanEpochLoop) -> None:
        trainer = loop.trainer
        module, precision = trainer.lightning_module, trainer.precision_plugin
        assert isinstance(module, TrainingModule)  # foreign_parts excludes other modules
        assert isinstance(precision, RunPrecision)
        self.trainer, self.module = trainer, module
        self.accumulates = False
        # Value of the argument `outputs` of on_train_batch_end, which exp's callbacks do not read.
        self.outputs: dict[str, object] = {}
        self._strategy: LightningStrategy = trainer.strategy
        self._without_sync: Callable[[], AbstractContextManager[None]] = (
            trainer.strategy.block_backward_sync if isinstance(trainer.strategy, ParallelStrategy) else nullcontext
        )
        self._precision = precision
        self._progress = loop.automatic_optimization.optim_progress.optimizer
        self._optimizer: Optimizer = trainer.optimizers[0]
        self.on_batch_start = acting(trainer, "on_train_batch_start")
        self.on_batch_end = acting(trainer, "on_train_batch_end")
        self._before_zero_grad = acting(trainer, "on_before_zero_grad")
        self._before_backward = acting(trainer, "on_before_backward")
        self._after_backward = acting(trainer, "on_after_backward")
        self._before_step = acting(trainer, "on_before_optimizer_step")
        self._choose_forward()
        self._choose_backward()
        self._choose_update()
        self.batches = trainer.num_training_batches
        self.schedules = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        self.plateau_by_step = any(c.interval == "step" and c.reduce_on_plateau for c in trainer.lr_scheduler_configs)
        self._window = trainer.accumulate_grad_batches

    def run(self, batch: Batch, batch_idx: int, *, is_last: bool) -> None:
        """Run forward and backward. At the last batch of an optimizer step, also run the optimizer.

        Args:
            batch: The batch.
            batch_idx: Number of the batch in the epoch.
            is_last: Whether the batch is the last one of the epoch.
        """
        self._batch: Any = batch
        self._batch_idx = batch_idx
        self.accumulates = not is_last and (batch_idx + 1) % self._window != 0
        if self.accumulates:
            with self._without_sync():
                self._compute()
        else:
            self._progress.step.increment_ready()
            self._update()
            self._progress.step.increment_completed()
        self._batch = None

    # --- the choice of each part ---

    def _choose_forward(self) -> None:
        strategy, precision = self._strategy, self._precision
        self.place = make_placer(self.trainer)
        # Function that makes a context for each batch; None if the context would do nothing.
        self._context: Callable[[], AbstractContextManager[Any]] | None = None
        self._forward: Callable[[Batch, int], Any] = strategy.training_step
        if type(strategy).training_step is LightningStrategy.training_step and strategy.model is self.module:
            self._forward = self.module.training_step
        elif isinstance(strategy, WrapsModule) and strategy.is_plain and strategy.model is not self.module:
            self._forward = self._forward_through_wrapper
        else:
            return
        self._context = None if type(precision.forward_context()) is nullcontext else precision.forward_context

    def _forward_through_wrapper(self, batch: Batch, batch_idx: int) -> Any:
        """Run training_step through DistributedDataParallel.

        DistributedDataParallel calls the module's forward, so this method replaces forward by training_step.
        """
        own, wrapper = vars(self.module), self._strategy.model
        assert wrapper is not None
        own["forward"] = self.module.training_step
        try:
            return wrapper(batch, batch_idx)
        finally:
            del own["forward"]

    def _choose_backward(self) -> None:
        kind = type(self._strategy)
        self._is_backward_plain = kind.backward is LightningStrategy.backward
        self._module_backward = find_override(self.module, LightningModule, "backward")
        self._zero_grad = find_override(self.module, LightningModule, "optimizer_zero_grad")
        # If no hook reads gradients, the gradients are deleted before the forward. Otherwise, gradients and activations
        # are in memory at the same time. A GPT of 86 million parameters on an H100 then needed 3 to 6 percent more
        # memory.
        self._dropped: list[Tensor] | None = None
        is_plain = self._zero_grad is None and type(self._optimizer).zero_grad is Optimizer.zero_grad
        if is_plain and not self._before_zero_grad:
            self._dropped = [p for group in self._optimizer.param_groups for p in group["params"]]

    def _choose_update(self) -> None:
        optimizer, kind = self._optimizer, type(self._optimizer)
        is_direct = (
            find_override(self.module, LightningModule, "optimizer_step") is None
            and _steps_plainly(self._strategy)
            # Other optimizers may call the closure twice or read the loss, so they need Lightning's way with a closure.
            and kind.__module__.startswith("torch.optim.")
            and kind is not LBFGS
        )
        self._update = self._update_directly if is_direct else self._update_by_closure
        # If steps may be skipped, the loss scaler runs the optimizer step.
        self._step_unscaled = DirectStep(optimizer) if is_direct and not self._precision.skips else None
        clipping = type(self.module).configure_gradient_clipping
        self._clips = bool(self.trainer.gradient_clip_val) or clipping is not TrainingModule.configure_gradient_clipping

    # --- the step ---

    def _compute(self) -> Tensor:
        """Run forward, zero_grad and backward, as Lightning's closure does. Return the detached loss."""
        batch, batch_idx, window = self._batch, self._batch_idx, self._window
        is_first = batch_idx % window == 0
        if is_first and self._dropped is not None:
            for parameter in self._dropped:
                parameter.grad = None
        loss: Tensor
        if self._context is None:
            loss = self._forward(batch, batch_idx)
        else:
            with self._context():
                loss = self._forward(batch, batch_idx)
        if window != 1:
            loss = loss / window
        if is_first:
            self._clear()
        if self._is_backward_plain:
            self._backward(loss)
        else:
            self._strategy.backward(loss, self._optimizer)
        return loss.detach()

    def _clear(self) -> None:
        progress, optimizer = self._progress.zero_grad, self._optimizer
        progress.increment_ready()
        for hook in self._before_zero_grad:
            hook(self.trainer, self.module, optimizer)
        progress.increment_started()
        if self._zero_grad is not None:
            self._zero_grad(self.trainer.current_epoch, self._batch_idx, optimizer)
        elif self._dropped is None:
            optimizer.zero_grad()
        progress.increment_completed()

    def _backward(self, loss: Tensor) -> None:
        trainer, module = self.trainer, self.module
        loss = self._precision.scale(loss)
        for hook in self._before_backward:
            hook(trainer, module, loss)
        if self._module_backward is None:
            loss.backward()
        else:
            self._module_backward(loss)
        for hook in self._after_backward:
            hook(trainer, module)

    def _update_directly(self) -> None:
        """Run an optimizer step without a closure. Optimizers that call the closure once at the start need none."""
        precision, optimizer = self._precision, self._optimizer
        self._compute()
        if self._step_unscaled is None:
            precision.unscale(optimizer)
        for hook in self._before_step:
            hook(self.trainer, self.module, optimizer)
        if self._clips:
            self.module.configure_gradient_clipping(
                optimizer,
                gradient_clip_val=self.trainer.gradient_clip_val,
                gradient_clip_algorithm=self.trainer.gradient_clip_algorithm,
            )
        else:
            self.module.observer.after_clipping()
        if self._step_unscaled is not None:
            self._step_unscaled()
            return
        precision.step(optimizer)
        precision.update()

    def _update_by_closure(self) -> None:
        wrapped = self.module.optimizers()
        assert isinstance(wrapped, LightningOptimizer)  # also with phases: PhaseOptimizers is one optimizer
        self.module.optimizer_step(self.trainer.current_epoch, self._batch_idx, wrapped, self._compute)


def _steps_plainly(strategy: LightningStrategy) -> bool:
    """Return whether the strategy runs the optimizer step unchanged."""
    own = type(strategy).optimizer_step
    if isinstance(strategy, WrapsModule):
        return strategy.is_plain
    # Lightning's DDPStrategy overrides the method for model averaging, which exp's strategies never use.
    return own is LightningStrategy.optimizer_step or (is_own(strategy) and own is DDPStrategy.optimizer_step)


def why_one_by_one(trainer: RunTrainer) -> str | None:
    """Return a line with the reasons why the run needs Lightning's own loop; None if it does not."""
    return "; ".join(_reasons(trainer)) or None


def _reasons(trainer: RunTrainer) -> Iterator[str]:
    yield from foreign_parts(trainer, TRAINING_HOOKS, often="at every step")
    for callback in trainer.callbacks:
        for name, hook in getattr(callback, "hooks", {}).items() if is_own(callback) else ():
            if NEED in hook.all_needs:
                yield f"the hook {name} needs one step per call of the loop"
    strategy = trainer.strategy
    if is_own(strategy) and strategy.handles_gradient_accumulation:
        yield f"the strategy {type(strategy).__name__} accumulates gradients itself"


def foreign_parts(trainer: RunTrainer, hooks: Sequence[str], *, often: str) -> Iterator[str]:
    """Yield a sentence for each part of the Trainer that is not from exp and may act on a batch.

    Args:
        trainer: The Trainer.
        hooks: Names of batch hooks.
        often: Frequency of the hooks for the sentence, such as "at every step".
    """
    module = trainer.lightning_module
    owners: list[tuple[str, object, type]] = [
        (f"the callback {type(one).__name__}", one, Callback) for one in trainer.callbacks if not is_own(one)
    ]
    for title, owner, base in [*owners, (type(module).__name__, module, LightningModule)]:
        found = [name for name in hooks if find_override(owner, base, name) is not None]
        if found:
            yield f"{title} acts {often}, in {', '.join(found)}"
    strategy, precision = trainer.strategy, trainer.precision_plugin
    parts = {
        "module": (module, isinstance(module, TrainingModule)),
        "strategy": (strategy, is_own(strategy) or type(strategy) is SingleDeviceStrategy),
        "precision": (precision, type(precision) in (RunPrecision, ScaledPrecision)),
        "profiler": (trainer.profiler, type(trainer.profiler) is PassThroughProfiler),
        "data module": (trainer.datamodule, isinstance(trainer.datamodule, RunData)),
    }
    for word, (part, is_known) in parts.items():
        if not is_known:
            yield f"the {word} {type(part).__name__} is not a class of exp"


def is_own(part: object) -> bool:
    """Return whether the object's class is defined in exp. Subclasses in other packages do not count."""
    return type(part).__module__.partition(".")[0] == "exp"
