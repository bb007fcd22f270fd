"""One device, or ddp over all GPUs where there are several. `placement` decides; this builds what it decided."""

from __future__ import annotations

from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.strategies.ddp import DDP
from exp.strategies.footprint import Footprint, Load
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Strategy


class Auto(Strategy):
    """The strategy that fits the machine, with its default options."""

    steps_once = False

    @property
    def demand(self) -> Demand:
        """All GPUs, as ddp; a machine without tries one device."""
        return Demand(cpu_devices=1, adapts=True)

    def footprint(self, load: Load) -> Footprint:
        """DDP's, which of one rank is that of a single device."""
        return DDP(name="ddp").footprint(load)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """DDP with its defaults."""
        return DDP(name="ddp").lightning(placement, rank)
