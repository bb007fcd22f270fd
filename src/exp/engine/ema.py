"""Callback that averages the weights exponentially for validation, tests and checkpoints.

The callback replaces Lightning's EMAWeightAveraging for two reasons. With Lightning's callback (2.6),
`trainer.test(ckpt_path="best")` after fit loads weights that are not averaged. Lightning's callback also deep-copies
the whole LightningModule, including all objects that hooks attach to the module.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Annotated, ClassVar

import torch
from annotated_types import Interval
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule
from torch.optim.swa_utils import get_ema_multi_avg_fn

from exp.engine.checkpoint import CURRENT, State
from exp.errors import RunError
from exp.precision.plugin import ScaledPrecision
from exp.strategies.whole_state import WholeState, local_part

log = logging.getLogger(__name__)


class ExponentialMovingAverage(Callback):
    """Callback that averages the weights after each optimizer step.

    An update sets `average = decay * average + (1 - decay) * weights`. The first update copies the weights. Frozen
    parameters are copied in every update. Buffers, such as the statistics of BatchNorm, are not averaged. If the
    optimizer skips a step because a gradient is not finite, the averages are not updated. Averages of half-precision
    weights are float32, because an update is often smaller than the precision of bfloat16.

    Validation within fit uses the averages, and so does the module after fit. The `state_dict` of a checkpoint contains
    the averages. Training uses the weights without averaging. A resumed run restores the averages and the weights.

    Args:
        decay: Weight of the old average. Default: 0.999.
        warmup: Whether the decay after n updates is min(decay, (1 + n) / (10 + n)). A smaller decay at the start
            reduces the influence of the first weights. TensorFlow's ExponentialMovingAverage has the same rule.
            Default: True.
    """

    # Strategies read this attribute of every callback.
    averages_weights: ClassVar[bool] = True

    def __init__(
        self,
        *,
        decay: Annotated[float, Interval(ge=0, lt=1)] = 0.999,
        warmup: bool = True,
    ) -> None:
        self.decay = decay
        self.warmup = warmup
        self._updates = 0
        self._latest_step = 0
        self._taken = 0
        self.average: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # If fit is called again, the module contains the averages. After a resume, the strategy has moved the module to
        # its device, but not the loaded averages.
        self._swap_out(pl_module)
        own = _tensors(pl_module)
        if isinstance(trainer.strategy, WholeState):
            # A checkpoint has whole tensors. They are split now, because the strategy has only now split the network.
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
                return
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
        saved, strategy, average, current = checkpoint["state_dict"], trainer.strategy, self.average, self._current
        if isinstance(strategy, WholeState):
            average, current = strategy.gather_all(average), strategy.gather_all(current)
        if other := average.keys() - saved.keys():
            raise RunError(
                f"the state_dict of {type(pl_module).__name__} has no entry {min(other)}; expected the names of its "
                "parameters. Leave out the callback ema, or the code that changes names in the state_dict"
            )
        checkpoint[CURRENT], checkpoint["state_dict"] = {**saved, **current}, {**saved, **average}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return  # for evaluation: the loaded state_dict has the averages
        self._current = {}
        if CURRENT not in checkpoint:
            self.average = {}
            log.warning("the checkpoint has no averaged weights, so the average starts with its trained weights")
            return
        self.average = {name: _wide(checkpoint["state_dict"][name]) for name in _tensors(pl_module)}
        pl_module.load_state_dict(checkpoint[CURRENT])

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._updates, "latest_step": self._latest_step}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._updates = state_dict["updates"]
        self._latest_step = state_dict["latest_step"]

    @torch.no_grad()
    def _update(self, own: Mapping[str, Tensor]) -> None:
        if not self.average:
            self.average = {name: _wide(tensor.detach()) for name, tensor in own.items()}
            self._updates = 1
            return
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        # Local shards are used, because torch rejects lists that contain both DTensors and plain tensors.
        averages = [local_part(self.average[name]) for name in trained]
        weights = [local_part(own[name]).to(self.average[name].dtype) for name in trained]
        if trained:
            get_ema_multi_avg_fn(decay)(averages, weights, self._updates)
        for name in own.keys() - set(trained):
            local_part(self.average[name]).copy_(local_part(own[name]))
        self._updates += 1

    def _swap_in(self, module: LightningModule) -> None:
        """Copy the averages into the module, after storing the weights in `_current`."""
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


def _wide(tensor: Tensor) -> Tensor:
    """Return a copy of a tensor, converted to float32 if it has half precision."""
    half = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.to(torch.float32) if half else tensor.clone()


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    for name, target in targets.items():
        local_part(target).copy_(local_part(sources[name]))
