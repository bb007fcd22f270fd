"""Lightning's side of layer_split. Imported in a rank only, for it imports Lightning."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from exp.models.inference import example_inputs
from exp.models.parts import Split, split
from exp.models.split import Patterns
from exp.nested import moved
from exp.strategies.lightning_ddp import ExpDDPStrategy


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
        cast: Callable[[Any], Any] = lambda inputs: inputs,
    ) -> None:
        self.network, self.parts, self.devices, self.cast = network, parts, tuple(devices), cast

    def __call__(self, *arguments: Any, **named: Any) -> Any:
        inputs = self.cast(self.parts.bind(arguments, named))
        values: dict[str, Any] = {}
        for part, device in zip(self.parts.parts, self.devices, strict=True):
            read = [moved(inputs[name], device) for name in part.inputs]
            read += [moved(values[name], device) for name in part.takes]
            output = part.run(self.network, *read)
            if part is self.parts.parts[-1]:
                return output
            values.update(zip(part.gives, output, strict=True))
        raise AssertionError("a split has parts")


class OverDevices:
    """What a Lightning strategy of one process with several devices does differently; for `class X(OverDevices, Base)`.

    The data and the loss are on the last device, where the output comes out.

    Relied on, and tested: Lightning calls `model_to_device` before it makes optimizers, and moves their state by
    `load_optimizer_state_dict` alone (seen in lightning 2.6.6).
    """

    devices: tuple[torch.device, ...]
    layers: Patterns | None
    _split: Split | None = None

    def setup(self, trainer: Trainer) -> None:
        module = trainer.lightning_module
        if self._split is None:
            self._split = split(
                module.network,
                count=len(self.devices),
                layers=self.layers,
                inputs=example_inputs(trainer.datamodule.data.spec, device="meta"),
            )
        module.__dict__["run_network"] = SplitNetwork(
            module.network,
            self._split,
            self.devices,
            cast=self.precision_plugin.cast_inputs,  # type: ignore[attr-defined]
        )
        super().setup(trainer)  # type: ignore[misc]

    def teardown(self) -> None:
        module = self.lightning_module  # type: ignore[attr-defined]
        if module is not None:
            module.__dict__["run_network"] = module.network
        super().teardown()  # type: ignore[misc]

    def model_to_device(self) -> None:
        module: LightningModule = self.lightning_module  # type: ignore[attr-defined]
        network = module.network
        # The whole may not fit on any of the devices: the network is moved by its parts, and the rest without it.
        module.network = nn.Identity()
        module.to(self.devices[-1])
        module.network = network
        place(network, self._split, self.devices)

    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        # torch puts each state on its parameter's device; Lightning would move all of it to one.
        for optimizer, state in zip(self.optimizers, checkpoint["optimizer_states"], strict=True):  # type: ignore[attr-defined]
            optimizer.load_state_dict(state)


def place(network: nn.Module, parts: Split, devices: Sequence[torch.device]) -> None:
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


class SplitDDPStrategy(OverDevices, ExpDDPStrategy):
    """Ranks that average their gradients, each with a network on several devices.

    DistributedDataParallel takes such a module without device_ids.
    """

    def __init__(self, *, devices: Sequence[str], layers: Patterns | None, **options: Any) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = layers
        ExpDDPStrategy.__init__(self, **options)

    @property
    def root_device(self) -> torch.device:
        return self.devices[-1]

    def determine_ddp_device_ids(self) -> list[int] | None:
        return None


class LayerSplitStrategy(OverDevices, SingleDeviceStrategy):
    """One process whose network lies on several devices."""

    def __init__(self, *, devices: Sequence[str], layers: Patterns | None) -> None:
        self.devices = tuple(map(torch.device, devices))
        self.layers = layers
        SingleDeviceStrategy.__init__(self, device=self.devices[-1])
