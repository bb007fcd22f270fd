"""Sizes of the parts of a network on each rank, and of the data that it sends per step, before anything is placed.

The method `footprint` of a strategy returns them, and exp.plan reads them. The bytes that a rank sends in a collective
are those of a ring, the smallest possible (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms):

    all-gather, reduce-scatter of S bytes over N ranks      (N - 1) / N * S
    all-reduce                                              both of them, 2 (N - 1) / N * S
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from exp.strategies.placement import Placement

# Used instead of a layer's path for the activations of the objective.
OBJECTIVE = "(objective)"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A parameter of the whole network.

    Attributes:
        itemsize: Bytes of one number.
        learns: Whether it has a gradient.
        size: Bytes of its storage; 0 if an earlier parameter has the same storage.
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
    """A rank's part of a parameter.

    Attributes:
        shape: Shape of the part, for which the optimizer keeps its state.
        stored: Bytes of the part with padding; 0 if another part of the rank has the same storage.
        gradient: Bytes of its gradient with padding.
        steps: Whether this rank's optimizer updates it.
    """

    shape: tuple[int, ...]
    stored: int
    gradient: int
    steps: bool


@dataclass(frozen=True, kw_only=True)
class Load:
    """The part of a run from which a strategy computes its footprint.

    Attributes:
        network: On the meta device, with all sizes.
        sizes: Sizes of its parameters by name, each shared parameter once.
        inputs: Examples of the network's inputs, with which it is split.
        buffers: Bytes of its buffers.
        outputs: Bytes of each layer's output for a rank's micro-batch, by path.
        micro_batches: Micro-batches of a step.
        samples: Samples of a rank's micro-batch.
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

    def whole_parameters(self) -> dict[str, Held]:
        """Return every parameter, unsplit."""
        return {
            name: Held(shape=one.shape, stored=one.nbytes, gradient=one.nbytes if one.learns else 0, steps=one.learns)
            for name, one in self.sizes.items()
        }

    def gradient_transfers(self, *, factor: float = 1.0) -> list[Transfer]:
        """Return the all-reduce of gradients over the data ranks. factor: Share of bytes that is sent."""
        ranks = self.placement.data_ranks
        sent = all_reduce_bytes(self.gradient_bytes * factor, ranks)
        return [Transfer(what="all-reduce of gradients", sent=sent, over=ranks)] if ranks > 1 else []


@dataclass(frozen=True, kw_only=True)
class Place:
    """The contents of one device of one rank.

    Attributes:
        ranks: Ranks with the same contents.
        device: Index among the devices of a rank with several. None: the rank has one device.
        held: Parts by the parameter's name.
        activations: Factors on the activations of a rank's whole micro-batch, by layer path. A factor applies to
            everything below its path; `rest` applies elsewhere.
        buffers: Bytes that communication needs, by purpose.
        offloaded: Whether weights, gradients and optimizer state are in the host's memory.
    """

    ranks: tuple[int, ...]
    held: Mapping[str, Held]
    device: int | None = None
    activations: Mapping[str, float] = field(default_factory=dict)
    rest: float = 1.0
    buffers: Mapping[str, int] = field(default_factory=dict)
    offloaded: bool = False

    def share_of(self, path: str) -> float:
        """Return the factor of a layer."""
        return share_of(path, self.activations, rest=self.rest)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """The data that a rank sends in one optimizer step.

    Attributes:
        sent: Bytes.
        over: Ranks that take part.
        messages: Number of calls.
    """

    what: str
    sent: float
    over: int
    messages: int = 1


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """The memory, transfers and work of all ranks.

    Attributes:
        places: Contents of all devices.
        transfers: Data that a rank sends.
        work: A rank's share of the arithmetic and of the bytes moved in a micro-batch, from 0 to 1.
        layer_work: Shares of single layers by path, which apply to everything below the path, instead of `work`.
        calls: Calls of each operator per micro-batch. A call takes as long for a smaller part.
        waiting: Length of a step divided by the rank's own work in it; 1 if no rank waits.
        notes: Reasons why numbers are estimates.
    """

    places: Sequence[Place]
    transfers: Sequence[Transfer] = ()
    work: float = 1.0
    layer_work: Mapping[str, float] = field(default_factory=dict)
    calls: float = 1.0
    waiting: float = 1.0
    notes: tuple[str, ...] = ()

    def work_of(self, path: str) -> float:
        """Return the share of a layer's work."""
        return share_of(path, self.layer_work, rest=self.work)


def share_of(path: str, shares: Mapping[str, float], *, rest: float) -> float:
    """Return the share of a layer: that of the longest path that contains it, or `rest`."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in shares:
            return shares[name]
    return rest


def shard_parameters(held: Mapping[str, Held], sizes: Mapping[str, Size], *, ranks: int, rank: int) -> dict[str, Held]:
    """Return a rank's rows of each part, as FSDP2 splits them: equal numbers of rows, padded in storage to the largest.

    A scalar counts as one row.
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
    """Return the bytes that each rank sends in an all-gather or reduce-scatter of `size` bytes in total."""
    return size * (ranks - 1) / ranks


def merge_equal_places(places: Iterable[Place]) -> list[Place]:
    """Return the places, with those of equal contents merged."""
    found: list[Place] = []
    for place in places:
        index = next((at for at, one in enumerate(found) if replace(one, ranks=place.ranks) == place), None)
        if index is None:
            found.append(place)
        else:
            found[index] = replace(place, ranks=(*found[index].ranks, *place.ranks))
    return found
