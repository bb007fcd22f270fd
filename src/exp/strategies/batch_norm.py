"""Batch normalization with statistics over the global batch, which are the samples of all ranks.

torch's SyncBatchNorm requires CUDA and rejects CPU tensors. On a CPU, gloo sums the values of all ranks. First the mean
is computed and then the variance, so that the variance loses no precision.

If the global batch has fewer samples than ranks, a rank without samples takes part in the collectives and adds
nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

import torch
import torch.distributed as dist
import torch.nn.functional as F
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities.types import STEP_OUTPUT
from torch import Tensor, nn

from exp.errors import ErrorDetails, invalid_value
from exp.models.matching import ANY_BATCH_NORM, BATCH_NORMS
from exp.shared_types import Batch
from exp.strategies.strategy import Blueprint


class Share:
    """State of the current batch on this rank.

    Attributes:
        counts: Whether the batch has samples on this rank.
    """

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts = True


class StatisticsOverRanks(LightningStrategy):
    """Base class of Lightning strategies that support sync_batchnorm.

    Example: `class X(StatisticsOverRanks, Base)`.

    Attributes:
        sync_batchnorm: Whether to normalize over the global batch. Default: False.
    """

    sync_batchnorm: bool = False
    _share: Share | None = None
    _classes_before: Mapping[nn.Module, type[nn.Module]] = {}

    def join_statistics(self, network: nn.Module) -> None:
        """Make the network normalize over the global batch if sync_batchnorm is true, until `teardown` is called."""
        if self.sync_batchnorm and not self._classes_before:
            self._share = Share()
            self._classes_before = join_statistics(network, self._share, device_type=self.root_device.type)

    def training_step(self, batch: object, *arguments: object, **named: object) -> STEP_OUTPUT:
        if self._share is not None:
            # The batch of a user's LightningModule is not a Batch object, and always has samples.
            self._share.counts = not isinstance(batch, Batch) or batch.size > 0
        return super().training_step(batch, *arguments, **named)

    def teardown(self) -> None:
        super().teardown()
        restore_classes(self._classes_before)
        self._classes_before = {}


class CudaBatchNorm(nn.SyncBatchNorm):
    """BatchNorm over the global batch on CUDA. This class replaces the class of an existing layer."""

    share: Share

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, `[B, C, ...]`."""
        if not self.training or self.share.counts:
            return super().forward(input)
        # A rank without samples takes part in the collectives of forward and backward, and adds nothing.
        return input + super().forward(input[:0]).sum()


class GlobalBatchNorm(ANY_BATCH_NORM):  # type: ignore[misc]  # a class of torch without a public name
    """BatchNorm over the global batch on a CPU. This class replaces the class of an existing layer.

    SyncBatchNorm is not a base class, because DistributedDataParallel rejects SyncBatchNorm on a CPU.
    """

    share: Share

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input, `[B, C, ...]`.

        Raises:
            ValueError: The global batch has only one value per channel.
        """
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
        centered = values - mean.view(shape)
        variance = _sum_over_ranks(here * centered.square().sum(dims)) / total
        self._remember(mean.detach(), variance.detach(), float(total))
        output: Tensor = centered * torch.rsqrt(variance + self.eps).view(shape)
        if self.weight is not None:
            output = output * self.weight.view(shape) + self.bias.view(shape)
        return output.to(input.dtype)

    @torch.no_grad()
    def _remember(self, mean: Tensor, variance: Tensor, count: float) -> None:
        """Update the running statistics as nn.BatchNorm does. If momentum is None, they are means over all batches."""
        if self.running_mean is None or self.running_var is None:
            return
        self.num_batches_tracked.add_(1)
        momentum = self.momentum if self.momentum is not None else 1.0 / float(self.num_batches_tracked)
        self.running_mean.lerp_(mean.to(self.running_mean.dtype), momentum)
        self.running_var.lerp_((variance * (count / (count - 1.0))).to(self.running_var.dtype), momentum)


class SumOverRanks(torch.autograd.Function):
    """Sum of a tensor over all ranks, returned on every rank. The gradient is the sum of the ranks' gradients.

    torch.distributed.nn.functional.all_reduce computes the same sum, but is deprecated in torch 2.13.
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
    """Yield the batch normalization layers of a network with their names."""
    kind: type[nn.Module] = ANY_BATCH_NORM
    return ((name, part) for name, part in network.named_modules() if isinstance(part, kind))


def join_statistics(network: nn.Module, share: Share, *, device_type: str) -> dict[nn.Module, type[nn.Module]]:
    """Make each BatchNorm layer of a network normalize with the statistics of all ranks.

    Only the class of a layer is replaced. Parameters, buffers, hooks and names in the state dict do not change.

    Args:
        network: The network.
        share: State of the current batch on this rank. The strategy updates it before each forward.
        device_type: Type of the device, such as "cuda".

    Returns:
        Previous class of each layer, for `restore_classes`.
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


def restore_classes(before: Mapping[nn.Module, type[nn.Module]]) -> None:
    """Restore the previous classes of the layers that join_statistics changed.

    If fully_shard has replaced the class of a layer in the meantime, the layer is skipped.

    Args:
        before: Previous class of each layer, as returned by join_statistics.
    """
    for part, kind in before.items():
        if type(part) not in (CudaBatchNorm, GlobalBatchNorm):
            continue
        part.__class__ = kind
        del part.share
        if kind is not nn.SyncBatchNorm:
            del part.process_group


def batch_norm_errors(planned: Blueprint, *, sync_batchnorm: bool) -> Iterator[ErrorDetails]:
    """Yield an error for each batch normalization that is not supported with this value of sync_batchnorm."""
    key, layers = "strategy.sync_batchnorm", list(batch_norms(planned.network))
    if sync_batchnorm and not layers:
        yield invalid_value(key, True, "false", because="and the network has no batch normalization")
    for name, layer in layers:
        if sync_batchnorm and type(layer) not in BATCH_NORMS:
            because = f"and {name} is a {type(layer).__name__}, which is not supported"
            yield invalid_value(key, True, "only BatchNorm1d, BatchNorm2d or BatchNorm3d of torch", because=because)
        elif not sync_batchnorm and isinstance(layer, nn.SyncBatchNorm) and planned.placement.accelerator == "cpu":
            because = f"and {name} is a torch.nn.SyncBatchNorm, which rejects CPU tensors"
            yield invalid_value(key, False, "true, which supports CPU ranks", because=because)
