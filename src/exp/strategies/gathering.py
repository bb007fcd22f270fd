"""A tensor of every rank on every rank."""

from __future__ import annotations

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import Strategy
from torch import Tensor

from exp.strategies.model_parallel import ModelParallel


def gather_ranks(tensor: Tensor, *, group: dist.ProcessGroup | None = None) -> Tensor:
    """`[...]` of each of R ranks becomes `[R, ...]`, in their order. Every rank of the group must call it alike.

    group: None is all ranks. A process without others gets `[1, ...]`.
    """
    if not dist.is_available() or not dist.is_initialized():
        return tensor[None]
    tensor = tensor.detach().contiguous()
    found = [torch.empty_like(tensor) for _ in range(dist.get_world_size(group))]
    dist.all_gather(found, tensor, group=group)
    return torch.stack(found)


def gather_data(tensor: Tensor, *, strategy: Strategy) -> Tensor:
    """The same over the ranks that share the data: ranks of one model, which see the same samples, give one."""
    return gather_ranks(tensor, group=strategy.data_group if isinstance(strategy, ModelParallel) else None)
