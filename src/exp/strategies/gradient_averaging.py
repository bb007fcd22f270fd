"""Averages of gradients over ranks in a few collectives, for runs without DistributedDataParallel.

DistributedDataParallel expects one backward per forward. Phases run several backwards, and some strategies split the
network over ranks. In both cases, `average_gradients` is called after the backward instead.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exp.errors import RunError
from exp.strategies.whole_state import local_part

T = TypeVar("T", bound=Tensor)
# Maximum number of bytes per collective. A larger tensor has its separate collective. DistributedDataParallel has the
# same limit.
BUCKET_BYTES = 25 * 2**20


def average_gradients(parameters: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks of a process group.

    Every rank of the group must call this function.

    If only some ranks have a gradient, the other ranks count as zeros. All ranks receive the mean. For a DTensor, the
    local shard is averaged. Without a process group, or with one rank, the function does nothing.

    Args:
        parameters: Parameters in the same order on every rank. Parameters that require no gradient are skipped.
        group: Process group. None uses all ranks. Default: None.

    Raises:
        RunError: A gradient is sparse.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    trained = [parameter for parameter in parameters if parameter.requires_grad]
    if not trained:
        return
    if any(parameter.grad is not None and parameter.grad.is_sparse for parameter in trained):
        raise RunError(
            "ranks cannot average sparse gradients; expected dense gradients. Write sparse: false in the Embedding"
        )
    present = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    dist.all_reduce(present, group=group)
    missing = [place for place, parameter in enumerate(trained) if parameter.grad is None]
    # The counts are copied from the device only if this rank lacks a gradient, because the copy waits for the device.
    counts = present.tolist() if missing else []
    for place in missing:
        if counts[place]:
            trained[place].grad = torch.zeros_like(trained[place])
    average_tensors([one.grad.detach() for one in trained if one.grad is not None], group=group)


def average_tensors(tensors: Sequence[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor in place by its mean over the ranks of a process group.

    Every rank of the group must call this function.

    Args:
        tensors: Tensors of the same shapes in the same order on every rank.
        group: Process group. None uses all ranks. Default: None.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    sent = []
    for bucket in _buckets(tensors):
        pieces = [local_part(tensor) for tensor in bucket]
        # The tensors are divided before the sum, as in DistributedDataParallel, because float16 then overflows less
        # often.
        flat = torch.cat([piece.reshape(-1) for piece in pieces]).div_(dist.get_world_size(group))
        sent.append((pieces, flat, dist.all_reduce(flat, group=group, async_op=True)))
    # All collectives are started before the first wait.
    for pieces, flat, work in sent:
        work.wait()
        for piece, mean in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
            piece.copy_(mean.view_as(piece))


def broadcast_buffers(
    module: nn.Module, *, group: dist.ProcessGroup | None = None, are_saved_only: bool = False
) -> None:
    """Copy the buffers of a process group's first rank to the other ranks of the group, in place.

    Every rank of the group must call this function.

    Args:
        module: The module.
        group: Process group. None uses all ranks. Default: None.
        are_saved_only: Whether to skip buffers that are not in the state dict. The shapes of these buffers may differ
            between ranks. Default: False.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    saved = set(map(id, module.state_dict(keep_vars=True).values()))
    _broadcast((one for one in module.buffers() if id(one) in saved or not are_saved_only), group)


def broadcast_state(module: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks, in place. Every rank must call this function."""
    if not dist.is_initialized() or dist.get_world_size() == 1:
        return
    _broadcast((*module.parameters(), *module.buffers()), None)


def _broadcast(tensors: Iterable[Tensor], group: dist.ProcessGroup | None) -> None:
    source = 0 if group is None else dist.get_global_rank(group, 0)
    for tensor in tensors:
        own = local_part(tensor).detach()
        sent = own.contiguous()
        dist.broadcast(sent, src=source, group=group)
        if sent is not own:
            own.copy_(sent)


def _buckets(tensors: Iterable[T]) -> Iterator[list[T]]:
    """Yield lists of tensors with the same dtype and device. The lists are the same on every rank.

    A list has at most BUCKET_BYTES bytes. A larger tensor is alone in its list.
    """
    open_buckets: dict[tuple[torch.dtype, torch.device], tuple[list[T], int]] = {}
    for tensor in tensors:
        kind = (tensor.dtype, tensor.device)
        size = local_part(tensor).numel() * tensor.element_size()
        bucket, filled = open_buckets.get(kind, ([], 0))
        if bucket and filled + size > BUCKET_BYTES:
            yield bucket
            bucket, filled = [], 0
        bucket.append(tensor)
        open_buckets[kind] = (bucket, filled + size)
    for bucket, _ in open_buckets.values():
        yield bucket
