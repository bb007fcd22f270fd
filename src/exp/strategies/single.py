"""A single device."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import RunError
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Strategy


class Single(Strategy):
    """A single device, even if the machine has more."""

    splits_batch = False
    steps_once = False

    @property
    def demand(self) -> Demand:
        """A single device."""
        return Demand(rest=None)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Raise RunError: several ranks are never `single`."""
        raise RunError(f"strategy single takes one rank, and {placement.world_size} were started: write strategy=ddp")
