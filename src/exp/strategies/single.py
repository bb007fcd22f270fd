"""Strategy for a single device."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import RunError
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Strategy


class Single(Strategy):
    """Strategy that uses a single device, even if the machine has more."""

    splits_batch = False
    steps_once = False

    @property
    def demand(self) -> Demand:
        """Devices to use: a single device."""
        return Demand(rest=None)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Raise RunError. This method is called only for several ranks, which `single` does not support."""
        raise RunError(f"strategy=single takes one rank, but {placement.world_size} were started. Write strategy=ddp")
