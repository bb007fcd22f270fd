"""What ranks that share one layer send each other, as functions that autograd goes through, any number of times.

Each stands for two collectives, of the forward and of the backward (Shoeybi et al., Megatron-LM, 2019, section 3;
Korthikanti et al., Reducing Activation Recomputation, 2022, section 4.2.2, for those along the sequence).

    name            forward                 backward                where
    copy            nothing                 adds up                 whole values enter a layer in parts
    add_up          adds up                 nothing                 a layer in parts gives whole values
    gather          joins parts             takes its own           parts become whole, and are used alike by all
    split           takes its own           joins parts             whole values become parts
    gather_partial  joins parts             adds up, takes its own  parts become whole, used by each rank in its way
    add_up_split    adds up, takes its own  joins parts             a layer in parts gives parts of the sequence
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.autograd import Function

from exp.errors import RunError

Group = dist.ProcessGroup


def copy(value: Tensor, group: Group) -> Tensor:
    return _Copy.apply(value, group)


def add_up(value: Tensor, group: Group) -> Tensor:
    return _AddUp.apply(value, group)


def gather(value: Tensor, group: Group, *, dim: int, size: int | None = None) -> Tensor:
    """size: of the whole along dim; None where the ranks have equal parts."""
    return _Gather.apply(value, group, dim, size or value.shape[dim] * dist.get_world_size(group))


def split(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """Raises: RunError where the ranks would get unequal parts."""
    require_even(value.shape[dim], group, dim=dim)
    return _Split.apply(value, group, dim)


def gather_partial(value: Tensor, group: Group, *, dim: int) -> Tensor:
    return _GatherPartial.apply(value, group, dim)


def add_up_split(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """Raises: RunError where the ranks would get unequal parts."""
    require_even(value.shape[dim], group, dim=dim)
    return _AddUpSplit.apply(value, group, dim)


def require_even(size: int, group: Group, *, dim: int) -> None:
    if size % dist.get_world_size(group):
        raise RunError(
            f"dimension {dim} is {size}, which {dist.get_world_size(group)} ranks cannot share evenly; expected a "
            "multiple. Write strategy.sequence=false, or another length"
        )


def own(value: Tensor, group: Group, *, dim: int) -> Tensor:
    """This rank's part along dim. All have ceil(size / ranks) of it, but for the last ones, which may have less."""
    size, ranks = value.shape[dim], dist.get_world_size(group)
    each = -(-size // ranks)
    first = min(dist.get_rank(group) * each, size)
    return value.narrow(dim, first, min(each, size - first)).contiguous()


def join(part: Tensor, group: Group, *, dim: int, size: int) -> Tensor:
    """The whole of which `own` is the part; size: of the whole along dim."""
    ranks = dist.get_world_size(group)
    each = -(-size // ranks)
    part = part.movedim(dim, 0)
    if part.shape[0] < each:
        # gloo and NCCL want equal parts.
        part = torch.cat([part, part.new_zeros(each - part.shape[0], *part.shape[1:])])
    part = part.contiguous()
    whole = part.new_empty(ranks * each, *part.shape[1:])
    dist.all_gather_into_tensor(whole, part, group=group)
    return whole[:size].movedim(0, dim).contiguous()


def _summed(value: Tensor, group: Group) -> Tensor:
    value = value.clone(memory_format=torch.contiguous_format)
    dist.all_reduce(value, group=group)
    return value


def _summed_own(value: Tensor, group: Group, dim: int) -> Tensor:
    value = value.movedim(dim, 0).contiguous()
    part = value.new_empty(value.shape[0] // dist.get_world_size(group), *value.shape[1:])
    dist.reduce_scatter_tensor(part, value, group=group)
    return part.movedim(0, dim).contiguous()


# The backward of each is the forward of its counterpart, so that it has a backward, too.


class _Copy(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return value.view_as(value)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AddUp.apply(gradient, ctx.group), None


class _AddUp(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group) -> Tensor:
        ctx.group = group
        return _summed(value, group)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Copy.apply(gradient, ctx.group), None


class _Gather(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, dim: int, size: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return join(value, group, dim=dim, size=size)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Split.apply(gradient, ctx.group, ctx.dim), None, None, None


class _Split(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim, ctx.size = group, dim, value.shape[dim]
        return own(value, group, dim=dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _Gather.apply(gradient, ctx.group, ctx.dim, ctx.size), None, None


class _GatherPartial(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return join(value, group, dim=dim, size=value.shape[dim] * dist.get_world_size(group))

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _AddUpSplit.apply(gradient, ctx.group, ctx.dim), None, None


class _AddUpSplit(Function):
    @staticmethod
    def forward(ctx: Any, value: Tensor, group: Group, dim: int) -> Tensor:
        ctx.group, ctx.dim = group, dim
        return _summed_own(value, group, dim)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        return _GatherPartial.apply(gradient, ctx.group, ctx.dim), None, None
