"""Layers split over devices: one process, each part of the network on a device of its own."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Annotated, Any, cast

import torch
from annotated_types import Predicate
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from lightning.pytorch.strategies import Strategy as LightningStrategy
from torch import nn

from exp.errors import ConfigError, ErrorDetails
from exp.models.inference import example_arguments
from exp.models.partition import Patterns, Split, split
from exp.nested import move_tensors, tensors_in
from exp.shared_types import DataSpec
from exp.strategies.footprint import OBJECTIVE, Footprint, Load, Place, Transfer, whole_parameters
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


def _has_names(layers: Sequence[Sequence[str]]) -> bool:
    return bool(layers) and all(part and all(part) for part in layers)


# Name patterns of the layers of each part, in the order in which the parts run.
Layers = Annotated[
    Sequence[Sequence[str]], 'a list, each a list of texts, such as [[stem, "stage.*"], [head]]', Predicate(_has_names)
]
# Terms may take gradients from the step's graph, which is one, but not call layers themselves.
MEETS = frozenset({"retained_graph"})


class LayerSplit(Strategy):
    """PyTorch's model-parallel tutorial: a network that is too large for one device is laid over several.

    One part works at a time, so it saves memory, not time; `pipeline` lets the parts work at once.

    layers: name patterns of the layers of each device, in order; None balances them by the bytes of their parameters.
    """

    splits_batch = False
    splits_devices = True
    meets = MEETS

    def __init__(self, *, name: str = "layer_split", layers: Layers | None = None) -> None:
        super().__init__(name=name)
        self.layers = layers

    @property
    def demand(self) -> Demand:
        """All devices of the run, in one process."""
        return Demand(rest="layers", cpu_devices=CPU_RANKS if self.layers is None else len(self.layers))

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """A split that does not fit the network or the devices."""
        placement = planned.placement
        if placement.world_size > 1:
            return [
                ErrorDetails(
                    key="launch.nodes", got=f"{placement.nodes} nodes", expected="1: layer_split is one process"
                )
            ]
        count = placement.layers
        return _device_errors(count, self.layers) or split_errors(planned, count=count, layers=self.layers)

    def footprint(self, load: Load) -> Footprint:
        """The part of each device."""
        count = load.placement.layers
        places = device_places(load, count=count, layers=self.layers, ranks=(0,))
        inputs = list(load.inputs)
        parts = split(load.network, count=count, layers=self.layers, inputs=inputs)
        sent = sum(carried_bytes(parts, part, load) for part in range(count - 1)) * 2 * load.micro_batches
        return Footprint(places=places, transfers=[Transfer(what="copies between devices", sent=sent, over=count)])

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One process with several devices."""
        return LayerSplitStrategy(devices=placement.devices(rank.local_rank), layers=self.layers)


def split_errors(planned: Blueprint, *, count: int, layers: Layers | None) -> list[ErrorDetails]:
    """Why the network cannot be cut into so many parts."""
    try:
        inputs = example_arguments(planned.network, DataSpec.of(planned.config["data"]))
        split(planned.network, count=count, layers=layers, inputs=inputs)
    except ConfigError as error:
        return list(error.errors)
    return []


def carried_bytes(parts: Split, part: int, load: Load) -> int:
    """Bytes behind a part that later ones read, for a rank's micro-batch; those of its samples that a gradient has."""
    values = [parts.values[name] for name in parts.carried(part)]
    stand_ins = max(len(load.inputs[0]) if load.inputs and load.inputs[0].dim() else 1, 1)
    return sum(tensor.nbytes for value in values for tensor in tensors_in(value)) * load.samples // stand_ins


def part_place(load: Load, parts: Split, own: Sequence[int], *, ranks: tuple[int, ...], factor: float = 1.0) -> Place:
    """What is there of a network of which these parts are here.

    factor: of the activations of a whole micro-batch that are kept at once.
    """
    everything, names = whole_parameters(load), {name for part in own for name in parts.parts[part].tensors}
    layers = {
        layer: factor if place_parts in own else 0.0
        for place_parts, part in enumerate(parts.parts)
        for layer in part.layers
    }
    last = factor if len(parts.parts) - 1 in own else 0.0
    return Place(
        ranks=ranks,
        held={name: one for name, one in everything.items() if name in names},
        # What no layer keeps, but the code between them, is shared out evenly.
        activations={**layers, OBJECTIVE: last},
        rest=factor * len(own) / len(parts.parts),
    )


def device_places(load: Load, *, count: int, layers: Layers | None, ranks: tuple[int, ...]) -> list[Place]:
    """Of each device of a rank whose network is laid over several."""
    parts = split(load.network, count=count, layers=layers, inputs=list(load.inputs))
    return [replace(part_place(load, parts, [part], ranks=ranks), device=part) for part in range(count)]


def _device_errors(count: int, layers: Layers | None) -> list[ErrorDetails]:
    if layers is not None and len(layers) != count:
        got = f"{count} device{'s' if count > 1 else ''}"
        expected = f"{len(layers)}, one for each part of strategy.layers"
        return [
            ErrorDetails(key="launch.devices", got=got, expected=expected, fix=f"Write launch.devices={len(layers)}")
        ]
    if count == 1:
        expected = "2 or more to split over"
        return [ErrorDetails(key="launch.devices", got="1 device", expected=expected, fix="Write strategy=single")]
    return []


class SplitNetwork:
    """What a step calls in the network's place: its parts one after the other, each on its device.

    Each part computes where its layers are; what it reads is copied there without waiting. The output is on the last
    device.

    cast: of the inputs by name, what a precision makes of them.
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
    """What a Lightning strategy of one process with several devices does differently; for `class X(OverDevices, Base)`.

    The data and the loss are on the last device, where the output comes out.

    Relied on, and tested: Lightning calls `model_to_device` before it makes optimizers, and moves their state by
    `load_optimizer_state_dict` alone (seen in lightning 2.6.6).
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
        # The whole may not fit on any of the devices: the network is moved by its parts, and the rest without it.
        assert self._split is not None
        move_all_but_network(module_of(self), self.devices[-1])
        place_parts(network_of(self), self._split, self.devices)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # torch puts each state on its parameter's device; Lightning would move all of it to one.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):
            optimizer.load_state_dict(state)


def place_parts(network: nn.Module, parts: Split, devices: Sequence[torch.device]) -> None:
    """Moves every parameter and buffer, and its gradient, to the device of its part, in place."""
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
    """One process whose network lies on several devices."""

    def __init__(self, *, devices: Sequence[str], layers: Patterns | None) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = layers
        SingleDeviceStrategy.__init__(self, device=self.devices[-1])
