"""Checks that prevent checkpoints with non-finite numbers, and end runs with such numbers.

runtime.non_finite     if a loss, a gradient or a weight is not finite
stop                   the run ends with a NonFiniteError; earlier checkpoints remain
skip                   steps with a non-finite gradient change nothing (precision/scaler.py and `UndoneForward`)
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn

from exp.engine.checkpoint import CURRENT, State
from exp.engine.progress import is_on_any_rank
from exp.errors import NonFiniteError
from exp.nested import tensors_in
from exp.precision.plugin import RunPrecision
from exp.shared_types import Batch
from exp.spelling import among
from exp.strategies.whole_state import local_part

NOT_FINITE = "weights or states of the optimizer are not finite after step"
# All checkpoints are checked before they are written.
NOT_SAVED = "This state is not saved, and all numbers in the saved checkpoints are finite"
FIXES = (
    "Lower the learning rate or set trainer.gradient_clip_val; trainer.detect_anomaly=true names the operation with "
    "the first such gradient"
)


def finite_names(module: nn.Module) -> frozenset[str]:
    """Return the names of the tensors in a module's state dict that must stay finite.

    These are the trained parameters, and all other tensors that are finite now. For example, a mask with -inf is
    excluded.
    """
    learning = {name for name, parameter in module.named_parameters() if parameter.requires_grad}
    held = [(name, value) for name, value in module.state_dict().items() if isinstance(value, Tensor)]
    return frozenset(name for name, _ in held) - (set(_non_finite(held)) - learning)


def require_finite(state: State, names: frozenset[str], trainer: Trainer) -> None:
    """Raise NonFiniteError if a checkpoint contains unexpected non-finite numbers. Every rank must call this function.

    Weights, averaged weights and optimizer states are checked.

    Args:
        state: Checkpoint.
        names: Result of `finite_names`.
        trainer: The Trainer.

    Raises:
        NonFiniteError: A number is not finite. Raised on all ranks if at least one rank has such a number.
    """
    found = broken_entries(state, names)
    if is_on_any_rank(trainer, bool(found)):
        what = among(found, count=6) if found else "tensors of other ranks"
        raise NonFiniteError(f"{NOT_FINITE} {trainer.global_step}: {what}. {NOT_SAVED}. {FIXES}")


def broken_entries(state: State, names: frozenset[str]) -> list[str]:
    """Return the names of tensors in a checkpoint with unexpected non-finite numbers.

    Args:
        state: Checkpoint.
        names: Result of `finite_names`.
    """
    named = [*state["state_dict"].items(), *state.get(CURRENT, {}).items()]
    found = _non_finite([(name, value) for name, value in named if name in names and isinstance(value, Tensor)])
    found += _non_finite([("the optimizer's state", one) for one in tensors_in(state.get("optimizer_states"))])
    return list(dict.fromkeys(name.removeprefix("network.") for name in found))


def refuse_lost(loss: float, index: int, *, is_scaled: bool) -> None:
    """Raise NonFiniteError for a loss that is nan or infinite.

    An infinite loss is allowed if the precision uses a loss scale, because the scale decreases after an overflow.

    Args:
        loss: The loss.
        index: Number of the optimizer step.
        is_scaled: Whether the precision uses a loss scale.
    """
    if not math.isnan(loss) and (math.isfinite(loss) or is_scaled):
        return
    name = "not a number" if math.isnan(loss) else "infinite"
    raise NonFiniteError(f"the loss is {name} ({loss}) at step {index}; expected a finite number. {NOT_SAVED}. {FIXES}")


class UndoneForward(Callback):
    """Callback that restores buffers, such as the statistics of BatchNorm, after a step that was skipped."""

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
        # Compared on the device, because reading the number on the host would wait for the device.
        is_skipped = _skipped_steps(trainer) > self._skipped
        for buffer, before in zip(self._buffers, self._before, strict=True):
            buffer.copy_(torch.where(is_skipped.to(buffer.device), before, buffer))


def _skipped_steps(trainer: Trainer) -> Tensor:
    precision = trainer.precision_plugin
    assert isinstance(precision, RunPrecision)
    return torch.as_tensor(precision.skipped_steps)


def _non_finite(named: Sequence[tuple[str, Tensor]]) -> list[str]:
    """Return the names of the tensors with numbers that are not finite.

    For speed, each tensor is summed on its device, and all sums of a device are copied together. If the sum is finite,
    all numbers of the tensor are finite.
    """
    held: dict[torch.device, list[tuple[str, Tensor]]] = {}
    for name, tensor in named:
        values = _values(tensor)
        if values.numel() and not values.is_meta:
            held.setdefault(values.device, []).append((name, values))
    found: list[str] = []
    for entries in held.values():
        sums = torch.stack([values.sum().to(torch.float32) for _, values in entries]).tolist()
        suspects = [entry for entry, total in zip(entries, sums, strict=True) if not math.isfinite(total)]
        found += [name for name, values in suspects if not values.isfinite().all()]
    return found


def _values(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor as floating-point numbers. For integers, return an empty tensor."""
    values = local_part(tensor.detach())
    if values.is_sparse:
        values = values.coalesce().values()
    if values.is_complex():
        return torch.view_as_real(values)
    if not values.is_floating_point():
        return values.new_empty(0)
    return values if values.dtype.itemsize > 1 else values.float()
