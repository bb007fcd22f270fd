"""Layers split over devices: one process, each part of the network on a device of its own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault
from exp.strategies.cut_faults import DEVICES, cut_faults
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

    splits_batch = False
    splits_devices = True

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
        count = placement.devices_per_rank
        return _device_faults(count, self.layers) or split_faults(planned, count=count, layers=self.layers)

    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """One process with several devices."""
        from exp.strategies.lightning_layer_split import LayerSplitStrategy

        return LayerSplitStrategy(devices=placement.devices(rank.local_rank), layers=self.layers)


@dataclass(frozen=True, kw_only=True)
class InnerSplit:
    """How the network of each rank is laid over devices. devices: of each rank. layers: as LayerSplit's."""

    devices: int
    layers: Sequence[Sequence[str]] | None


def inner_split(inner: Any, *, devices_per_rank: Any, layers: Sequence[Sequence[str]] | None) -> InnerSplit | None:
    """The options of a strategy of several ranks whose `inner` may be layer_split. Raises: ConfigError."""
    refuse_shapeless(layers)
    faults = []
    if inner not in (None, "layer_split"):
        faults.append(Fault(key="inner", got=repr(inner), expected="null, or layer_split"))
    if inner is None:
        for key, value in (("devices_per_rank", devices_per_rank), ("layers", layers)):
            if value is not None:
                cure = "Add strategy.inner=layer_split"
                faults.append(Fault(key=key, got=f"{value} without inner", expected="null", cure=cure))
    count = devices_per_rank if devices_per_rank is not None else (2 if layers is None else len(layers))
    if not isinstance(count, int) or isinstance(count, bool) or count < 2:
        faults.append(Fault(key="devices_per_rank", got=repr(count), expected="null, or an integer, 2 or more"))
    elif layers is not None and len(layers) != count:
        expected = f"{len(layers)}, one for each part of strategy.layers"
        faults.append(Fault(key="devices_per_rank", got=str(count), expected=expected))
    if faults:
        raise ConfigError(faults)
    return None if inner is None else InnerSplit(devices=count, layers=layers)


def refuse_shapeless(layers: Any) -> None:
    """Raises: ConfigError where `layers` is not a list of lists of names."""
    if layers is None:
        return
    if isinstance(layers, Sequence) and not isinstance(layers, str) and layers and all(map(_is_part, layers)):
        return
    expected = 'null, or a list of name patterns for each part, such as [[stem, "stage.*"], [head]]'
    raise ConfigError([Fault(key="layers", got=repr(layers), expected=expected)])


def split_faults(planned: Planned, *, count: int, layers: Sequence[Sequence[str]] | None) -> list[Fault]:
    """Why the network cannot be cut into so many parts, and what of a run only a whole network can do."""
    from exp.models.parts import split

    name = planned.config["strategy"]["name"]
    faults = cut_faults(planned, DEVICES, name=name, meets=frozenset({"retained_graph"}))
    try:
        split(planned.network, count=count, layers=layers, inputs=stand_ins(planned.config))
    except ConfigError as error:
        faults += error.faults
    return faults


def _device_faults(count: int, layers: Sequence[Sequence[str]] | None) -> list[Fault]:
    if layers is not None and len(layers) != count:
        got = f"{count} device{'s' if count > 1 else ''}"
        expected = f"{len(layers)}, one for each part of strategy.layers"
        return [Fault(key="launch.devices", got=got, expected=expected, cure=f"Write launch.devices={len(layers)}")]
    if count == 1:
        expected = "2 or more to split over"
        return [Fault(key="launch.devices", got="1 device", expected=expected, cure="Write strategy=single")]
    return []


def stand_ins(config: Mapping[str, Any]) -> tuple[Tensor, ...]:
    """A batch of zeros of the data's shape, on the meta device."""
    from exp.models.inference import example_inputs
    from exp.types import DataSpec

    return example_inputs(DataSpec.of(config["data"]), device="meta")


def _is_part(part: Any) -> bool:
    listed = isinstance(part, Sequence) and not isinstance(part, str)
    return listed and len(part) > 0 and all(isinstance(pattern, str) and pattern for pattern in part)
