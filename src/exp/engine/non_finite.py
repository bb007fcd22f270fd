"""Checks that keep non-finite numbers out of checkpoints and end runs that have them.

runtime.non_finite     if a loss, a gradient or a weight is not finite
stop                   the run ends with a NonFiniteError; earlier checkpoints remain
skip                   steps with such a gradient change nothing (precision/scaler.py and `UndoneForward`)
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from exp.engine.checkpoint import CURRENT, State
from exp.errors import NonFiniteError
from exp.nested import tensors_in
from exp.precision.plugin import RunPrecision
from exp.shared_types import Batch
from exp.spelling import among
from exp.strategies.whole_state import local_part

# Names of kinds of non-finite numbers. A buffer may contain some of them intentionally.
Kinds = frozenset[str]
INFINITIES: Kinds = frozenset({"infinity", "-infinity"})
FIXES = (
    "Lower optimizer.lr or set trainer.gradient_clip_val; add '+hooks=nan_guard', which stops before such a step "
    "and names the layer; or write runtime.non_finite=skip"
)
# Advice for a user's LightningModule, which supports neither the hook nor skipped steps.
OWN_FIXES = (
    "Lower the learning rate or set trainer.gradient_clip_val; trainer.detect_anomaly=true names the operation with "
    "the first such gradient"
)


def kinds_by_design(module: nn.Module) -> dict[str, Kinds]:
    """Return the kinds of non-finite numbers that each entry of a state dict may contain.

    These are the kinds that the entry contains now, such as -inf in a mask. Trained parameters may contain none.
    """
    learning = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    held = {name: value for name, value in module.state_dict().items() if isinstance(value, Tensor)}
    suspects = {name for name, _ in _suspects(list(held.items()))}
    return {name: _kinds(held[name]) if name in suspects - learning else frozenset() for name in held}


def require_finite(
    state: State, by_design: Mapping[str, Kinds], trainer: Trainer, *, saved: str, fixes: str = FIXES
) -> None:
    """Raise NonFiniteError if a checkpoint contains unexpected non-finite numbers. Every rank must call this function.

    Weights, averaged weights and optimizer states are checked.

    Args:
        state: Checkpoint.
        by_design: Result of `kinds_by_design`. An entry that is not listed may contain infinities.
        trainer: The Trainer.
        saved: Description of the last good checkpoint, for the message.
        fixes: Advice for the message.

    Raises:
        NonFiniteError: A number is not finite. Raised on all ranks if at least one rank has such a number.
    """
    found = broken_entries(state, by_design)
    is_broken = bool(found)
    if trainer.world_size > 1:
        flag = torch.tensor(float(is_broken), device=trainer.strategy.root_device)
        is_broken = bool(trainer.strategy.reduce(flag, reduce_op="max") > 0)
    if is_broken:
        what = among(found, count=6) if found else "tensors of other ranks"
        raise NonFiniteError(
            f"not finite after step {trainer.global_step}: {what}. This state is not saved; {saved}. {fixes}"
        )


def broken_entries(state: State, by_design: Mapping[str, Kinds]) -> list[str]:
    """Return the names of tensors with non-finite numbers that `by_design` does not allow."""
    named = [(name, value) for name, value in state["state_dict"].items() if isinstance(value, Tensor)]
    average = state[CURRENT].items() if CURRENT in state else ()
    named += [(name, value) for name, value in average if isinstance(value, Tensor)]
    found = [name for name, value in _suspects(named) if _kinds(value) - by_design.get(name, INFINITIES)]
    states = [("the optimizer's state", value) for value in tensors_in(state.get("optimizer_states"))]
    found += [name for name, value in _suspects(states) if _kinds(value)]
    return list(dict.fromkeys(name.removeprefix("network.") for name in found))


def refuse_lost(loss: float, index: int, *, is_scaled: bool, saved: str, fixes: str = FIXES) -> None:
    """Raise NonFiniteError for a loss that is nan or infinite.

    An infinite loss is allowed under a loss scale, because the scale will fall.

    Args:
        loss: The loss.
        index: Number of the optimizer step.
        is_scaled: Whether the precision uses a loss scale.
        saved: Description of the last good checkpoint, for the message.
        fixes: Advice for the message.
    """
    if not math.isnan(loss) and (math.isfinite(loss) or is_scaled):
        return
    name = "not a number" if math.isnan(loss) else "infinite"
    raise NonFiniteError(f"the loss is {name} ({loss}) at step {index}; expected a finite number. {saved}. {fixes}")


class UndoneForward(Callback):
    """Callback that restores the buffers after a skipped step, such as the statistics of BatchNorm."""

    def __init__(self) -> None:
        super().__init__()
        self._buffers: list[Tensor] = []
        self._before: list[Tensor] = []
        self._step, self._skipped = 0, torch.zeros(())

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._buffers = list(pl_module.buffers())
        self._step = trainer.global_step

    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Batch, batch_idx: int) -> None:
        if batch_idx % trainer.accumulate_grad_batches == 0:
            self._before = [buffer.clone() for buffer in self._buffers]
            self._skipped = _skipped_steps(trainer)

    @torch.no_grad()
    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self._step:
            return
        self._step = trainer.global_step
        # Computed on the device, because reading the number would wait for the device.
        is_skipped = _skipped_steps(trainer) > self._skipped
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(is_skipped.to(buffer.device), before, buffer))


def _skipped_steps(trainer: Trainer) -> Tensor:
    precision = trainer.precision_plugin
    assert isinstance(precision, RunPrecision)
    return torch.as_tensor(precision.skipped_steps)


def _suspects(named: Sequence[tuple[str, Tensor]]) -> Iterator[tuple[str, Tensor]]:
    """Yield the tensors that may contain non-finite numbers. A tensor with a finite sum contains none.

    Each tensor is read once, and each device is waited for once.
    """
    held: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        values = _values(tensor)
        if values.numel() and not values.is_meta:
            held.setdefault(values.device, []).append((name, values))
    for entries in held.values():
        sums = torch.stack([values.sum().to(torch.float32) for _, values in entries]).tolist()
        yield from (entry for entry, total in zip(entries, sums, strict=True) if not math.isfinite(total))


def _values(tensor: Tensor) -> Tensor:
    """Return this rank's numbers of a tensor as floating-point numbers. For integers, the result is empty."""
    values = local_part(tensor.detach())
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        return torch.view_as_real(values)
    if not values.is_floating_point():
        return values.new_empty(0)
    return values if values.dtype.itemsize > 1 else values.float()


def _kinds(tensor: Tensor) -> Kinds:
    values = _values(tensor)
    found = {"nan": values.isnan(), "infinity": values == math.inf, "-infinity": values == -math.inf}
    return frozenset(kind for kind, places in found.items() if places.any())
