"""Lightning's side of data_parallel: what a step calls is an nn.DataParallel around the network."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn


class ReplicatingStrategy(SingleDeviceStrategy):
    """One process on its first device. devices: torch's names of all of them; on CPU the network is called as it is."""

    def __init__(self, *, devices: Sequence[str]) -> None:
        super().__init__(device=torch.device(devices[0]).type if devices[0].startswith("cpu") else devices[0])
        self._devices = [torch.device(device) for device in devices]

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._devices[0].type == "cuda":
            module = self.lightning_module
            # Past nn.Module: the state dict has the network once.
            vars(module)["run_network"] = Replicated(module.network, device_ids=self._devices)

    def teardown(self) -> None:
        module = self.lightning_module
        if module is not None:
            vars(module)["run_network"] = module.network
        super().teardown()


class Replicated(nn.DataParallel):
    """Replicas that draw different numbers, the same in a resumed run."""

    def forward(self, *inputs: Any, **named: Any) -> Any:
        # A step seeds the CPU and the first device.
        seed = torch.initial_seed()
        for index, device in enumerate(self.device_ids[1:], start=1):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed + index)
        return super().forward(*inputs, **named)
