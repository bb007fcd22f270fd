"""Strategy with torch.nn.DataParallel: one process copies the network to each of its GPUs at each forward.

Lightning removed this strategy, and PyTorch recommends DistributedDataParallel instead. exp offers the strategy for
code that already uses torch.nn.DataParallel.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.errors import ErrorDetails, not_supported_with
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
    """Strategy that splits inputs along their first axis over the GPUs, and gathers outputs on the first GPU.

    On CPU, the network is not copied.
    """

    replicates_in_threads = True

    def __init__(self, *, name: str = "data_parallel") -> None:
        super().__init__(name=name)

    @property
    def demand(self) -> Demand:
        """The requested processes: a single process with all devices of the run."""
        return Demand(rest="layers")

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of unsupported settings.

        The strategy does not support several nodes or, on GPUs, a compiled network. On several GPUs it does not support
        precisions that cast the network or single layers.
        """
        return list(self._errors(planned))

    def footprint(self, load: Load) -> Footprint:
        """Return the memory and communication of a run.

        The first device stores the weights, gradients and optimizer state. Each other device has a copy of the weights
        and gradients during a step.
        """
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
        """Return a Lightning strategy with one device. nn.DataParallel uses the other devices."""
        log.warning(ADVICE)
        return ReplicatingStrategy(devices=placement.devices(rank.local_rank))

    def _errors(self, planned: Blueprint) -> Iterator[ErrorDetails]:
        placement, fix, strategy = planned.placement, "Or write strategy=ddp", "data_parallel"
        if placement.world_size > 1:
            yield not_supported_with("launch.nodes", placement.nodes, strategy, "1: it is one process", fix)
        if placement.accelerator != "cuda":
            return
        if planned.settings.runtime.compile:
            reason = f"{strategy}, whose replicas would all call the compiled code of the first"
            yield not_supported_with("runtime.compile", True, reason, "false", fix)
        if placement.layers > 1:
            # The hooks that cast store values during a forward. Replicas run in threads and would share these values.
            word, reason = WORDS[planned.precision], f"{strategy}, whose replicas would share the hooks that cast"
            if word.half_parameters:
                yield not_supported_with(
                    "precision.word", planned.precision, reason, planned.precision.removesuffix("_true"), fix
                )
            if keep := planned.settings.precision.keep:
                yield not_supported_with("precision.keep", dict(keep), reason, "{}", fix)


class ReplicatingStrategy(SingleDeviceStrategy):
    """Lightning strategy of a single process. On CPU, the network is not copied.

    Args:
        devices: Names of all devices in torch, such as cuda:0. Lightning uses only the first device.
    """

    def __init__(self, *, devices: Sequence[str]) -> None:
        super().__init__(device=torch.device(devices[0]).type if devices[0].startswith("cpu") else devices[0])
        self._devices = [torch.device(device) for device in devices]

    def setup(self, trainer: Trainer) -> None:
        super().setup(trainer)
        if self._devices[0].type == "cuda":
            # Stored in `vars`, because a submodule would add the network to the state dict a second time.
            vars(module_of(self))["run_network"] = Replicated(network_of(self), device_ids=self._devices)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module)["run_network"] = network_of(self)
        super().teardown()


class Replicated(nn.DataParallel[nn.Module]):
    """DataParallel with different random numbers in each replica. A resumed run draws the same numbers."""

    def forward(self, *inputs: object, **named: object) -> object:
        # The other devices are seeded here, because a step seeds only the CPU and the first device.
        seed = torch.initial_seed()
        for index, device in enumerate(self.device_ids[1:], start=1):
            with torch.cuda.device(device):
                torch.cuda.manual_seed(seed + index)
        return super().forward(*inputs, **named)
