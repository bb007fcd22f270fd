"""Layers split over devices: one process, each part of the network on a device of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault
from exp.strategies.placement import CPU_RANKS, Demand
from exp.strategies.strategy import Planned, Strategy

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy
    from torch import Tensor

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


class LayerSplit(Strategy):
    """PyTorch's model-parallel tutorial: a network that is too large for one device is laid over several.

    One part works at a time, so it saves memory, not time; `pipeline` lets the parts work at once.

    layers: name patterns of the layers of each device, in order; None balances them by the bytes of their parameters.
    """

    def __init__(self, *, name: str = "layer_split", layers: Sequence[Sequence[str]] | None = None) -> None:
        super().__init__(name=name)
        refuse_shapeless(layers)
        self.layers = layers

    @property
    def demand(self) -> Demand:
        """All devices of the run, in one process."""
        return Demand(devices=None, cpu_devices=CPU_RANKS if self.layers is None else len(self.layers))

    def faults(self, planned: Planned) -> Sequence[Fault]:
        """A split that does not fit the network or the devices."""
        placement = planned.placement
        if placement.world_size > 1:
            got = f"{placement.nodes} nodes"
            cure = "Write strategy=ddp strategy.inner=layer_split"
            return [Fault(key="launch.nodes", got=got, expected="1: layer_split is one process", cure=cure)]
        return split_faults(planned, count=placement.devices_per_rank, layers=self.layers)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One process with several devices."""
        from exp.strategies.lightning_layer_split import LayerSplitStrategy

        return LayerSplitStrategy(devices=placement.devices(rank.local_rank), layers=self.layers)


def refuse_shapeless(layers: Any) -> None:
    """Raises: ConfigError where `layers` is not a list of lists of names."""
    if layers is None:
        return
    if isinstance(layers, Sequence) and not isinstance(layers, str) and layers and all(map(_is_part, layers)):
        return
    expected = 'null, or a list of name patterns for each part, such as [[stem, "stage.*"], [head]]'
    raise ConfigError([Fault(key="layers", got=repr(layers), expected=expected)])


def split_faults(planned: Planned, *, count: int, layers: Sequence[Sequence[str]] | None) -> list[Fault]:
    """Why the network cannot be cut so, and `launch.devices` where the number of devices is what does not fit."""
    from exp.models.parts import split

    if layers is not None and len(layers) != count:
        got = f"{count} device{'s' if count > 1 else ''}"
        expected = f"{len(layers)}, one for each part of strategy.layers"
        return [Fault(key="launch.devices", got=got, expected=expected, cure=f"Write launch.devices={len(layers)}")]
    if count == 1:
        return [Fault(key="launch.devices", got="1 device", expected="2 or more to split over", cure="strategy=single")]
    try:
        split(planned.network, count=count, layers=layers, inputs=stand_ins(planned.config))
    except ConfigError as error:
        return list(error.faults)
    return []


def stand_ins(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """A batch of zeros of the data's shape, on the meta device."""
    from exp.models.inference import example_inputs
    from exp.types import DataSpec

    data = config["data"]
    spec = DataSpec(
        input_shape=tuple(data["input_shape"]),
        input_dtype=data["input_dtype"],
        num_classes=data["num_classes"],
        num_outputs=data["num_outputs"],
    )
    return example_inputs(spec, device="meta")


def _is_part(part: Any) -> bool:
    listed = isinstance(part, Sequence) and not isinstance(part, str)
    return listed and len(part) > 0 and all(isinstance(pattern, str) and pattern for pattern in part)
