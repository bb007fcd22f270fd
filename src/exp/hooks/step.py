"""One optimizer step, as a hook sees it, and what a hook is told before an optimizer steps."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from exp.hooks.norms import norms_by_name
from exp.shared_types import Batch

if TYPE_CHECKING:
    import torch
    from torch import Tensor, nn

    from exp.strategies.whole_state import Parts


def _of_one_rank(tensor: Tensor) -> Tensor:
    return tensor[None]


@dataclass(kw_only=True, slots=True)
class Step:
    """One optimizer step, as a hook sees it.

    index: the optimizer step under way, counted from 1: the x axis of everything that is logged.
    network: the network itself, not the wrapper of a strategy.
    optimizers: those that step, in the order in which they do.
    batch_size: samples of the global batch, over all ranks and accumulated micro-batches.
    device: where the network's input is.
    epoch, batch_idx: the position of the last micro-batch, both counted from 0.
    seed, rank: of the run, and of the share of the batch that this process works on; with epoch and batch_idx they give
        the step's random streams, by exp.data.randomness.reseed.
    world_size: processes of the run.
    accumulated: micro-batches a step.
    total_steps: of the whole run; None where its end is not known.
    samples_seen: of all ranks, in the steps of this process so far and in this one.
    seconds_waited: how long this process's loop has waited for batches so far, those of this step included.
    loss: the objective of the last micro-batch, 0-d and detached; None before it is known.
    data: the last micro-batch, as the data set gives it: a pair or a mapping of tensors.
    batches: the window's micro-batches so far with their batch_idx, this rank's; where a hook `keeps_batches`.
    weight: by what this rank's mean loss of it is multiplied, so that the mean over ranks is that over samples; 0.0
        where the rank holds a stand-in sample only.
    loss_with: called with what runs the network and with such data, gives the objective of that run, 0-d, not weighted.
    norms: the 2-norms of tensors by the names of their parameters, of whole ones where this process has parts of them.
        Where ranks hold parts of one network every rank must call it alike, and it gives those of all ranks.
    parts: how what ranks find in their parts of tensors becomes that of whole ones; None where they are whole here.
    clips: whether the optimizer's gradients are clipped; of the phase, where there is one.
    gather: `[...]` of every rank becomes `[R, ...]` on every rank. Every rank must call it alike.
    autocast: the context of the run's precision, for a forward of a hook's own.
    kept: the dtype of every layer that the run's precision gives one of its own, by name.
    phase: of a run with phases: the one under way; in after_backward its gradients are in its own parameters alone.
    """

    index: int
    network: nn.Module
    optimizers: Sequence[torch.optim.Optimizer]
    batch_size: int
    device: torch.device
    epoch: int = 0
    batch_idx: int = 0
    seed: int = 0
    rank: int = 0
    world_size: int = 1
    accumulated: int = 1
    total_steps: int | None = None
    samples_seen: int = 0
    seconds_waited: float = 0.0
    loss: Tensor | None = None
    data: Any = None
    batches: Sequence[tuple[Batch, int]] = ()
    weight: float = 1.0
    loss_with: Callable[[Callable[..., Any], Any], Tensor] | None = None
    norms: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]] = norms_by_name
    parts: Parts | None = None
    clips: bool = False
    gather: Callable[[Tensor], Tensor] = _of_one_rank
    autocast: Callable[[], AbstractContextManager[object]] = nullcontext
    kept: Mapping[str, torch.dtype] = field(default_factory=dict)
    phase: str | None = None


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


class Look(Protocol):
    """Who looks at a forward and a backward that are run again."""

    def forward(self) -> AbstractContextManager[object]:
        """A context around the forward and the objective."""

    def backward(self, loss: Tensor) -> None:
        """Called before the backward from `loss`, 0-d."""


class Again(Protocol):
    """Runs a step's forward and backward again, uncompiled and apart from the run.

    The buffers must be those from before. Where ranks share the data, every one of them must call it.
    """

    def __call__(self, window: Window, place: int, look: Look) -> tuple[Tensor, Mapping[str, Tensor]]:
        """Of the window's micro-batch at `place`: the loss, 0-d, and the gradients by parameter."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """One step of one optimizer that is about to be taken: its gradients are true, averaged, and not clipped.

    losses: of the micro-batches, 0-d on their device, this rank's share; of a phase their sum.
    scale: by what the loss was multiplied, 0-d or a float; None without a loss scale.
    objective: the module that gives the loss; it has no parameters that are trained.
    again: runs forward and backward of a window's micro-batch again; see Again.
    save: writes tensors and plain values to a file, whole or not at all. Raises OSError, and RunError for anything else
        in them.
    """

    window: Window
    optimizer: torch.optim.Optimizer
    losses: Sequence[Tensor]
    scale: Tensor | float | None
    objective: torch.nn.Module
    again: Again
    save: Callable[[Path, Mapping[str, Any]], None]
