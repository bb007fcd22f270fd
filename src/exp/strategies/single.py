"""One device."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.errors import RunError
from exp.strategies.strategy import Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


class Single(Strategy):
    """One device, whatever else the machine has."""

    splits_batch = False

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Raises: RunError, because a run of several ranks is not single."""
        raise RunError(f"strategy single takes one rank, and {placement.world_size} were started: write strategy=ddp")
