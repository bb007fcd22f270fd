"""Strategy for a single device, or DDP if `placement` finds several GPUs."""

from __future__ import annotations

from collections.abc import Sequence

from exp.errors import ErrorDetails
from exp.strategies.ddp import DDP
from exp.strategies.placement import Demand
from exp.strategies.strategy import Blueprint


class Auto(DDP):
    """Strategy that uses one device, or DDP with default options on several GPUs."""

    def __init__(self, *, name: str = "auto") -> None:
        super().__init__(name=name)

    @property
    def demand(self) -> Demand:
        """Devices to use: all GPUs, as in DDP. On a machine without a GPU, one device."""
        return Demand(cpu_devices=1, adapts=True)

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return no errors. DDP with default options and a single device support every run."""
        return ()
