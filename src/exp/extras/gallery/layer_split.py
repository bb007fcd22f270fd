"""Strategy that places the layers of a network on several devices of one process."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any, cast

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.errors import ErrorDetails, invalid_value
from exp.models.inference import example_arguments
from exp.models.partition import Patterns, Split, split
from exp.nested import move_tensors
from exp.strategies.footprint import Footprint, Load, Place, Transfer
from exp.strategies.pipeline import Layers, carried_bytes, part_place, split_errors
from exp.strategies.placement import CPU_RANKS, Demand, Placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import (
    Blueprint,
    Strategy,
    data_of,
    module_of,
    move_all_but_network,
    network_of,
    precision_of,
)

# Terms of the objective may differentiate the graph of the step, but must not call layers.
MEETS = frozenset({"retained_graph"})


class LayerSplit(Strategy):
    """Strategy for a network that is too large for one device, as in PyTorch's model-parallel tutorial.

    The layers are split over several devices of one process. Only one device computes at a time, so the strategy saves
    memory but no time. With the strategy `pipeline`, all devices compute at the same time.

    Args:
        name: Name of the strategy. Default: layer_split.
        layers: Name patterns of the layers of each device, in the order of the forward. None: the parts of the network
            have similar parameter bytes. Default: None.
    """

    splits_batch = False
    splits_devices = True
    meets = MEETS

    def __init__(self, *, name: str = "layer_split", layers: Layers | None = None) -> None:
        super().__init__(name=name)
        self.layers = layers

    @property
    def demand(self) -> Demand:
        """The requested processes: one process with all devices of the run."""
        return Demand(rest="layers", cpu_devices=CPU_RANKS if self.layers is None else len(self.layers))

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return the errors of a split that does not match the network or the number of devices."""
        placement, count, layers = planned.placement, planned.placement.layers, self.layers
        if placement.world_size > 1:
            return [invalid_value("launch.nodes", placement.nodes, f"1: {self.name} is one process")]
        if layers is not None and len(layers) != count:
            expected, fix = f"{len(layers)}, one per list in strategy.layers", f"Write launch.devices={len(layers)}"
            return [invalid_value("launch.devices", count, expected, fix)]
        if count == 1:
            return [invalid_value("launch.devices", count, "2 or more devices", "Or write strategy=single")]
        return split_errors(planned, count=count, layers=layers)

    def footprint(self, load: Load) -> Footprint:
        """Return the memory of each device, and the bytes that are copied between devices."""
        count = load.placement.layers
        places = device_places(load, count=count, layers=self.layers, ranks=(0,))
        inputs = list(load.inputs)
        parts = split(load.network, count=count, layers=self.layers, inputs=inputs)
        sent = sum(carried_bytes(parts, part, load) for part in range(count - 1)) * 2 * load.micro_batches
        return Footprint(places=places, transfers=[Transfer(what="copies between devices", sent=sent, over=count)])

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return a Lightning strategy for one process with several devices."""
        return LayerSplitStrategy(devices=placement.devices(rank.local_rank), layers=self.layers)


def device_places(load: Load, *, count: int, layers: Layers | None, ranks: tuple[int, ...]) -> list[Place]:
    """Return the memory of each device of a rank with a network that is split over several devices.

    Args:
        load: Properties of the run.
        count: Number of devices.
        layers: See LayerSplit.
        ranks: Ranks with these devices.
    """
    parts = split(load.network, count=count, layers=layers, inputs=list(load.inputs))
    return [replace(part_place(load, parts, [part], ranks=ranks), device=part) for part in range(count)]


class SplitNetwork:
    """Callable that runs the parts of a network in sequence, each part on its device.

    The callable replaces the network in a training step. The inputs of a part are copied to its device asynchronously.
    The output is on the last device.

    Args:
        network: The network.
        parts: Split of the network.
        devices: Device of each part.
        cast: Function that casts the inputs, by name, to the dtypes of the precision. Default: no cast.
    """

    def __init__(
        self,
        network: nn.Module,
        parts: Split,
        devices: Sequence[torch.device],
        *,
        cast: Callable[[dict[str, object]], dict[str, object]] = lambda inputs: inputs,
    ) -> None:
        self.network, self.parts, self.devices, self.cast = network, parts, tuple(devices), cast

    def __call__(self, *arguments: object, **named: object) -> object:
        inputs = self.cast(self.parts.bind(arguments, named))
        values: dict[str, object] = {}
        for part, device in zip(self.parts.parts, self.devices, strict=True):
            read = [move_tensors(inputs[name], device) for name in part.inputs]
            read += [move_tensors(values[name], device) for name in part.takes]
            output = part.run(self.network, *read)
            if part is self.parts.parts[-1]:
                return output
            values.update(zip(part.gives, cast(Sequence[object], output), strict=True))
        raise AssertionError("a split has parts")


class OverDevices(LightningStrategy):
    """Base class of Lightning strategies for one process with several devices: `class X(OverDevices, Base)`.

    The data and the loss are on the last device, like the output.

    The class depends on two properties of Lightning, tested with version 2.6.6. Lightning calls `model_to_device`
    before it creates optimizers. Lightning moves optimizer states only in `load_optimizer_state_dict`.
    """

    devices: tuple[torch.device, ...]
    layers: Patterns | None
    _split: Split | None = None

    def setup(self, trainer: Trainer) -> None:
        network = network_of(self)
        if self._split is None:
            inputs = example_arguments(network, data_of(trainer).spec)
            self._split = split(network, count=len(self.devices), layers=self.layers, inputs=inputs)
        cast_inputs = precision_of(self).cast_inputs
        vars(module_of(self))["run_network"] = SplitNetwork(network, self._split, self.devices, cast=cast_inputs)
        super().setup(trainer)

    def teardown(self) -> None:
        if self.lightning_module is not None:
            vars(self.lightning_module)["run_network"] = network_of(self)
        super().teardown()

    def model_to_device(self) -> None:
        # The parts are moved separately, because the whole network may not fit on one device.
        assert self._split is not None
        move_all_but_network(module_of(self), self.devices[-1])
        place_parts(network_of(self), self._split, self.devices)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # torch moves each state to the device of its parameter; Lightning would move all states to one device.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def place_parts(network: nn.Module, parts: Split, devices: Sequence[torch.device]) -> None:
    """Move each parameter with its gradient, and each buffer, to the device of its part, in place."""
    where = {name: device for part, device in zip(parts.parts, devices, strict=True) for name in part.tensors}
    for path, module in network.named_modules():
        prefix = f"{path}." if path else ""
        for name, parameter in module.named_parameters(recurse=False, remove_duplicate=False):
            device = where[prefix + name]
            parameter.data = parameter.data.to(device)
            if parameter.grad is not None:
                parameter.grad.data = parameter.grad.data.to(device)
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            setattr(module, name, buffer.to(where[prefix + name]))


class LayerSplitStrategy(OverDevices, SingleDeviceStrategy):
    """Lightning strategy of one process with a network that is split over several devices."""

    def __init__(self, *, devices: Sequence[str], layers: Patterns | None) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = layers
        SingleDeviceStrategy.__init__(self, device=self.devices[-1])
