"""Distributed data parallel: a copy of the network in every rank, gradients averaged while backward runs."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.strategies.strategy import Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


class DDP(Strategy):
    """The options are those of torch.nn.parallel.DistributedDataParallel, under its names.

    find_unused_parameters: search the graph for parameters without a gradient at every step.
    gradient_as_bucket_view: gradients are views of the buckets that are sent, and take their memory once.
    static_graph: every step uses the same parameters in the same order.
    broadcast_buffers: rank 0's buffers go to all ranks before each forward.
    bucket_cap_mb: size of a bucket in MiB; None is torch's default.
    """

    def __init__(
        self,
        *,
        name: str = "ddp",
        find_unused_parameters: bool = False,
        gradient_as_bucket_view: bool = True,
        static_graph: bool = False,
        broadcast_buffers: bool = True,
        bucket_cap_mb: float | None = None,
    ) -> None:
        super().__init__(name=name)
        self.options = {
            "find_unused_parameters": find_unused_parameters,
            "gradient_as_bucket_view": gradient_as_bucket_view,
            "static_graph": static_graph,
            "broadcast_buffers": broadcast_buffers,
            "bucket_cap_mb": bucket_cap_mb,
        }

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Lightning's DDPStrategy with these options."""
        from exp.strategies.lightning_ddp import ExpDDPStrategy

        return ExpDDPStrategy(process_group_backend=placement.backend, **self.options)
