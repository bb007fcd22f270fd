"""Averages of gradients over ranks in a few flat collectives, for runs without DistributedDataParallel.

Its reducer expects one backward per forward. Phases with several backwards, and networks in parts, call
`average_gradients` after the backward instead.
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
# Largest size of a collective, unless one tensor is larger; the same as in DistributedDataParallel.
BUCKET_BYTES = 25 * 2**20


def average_gradients(parameters: Iterable[nn.Parameter], *, group: dist.ProcessGroup | None = None) -> None:
    """Replace each gradient by its mean over the ranks of a process group. Every rank of it must call it.

    If only some ranks have a gradient, the others count as zeros and get the mean as well. The local part of a DTensor
    is averaged. Without a process group, or with one rank, nothing happens.

    Args:
        parameters: The same in the same order on every rank. Those that require no gradient are skipped.
        group: None: all ranks.

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
            "a gradient is sparse; expected dense gradients, which ranks can average. Write sparse: false in its layer"
        )
    present = torch.tensor([float(parameter.grad is not None) for parameter in trained], device=trained[0].device)
    dist.all_reduce(present, group=group)
    missing = [place for place, parameter in enumerate(trained) if parameter.grad is None]
    # Read only if a gradient is missing here, because reading waits for the device.
    counts = present.tolist() if missing else []
    for place in missing:
        if counts[place]:
            trained[place].grad = torch.zeros_like(trained[place])
    average_tensors([one.grad.detach() for one in trained if one.grad is not None], group=group)


def average_tensors(tensors: Sequence[Tensor], *, group: dist.ProcessGroup | None = None) -> None:
    """Replace each tensor by its mean over the ranks of a process group, in place. Every rank of it must call it.

    Args:
        tensors: Tensors of the same shapes in the same order on every rank.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    sent = []
    for bucket in _buckets(tensors):
        pieces = [local_part(tensor) for tensor in bucket]
        # Divided before they are added, like in DistributedDataParallel: float16 overflows less.
        flat = torch.cat([piece.reshape(-1) for piece in pieces]).div_(dist.get_world_size(group))
        sent.append((pieces, flat, dist.all_reduce(flat, group=group, async_op=True)))
    # All collectives are started before the first one is awaited.
    for pieces, flat, work in sent:
        work.wait()
        for piece, mean in zip(pieces, torch.split(flat, [piece.numel() for piece in pieces]), strict=True):
            piece.copy_(mean.view_as(piece))


def broadcast_buffers(
    module: nn.Module, *, group: dist.ProcessGroup | None = None, are_saved_only: bool = False
) -> None:
    """Copy the buffers of a process group's first rank to all its ranks, in place, as ddp does before each forward.

    Args:
        are_saved_only: Skip buffers that are not in the state dict: their shapes may differ between ranks.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    saved = set(map(id, module.state_dict(keep_vars=True).values()))
    _broadcast((one for one in module.buffers() if id(one) in saved or not are_saved_only), group)


def broadcast_state(module: nn.Module) -> None:
    """Copy the parameters and buffers of rank 0 to all ranks, in place. Every rank must call it."""
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
    """Yield tensors of one dtype and device, of at most BUCKET_BYTES or one alone, in the same order on every rank."""
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
