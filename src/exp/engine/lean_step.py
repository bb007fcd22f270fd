"""What one batch of a lean execution is: everything that does nothing in this run is left out.

    place the batch                          where the strategy would, if it is not there
    training_step                            under the precision's forward context
    zero_grad                                at the first batch of a window
    scale, backward                          on_before_backward, on_after_backward of those that act
    at a window's last batch:
        unscale; on_before_optimizer_step of those that act; clipping; optimizer step; the scale's update

A strategy, a module or an optimizer with a way of its own for one of these is asked for it, as Lightning would. A
callback may ask for batches without zero_grad and backward (StochasticWeightAveraging, for its batch norms).

Relied on, and tested (lightning 2.6.6): what `Strategy.training_step`, `backward`, `batch_to_device` and
`optimizer_step`, `LightningModule.backward`, `optimizer_zero_grad` and `optimizer_step`, and `Precision.optimizer_step`
do, which is what stands here in their place; `optim_progress` and `_skip_backward` of the automatic optimization;
`_lightning_optimizers`.
And of torch 2.13: `torch.autograd.backward` hands the loss and a one to the private `_engine_run_backward`.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import TYPE_CHECKING, Any

import torch
from lightning.pytorch import Callback, LightningModule
from lightning.pytorch.loops.utilities import _block_parallel_sync_behavior
from lightning.pytorch.plugins.precision import Precision
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor
from torch.autograd.graph import _engine_run_backward
from torch.optim import LBFGS, Optimizer
from torch.overrides import has_torch_function_unary

from exp.engine.module import TrainingModule
from exp.engine.overhead import overridden
from exp.optim.direct_step import DirectStep
from exp.precision.plugin import RunPrecision
from exp.strategies.lightning_ddp import ExpDDPStrategy

if TYPE_CHECKING:
    from exp.engine.lean import LeanEpochLoop

# What Lightning hands to on_train_batch_end; none of exp's callbacks reads it.
Outputs = dict[str, Any]


class LeanStep:
    """The parts of a step, looked up once an execution, and where the step stands.

    accumulates: whether the batch that was done last was not its window's last.
    batches: of the epoch; infinite where it is not known.
    schedules: those that move at a step; plateau_by_step: whether there are others, which need a value.
    """

    def __init__(self, loop: LeanEpochLoop) -> None:
        trainer = loop.trainer
        self.trainer = trainer
        self.module: TrainingModule = trainer.lightning_module
        self.accumulates = False
        self.outputs: Outputs = {}
        self._strategy: LightningStrategy = trainer.strategy
        self._precision: RunPrecision = trainer.precision_plugin
        self._progress = loop.automatic_optimization.optim_progress.optimizer
        self._skips_backward = loop.automatic_optimization._skip_backward
        self._optimizer: Optimizer = trainer.optimizers[0]
        self.on_batch_start = self._acting("on_train_batch_start")
        if type(self._strategy).on_train_batch_start is not LightningStrategy.on_train_batch_start:
            self.on_batch_start.append(lambda _, __, batch, index: self._strategy.on_train_batch_start(batch, index))
        self.on_batch_end = self._acting("on_train_batch_end")
        self._before_zero_grad = self._acting("on_before_zero_grad")
        self._before_backward = self._acting("on_before_backward")
        self._after_backward = self._acting("on_after_backward")
        self._before_step = self._acting("on_before_optimizer_step")
        self._choose_forward()
        self._choose_backward()
        self._choose_update()
        self.batches = trainer.num_training_batches
        self.schedules = [c for c in trainer.lr_scheduler_configs if c.interval == "step" and not c.reduce_on_plateau]
        self.plateau_by_step = any(c.interval == "step" and c.reduce_on_plateau for c in trainer.lr_scheduler_configs)
        self._window = trainer.accumulate_grad_batches

    def place(self, batch: Any) -> Any:
        """The batch in the precision's dtype and on its device."""
        if self._converts:
            batch = self._precision.convert_input(batch)
        return batch if self._to_device is None else self._to_device(batch)

    def run(self, batch: Any, batch_idx: int, *, is_last: bool) -> None:
        """Forward and backward, and the optimizer's step at a window's end. is_last: of the epoch."""
        self._batch, self._batch_idx = batch, batch_idx
        self.accumulates = not is_last and (batch_idx + 1) % self._window != 0
        if self.accumulates:
            with _block_parallel_sync_behavior(self._strategy, block=True):
                self._compute()
        else:
            self._progress.step.increment_ready()
            self._update()
            self._progress.step.increment_completed()
        self._batch = None

    # --- which way each part goes ---

    def _acting(self, name: str) -> list[Callable[..., Any]]:
        found = (overridden(callback, Callback, name) for callback in self.trainer.callbacks)
        return [hook for hook in found if hook is not None]

    def _choose_forward(self) -> None:
        strategy, precision = self._strategy, self._precision
        self._converts = precision.word.double
        self._to_device = strategy.batch_to_device
        if type(strategy).batch_to_device is LightningStrategy.batch_to_device:
            on_cpu = strategy.root_device.type == "cpu"
            self._to_device = None if on_cpu else self._transfer
        self._forward, self._context = strategy.training_step, None
        own = type(strategy).training_step
        if type(precision).train_step_context is not Precision.train_step_context:
            return
        if own is LightningStrategy.training_step and strategy.model is self.module:
            self._forward = self.module.training_step
        elif own is ExpDDPStrategy.training_step and strategy.is_plain and strategy.model is not self.module:
            self._forward = self._forward_through_wrapper
        else:
            return
        self._context = None if type(precision.forward_context()) is nullcontext else precision.forward_context

    def _forward_through_wrapper(self, batch: Any, batch_idx: int) -> Tensor:
        """DistributedDataParallel calls the module's forward, which is its training step meanwhile."""
        own = vars(self.module)
        own["forward"] = self.module.training_step
        try:
            return self._strategy.model(batch, batch_idx)
        finally:
            del own["forward"]

    def _transfer(self, batch: Any) -> Any:
        return self.trainer.datamodule.transfer_batch_to_device(batch, self._strategy.root_device, 0)

    def _choose_backward(self) -> None:
        kind = type(self._strategy)
        # Before and after a backward, Lightning's ddp has something to do under manual optimization only.
        around = (kind.pre_backward, kind.post_backward)
        known = (LightningStrategy.pre_backward, LightningStrategy.post_backward)
        of_ddp = (DDPStrategy.pre_backward, DDPStrategy.post_backward)
        self._is_backward_plain = kind.backward is LightningStrategy.backward and around in (known, of_ddp)
        self._ones: dict[Any, Tensor] = {}
        self._module_backward = _own(self.module, LightningModule, "backward")
        self._zero_grad = _own(self.module, LightningModule, "optimizer_zero_grad")
        self._parameters = None
        if self._zero_grad is None and type(self._optimizer).zero_grad is Optimizer.zero_grad:
            self._parameters = [p for group in self._optimizer.param_groups for p in group["params"]]

    def _choose_update(self) -> None:
        optimizer, kind = self._optimizer, type(self._optimizer)
        is_direct = (
            _own(self.module, LightningModule, "optimizer_step") is None
            and _steps_plainly(self._strategy)
            # Others may call the closure twice, or look at the loss.
            and kind.__module__.startswith("torch.optim.")
            and kind is not LBFGS
            and not optimizer._optimizer_step_pre_hooks
        )
        self._update = self._update_directly if is_direct else self._update_by_closure
        # Under a loss scale the step is the scaler's.
        self._step_unscaled = DirectStep(optimizer) if is_direct and not self._precision.is_scaled else None
        clipping = type(self.module).configure_gradient_clipping
        self._clips = bool(self.trainer.gradient_clip_val) or clipping is not TrainingModule.configure_gradient_clipping

    # --- the step ---

    def _compute(self) -> Tensor:
        """Lightning's closure: forward, zero_grad, backward. Returns the loss, detached."""
        batch_idx, window = self._batch_idx, self._window
        if self._context is None:
            loss = self._forward(self._batch, batch_idx)
        else:
            with self._context():
                loss = self._forward(self._batch, batch_idx)
        if window != 1:
            loss = loss / window
        if self._skips_backward:
            return loss.detach()
        if batch_idx % window == 0:
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
        if self._parameters is not None:
            for parameter in self._parameters:
                parameter.grad = None
        elif self._zero_grad is not None:
            self._zero_grad(self.trainer.current_epoch, self._batch_idx, optimizer)
        else:
            optimizer.zero_grad()
        progress.increment_completed()

    def _backward(self, loss: Tensor) -> None:
        trainer, module = self.trainer, self.module
        loss = self._precision.scale(loss)
        for hook in self._before_backward:
            hook(trainer, module, loss)
        if self._module_backward is None:
            self._run_backward(loss)
        else:
            self._module_backward(loss)
        for hook in self._after_backward:
            hook(trainer, module)

    def _run_backward(self, loss: Tensor) -> None:
        """`loss.backward()` of a plain number, without 10 us of looks at what else it might be."""
        if type(loss) is not Tensor or loss.dim() or has_torch_function_unary(loss):
            loss.backward()
            return
        one = self._ones.get((loss.dtype, loss.device))
        if one is None:
            one = self._ones[loss.dtype, loss.device] = torch.ones_like(loss.detach())
        _engine_run_backward((loss,), (one,), False, False, (), allow_unreachable=True, accumulate_grad=True)

    def _update_directly(self) -> None:
        """For an optimizer that calls its closure once, first of all: the same without one."""
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
        elif self.module.last.after_clipping is not None:
            self.module.last.after_clipping()
        if self._step_unscaled is not None:
            self._step_unscaled()
            return
        precision.step(optimizer)
        precision.update()

    def _update_by_closure(self) -> None:
        wrapped = self._strategy._lightning_optimizers[0]
        self.module.optimizer_step(self.trainer.current_epoch, self._batch_idx, wrapped, self._compute)


def _own(owner: Any, base: type, name: str) -> Callable[..., Any] | None:
    """The method, where a subclass has one of its own."""
    return None if getattr(type(owner), name) is getattr(base, name) else getattr(owner, name)


def _steps_plainly(strategy: LightningStrategy) -> bool:
    """Whether the strategy adds nothing to an optimizer's step."""
    own = type(strategy).optimizer_step
    if own is ExpDDPStrategy.optimizer_step:
        return strategy.is_plain
    if own is DDPStrategy.optimizer_step:
        return strategy._model_averager is None
    return own is LightningStrategy.optimizer_step
