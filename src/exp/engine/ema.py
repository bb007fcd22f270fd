"""Exponential moving average of the weights, which validation, tests and checkpoints use.

Lightning 2.6 has EMAWeightAveraging. This callback replaces it for two reasons. With EMAWeightAveraging,
`trainer.test(ckpt_path="best")` after fit loads weights that are not averaged. It also deep-copies the whole
LightningModule, including all objects that hooks attach to the module.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Annotated, ClassVar, TypeVar

import torch
from annotated_types import Ge, Interval
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor, nn
from torch.distributed.fsdp import FSDPModule
from torch.func import functional_call
from torch.optim.swa_utils import get_ema_multi_avg_fn

from exp.engine.checkpoint import CURRENT, State
from exp.precision.plugin import ScaledPrecision
from exp.strategies.whole_state import WholeState, local_part

log = logging.getLogger(__name__)
Result = TypeVar("Result")


class ExponentialMovingAverage(Callback):
    """Callback that averages the weights: an update sets `average = decay * average + (1 - decay) * weights`.

    The first update copies the weights. Every update copies frozen parameters. Buffers, such as the statistics of
    BatchNorm, are not averaged. Steps that the optimizer skips because a gradient is not finite do not count. Averages
    of half-precision weights are float32, because an update is often smaller than the precision of bfloat16.

    The averages are used by validation within fit, in the `state_dict` of checkpoints, and in the module after fit.
    Training uses the weights. A resumed run restores averages and weights.

    Args:
        decay: Weight of the old average. Default: 0.999.
        every_n_steps: Optimizer steps between two updates. Default: 1.
        start_step: Optimizer step of the first update, counted from 1. Default: 1.
        warmup: Whether to use min(decay, (1 + n) / (10 + n)) as the decay after n updates. This reduces the influence
            of the first weights in a short run. TensorFlow's ExponentialMovingAverage has the same rule. Default: True.
    """

    # Strategies read this attribute of every callback.
    averages_weights: ClassVar[bool] = True

    def __init__(
        self,
        *,
        decay: Annotated[float, Interval(ge=0, lt=1)] = 0.999,
        every_n_steps: Annotated[int, "a whole number of steps", Ge(1)] = 1,
        start_step: Annotated[int, "an optimizer step", Ge(1)] = 1,
        warmup: bool = True,
    ) -> None:
        self.decay = decay
        self.every_n_steps = every_n_steps
        self.start_step = start_step
        self.warmup = warmup
        self._updates = 0
        self._latest_step = 0
        self._skipped, self._taken = 0, 0
        self.average: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # The checkpoint was loaded before the strategy moved the module to its device. Also, fit may be called again.
        self._swap_out(pl_module)
        own = _tensors(pl_module)
        if isinstance(trainer.strategy, WholeState):
            # A checkpoint has whole tensors. The strategy has split the network only at this point.
            self.average = trainer.strategy.parts_of(self.average, own)
        self.average = {name: tensor.to(own[name].device) for name, tensor in self.average.items()}

    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: object, batch: object, batch_idx: int
    ) -> None:
        if trainer.global_step == self._latest_step:
            return  # between two optimizer steps of accumulated batches
        self._latest_step = trainer.global_step
        precision = trainer.precision_plugin
        if isinstance(precision, ScaledPrecision) and precision.skips:
            before, self._taken = self._taken, int(precision.scaler.taken_steps)  # waits for the device
            if self._taken == before:
                self._skipped += 1
                return
        after = self._latest_step - self._skipped - self.start_step
        if after >= 0 and after % self.every_n_steps == 0:
            self._update(_tensors(pl_module))

    def on_validation_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap_in(pl_module)

    def on_validation_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            self._swap_out(pl_module)

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap_in(pl_module)

    def on_fit_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._swap_in(pl_module)  # needed if a resumed run has nothing left to train

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if not self.average:
            return
        own, strategy = checkpoint["state_dict"], trainer.strategy
        if isinstance(strategy, WholeState):
            average, current = strategy.gather_all(self.average), strategy.gather_all(self._current)
        else:
            average = _with(self.average, pl_module, lambda module: module.state_dict())
            current = _with(self._current, pl_module, lambda module: module.state_dict()) if self._current else {}
        checkpoint[CURRENT] = {name: current.get(name, tensor) for name, tensor in own.items()}
        checkpoint["state_dict"] = {name: average.get(name, tensor) for name, tensor in own.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return  # for evaluation: the loaded state_dict has the averages
        self._current = {}
        if CURRENT not in checkpoint:
            self.average = {}
            log.warning("the checkpoint has no averaged weights; the average starts with the weights that it has")
            return
        saved, own = checkpoint["state_dict"], _tensors(pl_module)
        if isinstance(trainer.strategy, WholeState):
            self.average = {name: _wide(saved[name]) for name in own}
        else:
            self.average = {name: _wide(tensor.detach()) for name, tensor in own.items()}
            _with(self.average, pl_module, lambda module: module.load_state_dict(saved))
        pl_module.load_state_dict(checkpoint[CURRENT])

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._updates, "latest_step": self._latest_step, "skipped": self._skipped}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._updates = state_dict["updates"]
        self._latest_step = state_dict["latest_step"]
        self._skipped = state_dict["skipped"]

    @torch.no_grad()
    def _update(self, own: Mapping[str, Tensor]) -> None:
        if not self.average:
            self.average = {name: _wide(tensor.detach()) for name, tensor in own.items()}
            self._updates = 1
            return
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        # Local shards, because torch refuses lists of DTensors and plain tensors.
        averages = [local_part(self.average[name]) for name in trained]
        weights = [local_part(own[name]).to(self.average[name].dtype) for name in trained]
        if trained:
            get_ema_multi_avg_fn(decay)(averages, weights, self._updates)
        for name in own.keys() - set(trained):
            local_part(self.average[name]).copy_(local_part(own[name]))
        self._updates += 1

    def _swap_in(self, module: LightningModule) -> None:
        """Copy the averages into the module. Keep the weights in `_current`."""
        if self.average and not self._current:
            own = _tensors(module)
            self._current = {name: tensor.detach().clone() for name, tensor in own.items()}
            _copy(own, self.average)

    def _swap_out(self, module: LightningModule) -> None:
        if self._current:
            _copy(_tensors(module), self._current)
            self._current = {}


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    """Return the parameters by name. A tied parameter is listed under each of its names."""
    for part in module.modules():
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward may have left whole tensors instead of shards
    return dict(module.named_parameters(remove_duplicate=False))


class _Holder(nn.Module):
    """Wrapper module, so that functional_call can run any function on the wrapped module."""

    def __init__(self, held: LightningModule) -> None:
        super().__init__()
        self.held = held

    def forward(self, function: Callable[[LightningModule], object]) -> object:
        return function(self.held)


def _with(
    tensors: Mapping[str, Tensor], module: LightningModule, function: Callable[[LightningModule], Result]
) -> Result:
    """Return `function(module)`, computed with `tensors` instead of the module's parameters.

    The tensors may have another dtype. Assigning to `parameter.data` would reset the gradient accumulator, to which DDP
    attaches its hooks.
    """
    named = {f"held.{name}": tensor for name, tensor in tensors.items()}
    result: Result = functional_call(_Holder(module), named, (function,), tie_weights=False)
    return result


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, converted to float32 if it has half precision."""
    half = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.to(torch.float32) if half else tensor.clone()


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        local_part(target).copy_(local_part(sources[name]))
