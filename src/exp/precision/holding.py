"""The adapter of what lets the device leave out a step of an optimizer, without a look from the host.

Relied on, and tested (torch 2.13): an optimizer that was made fused has `_step_supports_amp_scaling`; its step reads
the attributes `grad_scale` and `found_inf`, and changes neither parameters nor state where `found_inf`, 0-d in float32,
is not 0. torch.amp.GradScaler sets both itself, from what it found, and takes them off again.
"""

from __future__ import annotations

from torch import Tensor
from torch.optim import Optimizer


def can_hold(optimizer: Optimizer) -> bool:
    """Whether the optimizer's step can be held. Not before its first one, which makes its state."""
    fused = getattr(optimizer, "_step_supports_amp_scaling", False)
    return bool(fused) and len(optimizer.state) > 0


def hold(optimizer: Optimizer, flag: Tensor) -> None:
    """Every step of the optimizer changes nothing while `flag` is not 0, until `release`. Not under a loss scale."""
    optimizer.grad_scale = None  # type: ignore[attr-defined]
    optimizer.found_inf = flag  # type: ignore[attr-defined]


def release(optimizer: Optimizer) -> None:
    """Takes `hold` back."""
    for name in ("grad_scale", "found_inf"):
        if name in vars(optimizer):
            delattr(optimizer, name)
