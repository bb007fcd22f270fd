"""Batch normalisation over the whole global batch: the statistics of all ranks' shares together.

torch's SyncBatchNorm does it on CUDA and refuses CPU tensors; there the sums go through gloo, in two passes, so that
the variance loses no digits. A share that holds one stand-in sample (a global batch smaller than the world) is left
out of the statistics, and takes part in their collectives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import Tensor, nn

from exp.errors import ErrorDetails
from exp.models.matching import ANY_BATCH_NORM, BATCH_NORMS
from exp.strategies.strategy import Blueprint


class Share:
    """Whether this rank's part of the batch under way holds samples that count."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = True


class CudaBatchNorm(nn.SyncBatchNorm):
    """What a BatchNorm becomes on CUDA."""

    share: Share

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, ...] to [B, C, ...]."""
        if not self.training or self.share.counts:
            return super().forward(input)
        # An empty batch takes part in the collectives, forward and backward, and adds nothing.
        return input + super().forward(input[:0]).sum()


class GlobalBatchNorm(ANY_BATCH_NORM):  # type: ignore[misc]  # a class of torch without a public name
    """What a BatchNorm becomes elsewhere. No SyncBatchNorm: DistributedDataParallel refuses one on CPU."""

    share: Share

    def forward(self, input: Tensor) -> Tensor:
        """[B, C, ...] to [B, C, ...]. Raises: ValueError where all ranks together have one value a channel."""
        if not self.training:
            uses_batch = self.running_mean is None and self.running_var is None
            statistics = (self.running_mean, self.running_var)
            return F.batch_norm(input, *statistics, self.weight, self.bias, uses_batch, 0.0, self.eps)
        values = input.float() if input.dtype in (torch.float16, torch.bfloat16) else input
        dims = [dim for dim in range(values.dim()) if dim != 1]
        shape = [1, -1] + [1] * (values.dim() - 2)
        here = 1.0 if self.share.counts else 0.0
        count = values.new_tensor([here * values.numel() / values.shape[1]])
        sums = _sum_over_ranks(torch.cat([here * values.sum(dims), count]))
        total = sums[-1].detach()
        if total <= 1:
            raise ValueError(f"Expected more than 1 value per channel when training, got input size {input.shape}")
        mean = sums[:-1] / total
        centred = values - mean.view(shape)
        variance = _sum_over_ranks(here * centred.square().sum(dims)) / total
        self._remember(mean.detach(), variance.detach(), float(total))
        output: Tensor = centred * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Running statistics as nn.BatchNorm keeps them; without a momentum they are means over all batches."""
        if self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * (count / (count - 1.0))).to(self.running_var.dtype), momentum)


class SumOverRanks(torch.autograd.Function):
    """y = sum of x over all ranks, on every rank. The gradient of x is the sum of y's gradients, likewise.

    torch.distributed.nn.functional.all_reduce is the same, and deprecated in torch 2.13.
    """

    @staticmethod
    def forward(ctx: object, tensor: Tensor) -> Tensor:
        total = tensor.clone(memory_format=torch.contiguous_format)
        dist.all_reduce(total)
        return total

    @staticmethod
    def backward(ctx: object, gradient: Tensor) -> Tensor:
        return _sum_over_ranks(gradient)


_sum_over_ranks: Callable[[Tensor], Tensor] = SumOverRanks.apply


def batch_norms(network: nn.Module) -> Iterator[tuple[str, nn.Module]]:
    """Every batch normalisation of a network, by its name."""
    kind: type[nn.Module] = ANY_BATCH_NORM
    return ((name, part) for name, part in network.named_modules() if isinstance(part, kind))


def join_statistics(network: nn.Module, share: Share, *, device_type: str) -> dict[nn.Module, type[nn.Module]]:
    """Has every BatchNorm of a network use all ranks' shares, in place; the classes that undo it.

    Its class alone is replaced: parameters, buffers, hooks and the names in the state dict stay.
    """
    before: dict[nn.Module, type[nn.Module]] = {}
    for _, part in batch_norms(network):
        if isinstance(part, CudaBatchNorm | GlobalBatchNorm):
            continue
        before[part] = type(part)
        part.__class__ = CudaBatchNorm if device_type == "cuda" else GlobalBatchNorm
        vars(part)["share"] = share
        if before[part] is not nn.SyncBatchNorm:
            vars(part)["process_group"] = None
    return before


def part_statistics(before: dict[nn.Module, type[nn.Module]]) -> None:
    """Undoes join_statistics, but for a layer whose class fully_shard has replaced since: it stays as it is."""
    for part, kind in before.items():
        if type(part) not in (CudaBatchNorm, GlobalBatchNorm):
            continue
        part.__class__ = kind
        del part.share
        if kind is not nn.SyncBatchNorm:
            del part.process_group


def batch_norm_errors(planned: Blueprint, *, sync_batchnorm: bool) -> Iterator[ErrorDetails]:
    """Yield an error for each layer that cannot be, or has to be, normalized over the global batch."""
    key, layers = "strategy.sync_batchnorm", list(batch_norms(planned.network))
    if sync_batchnorm and not layers:
        yield ErrorDetails(key=key, got="true, and the network has no batch normalisation", expected="false")
    for name, layer in layers:
        if sync_batchnorm and type(layer) not in BATCH_NORMS:
            got = f"true, and {name} is a {type(layer).__name__}, whose forward is its own"
            yield ErrorDetails(key=key, got=got, expected="torch.nn.BatchNorm1d, 2d or 3d")
        is_refused = isinstance(layer, nn.SyncBatchNorm) and planned.placement.accelerator == "cpu"
        if not sync_batchnorm and is_refused:
            got = f"false, and {name} is a torch.nn.SyncBatchNorm, which refuses tensors on CPU"
            yield ErrorDetails(key=key, got=got, expected="true: its statistics then go through gloo")
