"""Distributed data parallel: each rank has a copy of the network. The backward averages the gradients over the ranks.

communication_hook: bf16 and fp16 send the gradients in that dtype. torch's default_hooks do the same, but
DistributedDataParallel accepts the bf16 hook only with the NCCL backend. gloo also supports bfloat16 (torch 2.13).
"""

# No `from __future__ import annotations`: DistributedDataParallel compares the annotations of a hook with classes.

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import Tensor
from torch.distributed import GradBucket  # type: ignore[attr-defined]  # torch's stubs do not name it
from torch.nn.parallel import DistributedDataParallel

from exp.errors import ErrorDetails, invalid_value, not_supported_with
from exp.spelling import show
from exp.strategies.batch_norm import StatisticsOverRanks, batch_norm_errors
from exp.strategies.footprint import Footprint, Load, Transfer, gather_bytes
from exp.strategies.gradient_averaging import broadcast_buffers, broadcast_state
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOOK = "communication_hook"


class DDP(Strategy):
    """Data parallel strategy with the options of torch.nn.parallel.DistributedDataParallel.

    Args:
        name: Name of the strategy. Default: ddp.
        find_unused_parameters: Whether each step searches the graph for parameters without a gradient. Default: False.
        broadcast_buffers: Whether the buffers of rank 0 are copied to all ranks before each forward. If False, they are
            copied only before each validation, checkpoint and test. Default: True.
        bucket_cap_mb: Size in MiB of a bucket of gradients, which are sent together. None uses torch's default.
            Default: None.
        sync_batchnorm: Whether BatchNorm statistics are computed over the global batch instead of the rank's samples.
            Default: False.
        communication_hook: Dtype in which gradients are sent. None sends them in the gradients' dtype. Default: None.
    """

    steps_once = False

    def __init__(
        self,
        *,
        name: str = "ddp",
        find_unused_parameters: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        communication_hook: Literal["fp16", "bf16"] | None = None,
    ) -> None:
        super().__init__(name=name)
        self.options: dict[str, object] = {
            "find_unused_parameters": find_unused_parameters,
            # Gradients are views of the buckets, because a copy would need more memory.
            "gradient_as_bucket_view": True,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.sync_batchnorm = sync_batchnorm
        self.communication_hook = communication_hook

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return errors for options that contradict each other, or that the network or the phases do not support."""
        errors = list(batch_norm_errors(planned, sync_batchnorm=self.sync_batchnorm))
        if planned.settings.phases and planned.placement.world_size > 1:
            # Phases average their gradients without DistributedDataParallel.
            options, defaults = self._averaging_options(), DDP()._averaging_options()
            errors += [
                not_supported_with(f"strategy.{key}", show(value), "phases", show(defaults[key]))
                for key, value in options.items()
                if value != defaults[key]
            ]
        return errors

    def hook_errors(self, *, expected: str) -> list[ErrorDetails]:
        """Return an error if communication_hook is set. Otherwise return an empty list.

        Args:
            expected: Description of valid values.
        """
        if self.communication_hook is None:
            return []
        return [invalid_value(f"strategy.{HOOK}", self.communication_hook, expected)]

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's strategy for DDP, with these options."""
        return ExpDDPStrategy(placement=placement, options=self)

    def footprint(self, load: Load) -> Footprint:
        """Return the memory of a copy of the network on each rank, and the transfers of gradients and buffers."""
        count, copies = load.placement.world_size, load.copies()
        if count == 1:
            return copies
        largest = max((one.itemsize for one in load.sizes.values() if one.learns), default=2)
        transfers = load.gradient_transfers(factor=1.0 if self.communication_hook is None else 2 / largest)
        if load.buffers and self.options["broadcast_buffers"]:
            sent = gather_bytes(load.buffers, count) * load.micro_batches
            transfers.append(Transfer(what="broadcast of buffers", sent=sent, over=count))
        return replace(copies, transfers=transfers)

    def _averaging_options(self) -> dict[str, object]:
        """Return the options that have an effect on the average of gradients, by name."""
        reducer = {key: value for key, value in self.options.items() if key != "broadcast_buffers"}
        return {HOOK: self.communication_hook, "sync_batchnorm": self.sync_batchnorm, **reducer}


class ExpDDPStrategy(StatisticsOverRanks, DDPStrategy):
    """Strategy that wraps the training module in DistributedDataParallel, unless the module averages its gradients.

    Phases average their gradients in the module, because they may have several backwards, but DistributedDataParallel
    expects one backward per forward. Such a module is not wrapped. Only its parameters and buffers are copied from rank
    0 at the start.

    Tested properties of Lightning 2.6.6: `configure_ddp` wraps the module, and a module that is not wrapped is called
    directly. A batch is the first argument of `training_step`. Lightning registers communication hooks only on CUDA, so
    this class registers them.

    Attributes:
        broadcasts_buffers: Whether the buffers of rank 0 are copied to all ranks before each forward. In a run with
            phases, they are copied before each step.
    """

    def __init__(self, *, placement: Placement, options: DDP) -> None:
        self.broadcasts_buffers = bool(options.options["broadcast_buffers"])
        arguments: dict[str, Any] = options.options
        super().__init__(process_group_backend=placement.backend, **arguments)
        self._hook = options.communication_hook
        self.sync_batchnorm = options.sync_batchnorm

    def configure_ddp(self) -> None:
        """Wrap the training module in DistributedDataParallel, unless the module averages its gradients."""
        module = module_of(self)
        self.join_statistics(module)
        # A user's LightningModule does not have this attribute.
        if getattr(module, "averages_gradients", False):
            broadcast_state(module)
            return
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(DTYPES[self._hook], _send_in_dtype)

    @property
    def is_plain(self) -> bool:
        """True if a step only calls DistributedDataParallel.

        Tested property of Lightning 2.6.6: `_model_averager` is None unless Lightning's post-local SGD is used.
        """
        own = (type(self).training_step, type(self).optimizer_step)
        is_own = own == (ExpDDPStrategy.training_step, ExpDDPStrategy.optimizer_step)
        return is_own and not self.sync_batchnorm and self._model_averager is None

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights and buffers for a checkpoint, which are equal on all ranks.

        Every rank must call this method.
        """
        self._share_buffers()
        return super().lightning_module_state_dict()

    def _share_buffers(self) -> None:
        broadcast_buffers(module_of(self), are_saved_only=not self.broadcasts_buffers)


def _send_in_dtype(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    # The gradients are divided before the sum, because float16 then overflows less often.
    work = dist.all_reduce(buffer.to(dtype).div_(dist.get_world_size()), async_op=True)
    assert work is not None
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda future: buffer.copy_(future.value()[0]))
    return found
