"""Memory of a network on each rank, and data sent per step, computed before any tensor is on a device.

A strategy's method `footprint` returns these sizes, and exp.plan reads them. All collectives are assumed to use a ring,
which is optimal (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms). Each rank then sends:

    all-gather, reduce-scatter of S bytes over N ranks      (N - 1) / N * S
    all-reduce of S bytes over N ranks                      2 (N - 1) / N * S
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from exp.strategies.placement import Placement

# Name used for the objective's activations instead of a layer's path.
OBJECTIVE = "(objective)"


@dataclass(frozen=True, kw_only=True)
class Size:
    """Size of one parameter of the whole network.

    Attributes:
        shape: Shape of the parameter.
        itemsize: Bytes per number.
        learns: Whether the parameter is trained, and therefore has a gradient.
        size: Bytes of the parameter's storage. 0 if an earlier parameter uses the same storage.
    """

    shape: tuple[int, ...]
    itemsize: int
    learns: bool
    size: int

    @property
    def count(self) -> int:
        return math.prod(self.shape)

    @property
    def nbytes(self) -> int:
        return self.count * self.itemsize


@dataclass(frozen=True, kw_only=True)
class Held:
    """Part of a parameter that a rank stores.

    Attributes:
        shape: Shape of the part. The optimizer state has the same shape.
        stored: Bytes of the part with padding. 0 if another part on the rank uses the same storage.
        gradient: Bytes of the part's gradient with padding.
        steps: Whether this rank's optimizer updates the part.
    """

    shape: tuple[int, ...]
    stored: int
    gradient: int
    steps: bool


@dataclass(frozen=True, kw_only=True)
class Load:
    """Properties of a run from which a strategy computes its footprint.

    Attributes:
        network: Network on the meta device. All shapes are known.
        sizes: Sizes of the network's parameters by name. A shared parameter is listed once.
        placement: Placement of the run.
        inputs: Example inputs of the network, for splitting the network into parts. Default: ().
        buffers: Bytes of the network's buffers. Default: 0.
        outputs: Bytes of each layer's output for one rank's micro-batch, by path. Default: empty.
        micro_batches: Number of micro-batches per step. Default: 1.
        samples: Number of samples in one rank's micro-batch. Default: 1.
    """

    network: nn.Module
    sizes: Mapping[str, Size]
    placement: Placement
    inputs: tuple[torch.Tensor, ...] = ()
    buffers: int = 0
    outputs: Mapping[str, int] = field(default_factory=dict)
    micro_batches: int = 1
    samples: int = 1

    @property
    def gradient_bytes(self) -> int:
        return sum(size.nbytes for size in self.sizes.values() if size.learns)

    @property
    def parameter_bytes(self) -> int:
        return sum(size.nbytes for size in self.sizes.values())

    def copies(self) -> Footprint:
        """Return the footprint of a run in which each rank has a copy of the network and gradients are averaged."""
        place = Place(ranks=tuple(range(self.placement.world_size)), held=self.whole_parameters())
        return Footprint(places=[place], transfers=self.gradient_transfers())

    def whole_parameters(self) -> dict[str, Held]:
        """Return all parameters as parts of a rank that stores the whole network, by name."""
        return {
            name: Held(shape=one.shape, stored=one.nbytes, gradient=one.nbytes if one.learns else 0, steps=one.learns)
            for name, one in self.sizes.items()
        }

    def gradient_transfers(self, *, factor: float = 1.0) -> list[Transfer]:
        """Return the transfer that averages gradients over the ranks with different samples.

        Args:
            factor: Fraction of the bytes that is sent. Default: 1.
        """
        ranks = self.placement.data_ranks
        sent = all_reduce_bytes(self.gradient_bytes * factor, ranks)
        return [Transfer(what="all-reduce of gradients", sent=sent, over=ranks)] if ranks > 1 else []


@dataclass(frozen=True, kw_only=True)
class Place:
    """Contents of the memory of one device.

    Attributes:
        ranks: Ranks whose devices have the same contents.
        held: Stored parts of parameters, by parameter name.
        device: Index of the device, if a rank has several devices. None if the rank has one device. Default: None.
        activations: Fractions of the activations of one rank's micro-batch that are in memory, by layer path. A
            fraction applies to all layers below its path. Default: empty.
        rest: Fraction for layers without an entry in `activations`. Default: 1.
        buffers: Bytes of communication buffers, by purpose. Default: empty.
        offloaded: Whether weights, gradients and optimizer state are in host memory. Default: False.
    """

    ranks: tuple[int, ...]
    held: Mapping[str, Held]
    device: int | None = None
    activations: Mapping[str, float] = field(default_factory=dict)
    rest: float = 1.0
    buffers: Mapping[str, int] = field(default_factory=dict)
    offloaded: bool = False

    def share_of(self, path: str) -> float:
        """Return the fraction of a layer's activations that is in memory."""
        return share_of(path, self.activations, rest=self.rest)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """Data that a rank sends in one optimizer step.

    Attributes:
        what: Description of the transfer.
        sent: Bytes sent.
        over: Number of participating ranks.
        messages: Number of collective calls. Default: 1.
    """

    what: str
    sent: float
    over: int
    messages: int = 1


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """Memory, transfers and work of all ranks.

    Attributes:
        places: Contents of all devices.
        transfers: Data that a rank sends. Default: ().
        work: Fraction of the computation of a micro-batch that one rank does, from 0 to 1. Default: 1.
        layer_work: Fractions for single layers by path, used instead of `work`. They apply to all layers below the
            path. Default: empty.
        calls: Number of calls of each operator per micro-batch. A call on a part of the micro-batch is assumed to have
            the same overhead. Default: 1.
        waiting: Duration of a step divided by the time in which the rank computes. 1 if no rank waits. Default: 1.
        notes: Reasons why numbers are estimates. Default: ().
    """

    places: Sequence[Place]
    transfers: Sequence[Transfer] = ()
    work: float = 1.0
    layer_work: Mapping[str, float] = field(default_factory=dict)
    calls: float = 1.0
    waiting: float = 1.0
    notes: tuple[str, ...] = ()

    def work_of(self, path: str) -> float:
        """Return the fraction of a layer's work that one rank computes."""
        return share_of(path, self.layer_work, rest=self.work)


def share_of(path: str, shares: Mapping[str, float], *, rest: float) -> float:
    """Return the value of the longest path in `shares` that contains a layer.

    Args:
        path: Path of the layer.
        shares: Values by path.
        rest: Value for a layer that no path contains.
    """
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in shares:
            return shares[name]
    return rest


def shard_parameters(held: Mapping[str, Held], sizes: Mapping[str, Size], *, ranks: int, rank: int) -> dict[str, Held]:
    """Return the shard of each part that one rank stores. FSDP2 splits parts by rows.

    All ranks get an equal number of rows. Storage is padded to the largest shard. A scalar counts as one row.

    Args:
        held: Parts before they are sharded, by parameter name.
        sizes: Sizes of the whole parameters, by name.
        ranks: Number of ranks that share each part.
        rank: Index of the rank among these ranks.
    """
    found = {}
    for name, one in held.items():
        shape = one.shape or (1,)
        rows = -(-shape[0] // ranks)
        own = max(0, min(rows, shape[0] - rank * rows))
        padded = rows * math.prod(shape[1:]) * sizes[name].itemsize
        learns = padded if one.gradient else 0
        found[name] = replace(one, shape=(own, *shape[1:]), stored=padded, gradient=learns)
    return found


def all_reduce_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-reduce of `size` bytes."""
    return 2 * gather_bytes(size, ranks)


def gather_bytes(size: float, ranks: int) -> float:
    """Return the bytes that each rank sends in an all-gather or a reduce-scatter of `size` bytes in total."""
    return size * (ranks - 1) / ranks


def merge_equal_places(places: Iterable[Place]) -> list[Place]:
    """Merge devices with the same contents of memory into one place, which lists the ranks of all these devices."""
    found: list[Place] = []
    for place in places:
        index = next((at for at, one in enumerate(found) if replace(one, ranks=place.ranks) == place), None)
        if index is None:
            found.append(place)
        else:
            found[index] = replace(place, ranks=(*found[index].ranks, *place.ranks))
    return found
