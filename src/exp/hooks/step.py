"""Description of an optimizer step for hooks, and the argument of `Hook.before_update`."""

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
    """Description of an optimizer step for hooks.

    Attributes:
        index: Number of the current optimizer step, counted from 1. It is the x axis of logged values.
        network: The network. If the strategy wraps the network, this is the network inside the wrapper.
        optimizers: Optimizers of the step, in order.
        batch_size: Number of samples over all ranks and accumulated micro-batches.
        device: Device of the network's input.
        epoch: Epoch of the last micro-batch, counted from 0.
        batch_idx: Number of the last micro-batch in the epoch, counted from 0.
        seed: Seed of the run. exp.data.randomness.reseed computes the random numbers of a micro-batch from the seed,
            the rank, the epoch and batch_idx.
        rank: Index of the part of the batch that this process has.
        world_size: Number of processes of the run.
        accumulated: Number of micro-batches per step.
        total_steps: Number of steps of the whole run; None if unknown.
        samples_seen: Number of samples over all ranks in the steps of this process, including the current step.
        seconds_waited: Total seconds for which the training loop of this process has waited for batches.
        loss: Objective of the last micro-batch, 0-d and detached. None before the objective is computed.
        data: Last micro-batch as the data set returns it: a pair or a mapping of tensors.
        batches: This rank's micro-batches of the step with their batch_idx. Empty unless a hook sets `keeps_batches`.
        weight: Weight of this rank's mean loss in the mean over all samples. 0.0 for a rank without samples.
        loss_with: Function that returns the unweighted objective, 0-d. Its arguments are a callable that replaces the
            network, and data.
        norms: Function that returns the 2-norms of whole tensors by parameter name. If the tensors are sharded, every
            rank must call the function.
        parts: Object that combines numbers from the shards of all ranks. None if tensors are not sharded.
        clips: Whether the gradients of the optimizer are clipped. With phases, the gradients of the current phase.
        gather: Function that stacks a tensor `[...]` of each of R ranks to `[R, ...]`, on every rank. Every rank must
            call the function.
        autocast: Function that returns the context of the run's precision, for a forward that the hook runs.
        kept: Dtypes of layers that differ from the network's dtype, by layer name.
        phase: Name of the current phase; None without phases. In after_backward, only the phase's parameters have
            gradients of this phase.
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
    """Micro-batches of one optimizer step, and their position in the run.

    Args:
        batches: Micro-batches of this rank, each with its batch_idx, counted from 0.
        epoch: Epoch, counted from 0.
        phase: Name of the phase; None without phases. Default: None.
        turn: Numbers that select the random numbers of the forward, as in exp.data.randomness.reseed. Default: ().
    """

    batches: Sequence[tuple[Batch, int]]
    epoch: int
    phase: str | None = None
    turn: tuple[int, ...] = ()


@dataclass(frozen=True, kw_only=True, slots=True)
class Update:
    """An optimizer step that is about to run. The gradients are unscaled, averaged, and not clipped.

    Args:
        window: Micro-batches of the step.
        optimizer: The optimizer.
        losses: Losses of this rank's micro-batches, 0-d, on their device. With phases, the only element is their sum.
        scale: Loss scale, 0-d or a float; None without a loss scale.
        module: Training module of the run.
    """

    window: Window
    optimizer: torch.optim.Optimizer
    losses: Sequence[Tensor]
    scale: Tensor | float | None
    module: nn.Module
