"""What a hook is told before an optimizer steps: what the gradients were made from, and how to make them again."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor

    from exp.hooks.replaying.tracing import Trace


@dataclass(frozen=True, kw_only=True, slots=True)
class Window:
    """The micro-batches behind one step of an optimizer, and their place in the run.

    batches: this rank's, each with its batch_idx, counted from 0. epoch: counted from 0.
    phase, turn: of a run with phases, whose step it is, and which of several passes over the batches; see
        exp.data.randomness.reseed.
    """

    batches: Sequence[tuple[Batch, int]]
    epoch: int
    phase: str | None = None
    turn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One step of one optimizer that is about to be taken: its gradients are true, averaged, and not clipped.

    losses: of the micro-batches, 0-d on their device, this rank's share; of a phase their sum.
    scale: by what the loss was multiplied, 0-d or a float; None without a loss scale.
    objective: the module that gives the loss; it has no parameters that are trained.
    is_compiled: whether the network runs compiled, or in CUDA graphs.
    can_hold: whether the optimizer can leave a step out by a number on its device, as torch's fused ones do.
    hold: takes a 0-d float32 tensor: where it is not 0 when the device comes to it, the step changes nothing. Waits for
        nothing. Only where `can_hold`.
    again: runs forward and backward of a window again, uncompiled and apart from the run, with a look at each module.
        The buffers must be those from before. Where ranks share the data, every one of them must call it.
    save: writes tensors and plain values to a file, whole or not at all. Raises OSError, and RunError for anything else
        in them.
    """

    window: Window
    optimizer: torch.optim.Optimizer
    losses: Sequence[Tensor]
    scale: Tensor | float | None
    objective: torch.nn.Module
    is_compiled: bool
    can_hold: bool
    hold: Callable[[Tensor], None]
    again: Callable[[Window], Trace]
    save: Callable[[Path, Mapping[str, Any]], None]
