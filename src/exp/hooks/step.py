"""An optimizer step as hooks see it, and the arguments of `Hook.before_update`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

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
    """An optimizer step as hooks see it.

    Attributes:
        index: The optimizer step under way, counted from 1: the x axis of logged values.
        network: The network, without the wrapper of a strategy.
        optimizers: Those that step, in order.
        batch_size: Samples of the global batch, over all ranks and accumulated micro-batches.
        device: Device of the network's input.
        epoch: Epoch of the last micro-batch, counted from 0.
        batch_idx: Position of the last micro-batch in the epoch, counted from 0.
        seed: Seed of the run. exp.data.randomness.reseed makes the random streams of seed, rank, epoch and batch_idx.
        rank: Number of this process's share of the batch.
        world_size: Processes of the run.
        accumulated: Micro-batches a step.
        total_steps: Steps of the whole run; None if its end is not known.
        samples_seen: Samples of all ranks in the steps of this process so far, with this one.
        seconds_waited: Seconds for which the loop of this process has waited for batches so far.
        loss: Objective of the last micro-batch, 0-d and detached; None before it is known.
        data: The last micro-batch, as the data set gives it: a pair or a mapping of tensors.
        batches: The micro-batches of the step so far with their batch_idx, of this rank, if a hook `keeps_batches`.
        weight: Factor of this rank's mean loss in the mean over all samples; 0.0 for a rank with a stand-in sample.
        loss_with: Returns the objective, 0-d and not weighted, of a callable that runs the network, and such data.
        norms: Returns the 2-norms of whole tensors by the names of their parameters. If ranks hold shards, every rank
            must call it.
        parts: Combines the results of shards; None if tensors are whole here.
        clips: Whether the optimizer's gradients are clipped; with phases, those of the phase.
        gather: Returns `[R, ...]` on every rank from `[...]` of each. Every rank must call it.
        autocast: Returns the context of the run's precision, for a forward of the hook.
        kept: Dtypes of layers that differ from the dtype of the network, by name.
        phase: The phase under way; in after_backward only its parameters have its gradients.
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
    """The micro-batches of one step of an optimizer, and their position in the run.

    Args:
        batches: Micro-batches of this rank, each with its batch_idx, counted from 0.
        epoch: Epoch, counted from 0.
        phase: Phase of the step.
        turn: Pass over the batches, for exp.data.randomness.reseed.
    """

    batches: Sequence[tuple[Batch, int]]
    epoch: int
    phase: str | None = None
    turn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """A step that an optimizer is about to take. Its gradients are unscaled, averaged, and not clipped.

    Args:
        window: Micro-batches of the step.
        optimizer: The optimizer.
        losses: Losses of the micro-batches of this rank, 0-d on their device; with phases their sum.
        scale: Factor of the loss, 0-d or a float; None without a loss scale.
        module: The training module of the run.
    """

    window: Window
    optimizer: torch.optim.Optimizer
    losses: Sequence[Tensor]
    scale: Tensor | float | None
    module: nn.Module
