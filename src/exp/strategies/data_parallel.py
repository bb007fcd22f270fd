"""torch.nn.DataParallel: one process, a replica of the network on each of its GPUs for each forward.

Lightning dropped it, and PyTorch advises against it; it is here for what runs under it already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from exp.errors import Fault
from exp.strategies.placement import Demand
from exp.strategies.strategy import Planned, Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank

log = logging.getLogger(__name__)

ADVICE = (
    "strategy=data_parallel copies the network to every device at each step, and one process drives them all; "
    "PyTorch recommends DistributedDataParallel instead: write strategy=ddp"
)


class DataParallel(Strategy):
    """Inputs are cut along their first dimension, outputs gathered on the first device; on CPU there is no replica."""

    def __init__(self, *, name: str = "data_parallel") -> None:
        super().__init__(name=name)

    @property
    def demand(self) -> Demand:
        """One process with all devices of the run."""
        return Demand(devices=None)

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """Several nodes, and a compiled network."""
        return list(self._faults(planned))

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One device for Lightning; the others are nn.DataParallel's own."""
        from exp.strategies.lightning_data_parallel import ReplicatingStrategy

        log.warning(ADVICE)
        return ReplicatingStrategy(devices=placement.devices(rank.local_rank))

    def _faults(self, planned: Planned) -> Iterator[Fault]:
        placement = planned.placement
        if placement.world_size > 1:
            yield Fault(
                key="launch.nodes",
                got=f"{placement.nodes} with data_parallel",
                expected="1: it is one process",
                cure="Write strategy=ddp",
            )
        if planned.config["runtime"]["compile"] and placement.accelerator == "cuda":
            yield Fault(
                key="runtime.compile",
                got="true with data_parallel, whose replicas would all call the first one's compiled code",
                expected="false",
                cure="Or write strategy=ddp",
            )
