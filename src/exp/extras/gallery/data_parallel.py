"""torch.nn.DataParallel: one process, a replica of the network on each of its GPUs for each forward.

Lightning dropped it, and PyTorch advises against it; it is here for what runs under it already.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.errors import ErrorDetails
from exp.precision.words import WORDS
from exp.strategies.footprint import Footprint, Load, Place, Transfer
from exp.strategies.placement import Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Blueprint, Strategy, module_of, network_of

log = logging.getLogger(__name__)

ADVICE = (
    "strategy=data_parallel copies the network to every device at each step, and one process drives them all; "
    "PyTorch recommends DistributedDataParallel instead: write strategy=ddp"
)


class DataParallel(Strategy):
    """Inputs are cut along their first dimension, outputs gathered on the first device; on CPU there is no replica."""

    replicates_in_threads = True

    def __init__(self, *, name: str = "data_parallel") -> None:
        super().__init__(name=name)

    @property
    def demand(self) -> Demand:
        """One process with all devices of the run."""
        return Demand(rest="layers")

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Several nodes; on GPUs a compiled network, and what casts at the edges of layers."""
        return list(self._errors(planned))

    def footprint(self, load: Load) -> Footprint:
        """All of it on the first device, and on each other one a copy of the weights while it computes."""
        count = load.placement.layers if load.placement.accelerator == "cuda" else 1
        if count == 1:
            return Footprint(places=[Place(ranks=(0,), held=load.whole_parameters())])
        copies = {"copies of the weights": load.parameter_bytes, "their gradients": load.gradient_bytes}
        places = [Place(ranks=(0,), held=load.whole_parameters(), device=0, rest=1 / count)]
        places += [
            Place(ranks=(0,), held={}, device=device, rest=1 / count, buffers=copies) for device in range(1, count)
        ]
        sent = (load.parameter_bytes + load.gradient_bytes) * (count - 1) * load.micro_batches
        transfers = [Transfer(what="copies of weights, and sums of gradients", sent=sent, over=count)]
        return Footprint(places=places, transfers=transfers, work=1 / count)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One device for Lightning; the others are nn.DataParallel's own."""
        log.warning(ADVICE)
        return ReplicatingStrategy(devices=placement.devices(rank.local_rank))

    def _errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        placement = planned.placement
        if placement.world_size > 1:
            yield ErrorDetails(
                key="launch.nodes",
                got=f"{placement.nodes} with data_parallel",
                expected="1: it is one process",
                fix="Write strategy=ddp",
            )
        if planned.settings.runtime.compile and placement.accelerator == "cuda":
            yield ErrorDetails(
                key="runtime.compile",
                got="true with data_parallel, whose replicas would all call the first one's compiled code",
                expected="false",
                fix="Or write strategy=ddp",
            )
        if placement.accelerator == "cuda" and placement.layers > 1:
            yield from self._precision_errors(planned)

    def _precision_errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        # Their hooks remember a forward from its start to its end, and the replicas run at once, in threads.
        reason = "with data_parallel, whose replicas would share what casts their numbers"
        word = WORDS[planned.precision]
        if word.half_parameters:
            yield ErrorDetails(
                key="precision.word",
                got=f"{planned.precision} {reason}",
                expected=word.mixed_word.name,
                fix="Or write strategy=ddp",
            )
        if keep := planned.settings.precision.keep:
            yield ErrorDetails(
                key="precision.keep", got=f"{dict(keep)} {reason}", expected="{}", fix="Or write strategy=ddp"
            )


class ReplicatingStrategy(SingleDeviceStrategy):
    """One process on its first device. devices: torch's names of all of them; on CPU the network is called as it is."""

    def __init__(self, *, devices: Sequence[str]) -> None:
        super().__init__(device=torch.device(devices[0]).type if devices[0].startswith("cpu") else devices[0])
        self._devices = [torch.device(device) for device in devices]

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._devices[0].type == "cuda":
            # Past nn.Module: the state dict has the network once.
            vars(module_of(self))["run_network"] = Replicated(network_of(self), device_ids=self._devices)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module)["run_network"] = network_of(self)
        super().teardown()


class Replicated(nn.DataParallel[nn.Module]):
    """Replicas that draw different numbers, the same in a resumed run."""

    def forward(self, *inputs: object, **named: object) -> object:
        # A step seeds the CPU and the first device.
        seed = torch.initial_seed()
        for index, device in enumerate(self.device_ids[1:], start=1):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed + index)
        return super().forward(*inputs, **named)
