"""An exponential moving average of the weights, which is what is validated, tested and kept in checkpoints.

Lightning 2.6 has EMAWeightAveraging; with it `trainer.test(ckpt_path="best")` after fit loads the weights that are not
averaged, it deep-copies the whole LightningModule with all that hooks hang on it, and it averages tensor by tensor.

Private of torch (2.13), and tested: `_foreach_lerp_` and `_foreach_copy_`, many tensors by one call; where a module has
its parameters: `_parameters`.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Any, ClassVar

import torch
from annotated_types import Ge, Interval
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.distributed.fsdp import FSDPModule

from exp.engine.checkpoint import CURRENT, State
from exp.precision.plugin import ScaledPrecision
from exp.strategies.whole_state import WholeState, local

log = logging.getLogger(__name__)


class ExponentialMovingAverage(Callback):
    """An average of the weights: after every n-th optimizer step d average + (1 - d) weights; at first the weights.

    Parameters that are frozen are copied. Buffers, such as BatchNorm's statistics or a mask, are those of the network.
    A step that is skipped because a gradient is not finite does not count. The average of
    weights in half precision is float32: what one step adds is soon below the last place of bfloat16. Validation
    within fit, the checkpoints' `state_dict` and the module after fit have the averages; training goes on with, and a
    resumed run gets back, the weights themselves.

    decay: d.
    every_n_steps: optimizer steps from one update to the next.
    start_step: the optimizer step, counted from 1, of the first update.
    warmup: take min(decay, (1 + n) / (10 + n)) after n updates, so that a short run is not all beginning (the rule of
        TensorFlow's ExponentialMovingAverage with num_updates).
    """

    # Read by strategies, as of any callback that keeps an average of the weights.
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
        self._average: dict[str, Tensor] = {}
        self._current: dict[str, Tensor] = {}

    @property
    def average(self) -> Mapping[str, Tensor]:
        """Return the averages of the parameters by their names in the state dict; empty before the first update."""
        return self._average

    def on_fit_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        # Restored before the strategy moved the module to its device; and fit may be called again.
        self._swap_out(pl_module)
        own = _tensors(pl_module)
        if isinstance(trainer.strategy, WholeState):
            # A checkpoint has them whole, and so they are until the strategy has placed the network.
            self._average = trainer.strategy.parts_of(self._average, own)
        self._average = {name: tensor.to(own[name].device) for name, tensor in self._average.items()}

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
        self._swap_in(pl_module)  # after a resume that has nothing left to train, too

    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if not self._average:
            return
        own, strategy = checkpoint["state_dict"], trainer.strategy
        if isinstance(strategy, WholeState):
            average, current = strategy.gather_all(self._average), strategy.gather_all(self._current)
        else:
            # As the module's hooks of state dicts would have them saved.
            average, current = _saved(pl_module, self._average), _saved(pl_module, self._current)
        checkpoint[CURRENT] = {name: current.get(name, tensor) for name, tensor in own.items()}
        checkpoint["state_dict"] = {name: average.get(name, tensor) for name, tensor in own.items()}

    def on_load_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: State) -> None:
        if trainer.state.fn != TrainerFn.FITTING:
            return  # to evaluate: the state_dict, which was loaded, holds the averages
        self._current = {}
        if CURRENT not in checkpoint:
            self._average = {}
            log.warning("the checkpoint has no averaged weights; the average starts with the weights that it has")
            return
        saved, own = checkpoint["state_dict"], _tensors(pl_module)
        if isinstance(trainer.strategy, WholeState):
            self._average = {name: _wide(saved[name]) for name in own}
        else:
            self._average = {name: _wide(tensor.detach()) for name, tensor in own.items()}
            with _holding(pl_module, self._average):
                pl_module.load_state_dict(saved)
        pl_module.load_state_dict(checkpoint[CURRENT])

    def state_dict(self) -> dict[str, int]:
        return {"updates": self._updates, "latest_step": self._latest_step, "skipped": self._skipped}

    def load_state_dict(self, state_dict: dict[str, int]) -> None:
        self._updates = state_dict["updates"]
        self._latest_step = state_dict["latest_step"]
        self._skipped = state_dict["skipped"]

    @torch.no_grad()
    def _update(self, own: Mapping[str, Tensor]) -> None:
        if not self._average:
            self._average = {name: _wide(tensor.detach()) for name, tensor in own.items()}
            self._updates = 1
            return
        decay = min(self.decay, (1 + self._updates) / (10 + self._updates)) if self.warmup else self.decay
        trained = [name for name, tensor in own.items() if tensor.requires_grad]
        # Of DTensors the local parts: torch's kernels for many refuse lists that mix the two kinds.
        averages = [local(self._average[name]) for name in trained]
        weights = [local(own[name]) for name in trained]
        weights = [weight.to(average.dtype) for weight, average in zip(weights, averages, strict=True)]
        torch._foreach_lerp_(averages, weights, 1.0 - decay)
        for name in own.keys() - set(trained):
            local(self._average[name]).copy_(local(own[name]))
        self._updates += 1

    def _swap_in(self, module: LightningModule) -> None:
        """Put the averages into the module, and set its own values aside."""
        if self._average and not self._current:
            own = _tensors(module)
            self._current = {name: tensor.detach().clone() for name, tensor in own.items()}
            _copy(own, self._average)

    def _swap_out(self, module: LightningModule) -> None:
        if self._current:
            _copy(_tensors(module), self._current)
            self._current = {}


def _places(module: LightningModule) -> Iterator[tuple[str, dict[str, Any], str]]:
    """Yield of parameters the name in the state dict, and where it is held: mapping, key.

    Not by `state_dict()`: hooks may have other tensors in it. Tied ones come under each name.
    """
    for prefix, part in module.named_modules(remove_duplicate=False):
        if isinstance(part, FSDPModule):
            part.reshard()  # a forward may have left whole tensors in the place of the parts
        for key, tensor in part._parameters.items():
            if tensor is not None:
                yield f"{prefix}.{key}" if prefix else key, part._parameters, key


def _tensors(module: LightningModule) -> dict[str, Tensor]:
    return {name: held[key] for name, held, key in _places(module)}


@contextmanager
def _holding(module: LightningModule, tensors: Mapping[str, Tensor]) -> Iterator[None]:
    """Hold these tensors in the place of the module's own, in their own dtypes: for its state dict, and to load one."""
    replaced = [(held, key, held[key], tensors[name]) for name, held, key in _places(module) if name in tensors]
    try:
        for held, key, _, tensor in replaced:
            held[key] = tensor
        yield
    finally:
        for held, key, own, _ in replaced:
            held[key] = own


def _saved(module: LightningModule, tensors: Mapping[str, Tensor]) -> dict[str, Any]:
    """Return the state dict that the module would have with these; nothing where there are none."""
    if not tensors:
        return {}
    with _holding(module, tensors):
        return module.state_dict()


def _wide(tensor: Tensor) -> Tensor:
    """Copy a tensor, in float32 where it is in half precision."""
    half = tensor.is_floating_point() and tensor.dtype.itemsize < torch.float32.itemsize
    return tensor.to(torch.float32) if half else tensor.clone()


@torch.no_grad()
def _copy(targets: Mapping[str, Tensor], sources: Mapping[str, Tensor]) -> None:
    names: Iterable[str] = targets.keys()
    torch._foreach_copy_([local(targets[name]) for name in names], [local(sources[name]) for name in names])
