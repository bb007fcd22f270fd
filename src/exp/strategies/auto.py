"""One device, or ddp over all GPUs where there are several. `placement` decides; this builds what it decided."""

from __future__ import annotations

from typing import TYPE_CHECKING

from exp.strategies.ddp import DDP
from exp.strategies.strategy import Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


class Auto(Strategy):
    """The strategy that fits the machine, with its default options."""

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """DDP with its defaults."""
        return DDP(name="ddp").lightning(placement, rank)
