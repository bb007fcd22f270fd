"""A single device, or ddp over all GPUs if there are several, as `placement` decides."""

from __future__ import annotations

from collections.abc import Sequence

from exp.errors import ErrorDetails
from exp.strategies.ddp import DDP
from exp.strategies.placement import Demand
from exp.strategies.strategy import Blueprint


class Auto(DDP):
    """The strategy that fits the machine, with its default options."""

    def __init__(self, *, name: str = "auto") -> None:
        super().__init__(name=name)

    @property
    def demand(self) -> Demand:
        """All GPUs, as ddp; a machine without a GPU tries one device."""
        return Demand(cpu_devices=1, adapts=True)

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return no error: ddp has its default options, and one device supports everything."""
        return ()
