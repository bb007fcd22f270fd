"""Distributed data parallel: a copy of the network on every rank, gradients averaged during the backward.

communication_hook: bf16 and fp16 send each bucket of gradients in that dtype. torch's default_hooks do the same, but
DistributedDataParallel refuses its bf16 hook unless the backend is NCCL. gloo adds bfloat16 as well (torch 2.13).
"""

# Annotations are evaluated: DistributedDataParallel compares those of a hook with the classes themselves.

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
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
from exp.strategies.footprint import (
    Footprint,
    Load,
    Place,
    Transfer,
    gather_bytes,
)
from exp.strategies.gradient_averaging import broadcast_buffers, broadcast_state
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of

DTYPES = {"bf16": torch.bfloat16, "fp16": torch.float16}
HOOK = "communication_hook"


class DDP(Strategy):
    """Data parallel with the options of torch.nn.parallel.DistributedDataParallel.

    Args:
        find_unused_parameters: Search the graph for parameters without a gradient in every step.
        gradient_as_bucket_view: Let gradients be views of the buckets that are sent, which saves their memory.
        static_graph: Every step uses the same parameters in the same order.
        broadcast_buffers: Send the buffers of rank 0 to all ranks before each forward; if False, before each
            validation, checkpoint and test.
        bucket_cap_mb: Size of a bucket in MiB. None: torch's default.
        sync_batchnorm: Normalize over the global batch instead of each rank's share.
        communication_hook: Dtype in which gradients are sent. None: their own.
    """

    steps_once = False

    def __init__(
        self,
        *,
        name: str = "ddp",
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
        sync_batchnorm: bool = False,
        communication_hook: Literal["fp16", "bf16"] | None = None,
    ) -> None:
        super().__init__(name=name)
        self.options: dict[str, object] = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }
        self.sync_batchnorm = sync_batchnorm
        self.communication_hook = communication_hook

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of options that contradict each other, the network or the phases."""
        errors = list(batch_norm_errors(planned, sync_batchnorm=self.sync_batchnorm))
        if self.options["static_graph"] and self.options["find_unused_parameters"]:
            expected = "one of the two: a static graph finds unused parameters once"
            fix = "Write strategy.find_unused_parameters=false"
            errors.append(not_supported_with("strategy.static_graph", True, "find_unused_parameters", expected, fix))
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
        """Return the error of an option that registers a communication hook, if it is set."""
        if self.communication_hook is None:
            return []
        return [invalid_value(f"strategy.{HOOK}", self.communication_hook, expected)]

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's DDPStrategy with these options."""
        return ExpDDPStrategy(placement=placement, options=self)

    def footprint(self, load: Load) -> Footprint:
        """Return a copy for each rank, and the buckets that are sent if gradients are not views of them."""
        count = load.placement.world_size
        has_buckets = count > 1 and not self.options["gradient_as_bucket_view"]
        buffers = {"buckets of gradients": load.gradient_bytes} if has_buckets else {}
        places = [Place(ranks=tuple(range(count)), held=load.whole_parameters(), buffers=buffers)]
        if count == 1:
            return Footprint(places=places)
        largest = max((one.itemsize for one in load.sizes.values() if one.learns), default=2)
        transfers = load.gradient_transfers(factor=1.0 if self.communication_hook is None else 2 / largest)
        if load.buffers and self.options["broadcast_buffers"]:
            sent = gather_bytes(load.buffers, count) * load.micro_batches
            transfers.append(Transfer(what="broadcast of buffers", sent=sent, over=count))
        return Footprint(places=places, transfers=transfers)

    def _averaging_options(self) -> dict[str, object]:
        """Return the options that say how gradients are averaged."""
        reducer = {key: value for key, value in self.options.items() if key != "broadcast_buffers"}
        return {HOOK: self.communication_hook, "sync_batchnorm": self.sync_batchnorm, **reducer}


class ExpDDPStrategy(StatisticsOverRanks, DDPStrategy):
    """Wraps the module in DistributedDataParallel, unless the module averages its own gradients.

    The parameters and buffers of such a module start as those of rank 0, and nothing else is done:
    DistributedDataParallel expects one backward per forward, and phases may have several.

    Relied on, and tested: `configure_ddp` is where Lightning wraps the module, and calls a module that is not wrapped
    directly; a batch is the first argument of `training_step` (lightning 2.6.6). Lightning registers communication
    hooks on CUDA only, so they are registered here.

    Attributes:
        broadcasts_buffers: Whether the buffers of rank 0 are sent to all ranks before each forward, or, with phases,
            before each step.
    """

    def __init__(self, *, placement: Placement, options: DDP) -> None:
        self.broadcasts_buffers = bool(options.options["broadcast_buffers"])
        arguments: dict[str, Any] = options.options
        super().__init__(process_group_backend=placement.backend, **arguments)
        self._hook = options.communication_hook
        self.sync_batchnorm = options.sync_batchnorm
        self._waits_for_a_graph = bool(options.options["static_graph"])

    def configure_ddp(self) -> None:
        """Wrap the module, unless it averages its gradients."""
        module = module_of(self)
        self.join_statistics(module)
        # A user's LightningModule does not have the attribute.
        if getattr(module, "averages_gradients", False):
            broadcast_state(module)
            return
        super().configure_ddp()
        assert isinstance(self.model, DistributedDataParallel)
        if self._hook is not None:
            self.model.register_comm_hook(DTYPES[self._hook], _send_in_dtype)

    @property
    def is_plain(self) -> bool:
        """True if a step does nothing except call DistributedDataParallel.

        Relied on, and tested: Lightning's `_model_averager` is None without its own post-local SGD (lightning 2.6.6).
        """
        own = (type(self).training_step, type(self).optimizer_step)
        is_own = own == (ExpDDPStrategy.training_step, ExpDDPStrategy.optimizer_step)
        return is_own and not self.sync_batchnorm and self._model_averager is None

    @contextmanager
    def block_backward_sync(self) -> Iterator[None]:
        """Keep the gradients of accumulated batches on their rank until the last of them.

        A static graph needs one backward with collectives before one without (otherwise an internal assertion of torch
        2.13 fails). So the run's first batch is sent, which gives the same sum.
        """
        if self._waits_for_a_graph:
            self._waits_for_a_graph = False
            yield
        else:
            with super().block_backward_sync():
                yield

    def on_validation_start(self) -> None:
        self._share_buffers()

    def on_test_start(self) -> None:
        self._share_buffers()

    def lightning_module_state_dict(self) -> dict[str, Any]:
        """Return the weights and buffers for a checkpoint, equal on all ranks. Every rank must call it."""
        self._share_buffers()
        return super().lightning_module_state_dict()

    def _share_buffers(self) -> None:
        broadcast_buffers(module_of(self), are_saved_only=not self.broadcasts_buffers)


def _send_in_dtype(dtype: torch.dtype, bucket: GradBucket) -> torch.futures.Future[Tensor]:
    buffer: Tensor = bucket.buffer()
    # Divided before they are added: float16 overflows less.
    work = dist.all_reduce(buffer.to(dtype).div_(dist.get_world_size()), async_op=True)
    assert work is not None
    found: torch.futures.Future[Tensor] = work.get_future().then(lambda future: buffer.copy_(future.value()[0]))
    return found
