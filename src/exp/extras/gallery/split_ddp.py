"""Distributed data parallel in which each rank splits the layers of its network over several devices.

PyTorch's DDP tutorial combines data parallelism and split networks in the same way. DistributedDataParallel supports a
network on several devices if device_ids is None.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Any

import torch
from annotated_types import Ge
from lightning.pytorch.strategies import Strategy as LightningStrategy

from exp.errors import ErrorDetails, config_error
from exp.extras.gallery.layer_split import MEETS, LayerSplitStrategy, OverDevices, device_places
from exp.strategies.ddp import DDP, ExpDDPStrategy
from exp.strategies.footprint import Footprint, Load
from exp.strategies.pipeline import Layers, split_errors
from exp.strategies.placement import CPU_RANKS, Demand, Dimensions, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint


class SplitDDP(DDP):
    """Strategy ddp in which each rank splits the layers of its network over several devices.

    Args:
        layers: Name patterns of the layers, one entry for each device of a rank. None: layers are split into parts with
            similar parameter bytes.
        devices_per_rank: Number of devices of a rank. None: one for each entry of `layers`, or 2 if `layers` is None.
        options: Options of ddp.
    """

    splits_devices = True
    meets = MEETS

    def __init__(
        self, *, layers: Layers | None = None, devices_per_rank: Annotated[int, Ge(2)] | None = None, **options: Any
    ) -> None:
        super().__init__(**options)
        self.layers = layers
        self.devices_per_rank = devices_per_rank or (2 if layers is None else len(layers))
        if layers is not None and len(layers) != self.devices_per_rank:
            expected = f"{len(layers)}, one per list in strategy.layers"
            raise config_error("devices_per_rank", got=str(devices_per_rank), expected=expected)

    @property
    def demand(self) -> Demand:
        """The requested number of devices per rank. On a machine without a GPU, two ranks run."""
        each = self.devices_per_rank
        return Demand(dimensions=Dimensions(layers=each), cpu_devices=CPU_RANKS * each)

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of ddp, of options that need a network on one device, and of the split over devices."""
        return [
            *super().errors(planned),
            *split_errors(planned, count=self.devices_per_rank, layers=self.layers),
            *self.hook_errors(expected="null for a network over several devices"),
        ]

    def footprint(self, load: Load) -> Footprint:
        """Return the memory of each device, and the communication of the averaged gradients."""
        ranks = tuple(range(load.placement.world_size))
        places = device_places(load, count=self.devices_per_rank, layers=self.layers, ranks=ranks)
        return Footprint(places=places, transfers=load.gradient_transfers())

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return the strategy of one rank."""
        devices = placement.devices(rank.local_rank)
        if placement.world_size == 1:
            return LayerSplitStrategy(devices=devices, layers=self.layers)
        return SplitDDPStrategy(devices=devices, placement=placement, options=self)


class SplitDDPStrategy(OverDevices, ExpDDPStrategy):
    """Lightning strategy of a rank that has its data and loss on its last device."""

    def __init__(self, *, devices: Sequence[str], placement: Placement, options: SplitDDP) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = options.layers
        ExpDDPStrategy.__init__(self, placement=placement, options=options)

    @property
    def root_device(self) -> torch.device:
        return self.devices[-1]

    def determine_ddp_device_ids(self) -> list[int] | None:
        return None
