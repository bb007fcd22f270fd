"""What each rank holds of a network under a strategy, and what it sends in a step: sizes, before anything is placed.

A strategy says it by its method `footprint`; exp.plan reads it. Bytes that a collective makes a rank send are those of
a ring, which no other algorithm undercuts (Patarasuk and Yuan 2009, Bandwidth optimal all-reduce algorithms):

    all-gather, reduce-scatter of S bytes over N ranks      (N - 1) / N * S
    all-reduce                                              the two after one another, 2 (N - 1) / N * S
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import nn

from exp.strategies.placement import Placement

# In the place of a layer's path: what the objective keeps.
OBJECTIVE = "(objective)"


@dataclass(frozen=True, kw_only=True)
class Size:
    """A parameter of the whole network.

    itemsize: bytes of one of its numbers. learns: whether it has a gradient.
    size: bytes of its storage; 0 if another parameter that was counted before has the same storage.
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

    shape: of the part, for which the optimizer keeps its state. stored, gradient: bytes of the storages of the part and
    of its gradient, padding included; 0 where another part of the rank has the storage.
    steps: whether this rank's optimizer steps it.
    """

    shape: tuple[int, ...]
    stored: int
    gradient: int
    steps: bool


@dataclass(frozen=True, kw_only=True)
class Load:
    """What of a run a strategy is told.

    network: on the meta device, every layer sized. sizes: of its parameters, by name, each shared one once.
    inputs: stand-ins for the network's inputs, by which it can be cut.
    buffers: bytes of its buffers. outputs: bytes of what each layer gave for a rank's micro-batch, by path.
    micro_batches: that are accumulated in a step. samples: of a rank's micro-batch.
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


@dataclass(frozen=True, kw_only=True)
class Place:
    """What one device of one rank has.

    ranks: those that have the same. device: of those of a rank, where it has several; None where it has one.
    held: by the parameter's name; a name that is missing is not there.
    activations: factors by path of a layer, of what the layer keeps for a rank's whole micro-batch; what is below a
        path follows it, and what is below none has `rest`.
    buffers: bytes that communication needs beside the four parts, by what they are for.
    offloaded: whether weights, gradients and optimizer state lie in the host's memory.
    """

    ranks: tuple[int, ...]
    held: Mapping[str, Held]
    device: int | None = None
    activations: Mapping[str, float] = field(default_factory=dict)
    rest: float = 1.0
    buffers: Mapping[str, int] = field(default_factory=dict)
    offloaded: bool = False

    def share_of(self, path: str) -> float:
        """The factor of a layer, by the longest path that it is below."""
        return share_of(path, self.activations, rest=self.rest)


@dataclass(frozen=True, kw_only=True)
class Transfer:
    """What a rank sends in one optimizer step. sent: bytes. over: ranks that take part. messages: how many calls."""

    what: str
    sent: float
    over: int
    messages: int = 1


@dataclass(frozen=True, kw_only=True)
class Footprint:
    """places: of all ranks. notes: what of it is an estimate, or not known, and why.

    work: a rank's share of the arithmetic and of the bytes moved in a micro-batch: 1 where it does all of it.
    layer_work: the share of a layer, by its path, in the place of `work`; what is below a path follows it.
    calls: how often a rank calls each operator for a micro-batch: also of smaller parts a call takes as long.
    waiting: how many times as long a step is as the rank's own work in it: 1 where no rank waits for another.
    """

    places: Sequence[Place]
    transfers: Sequence[Transfer] = ()
    work: float = 1.0
    layer_work: Mapping[str, float] = field(default_factory=dict)
    calls: float = 1.0
    waiting: float = 1.0
    notes: tuple[str, ...] = ()

    def work_of(self, path: str) -> float:
        """The share of a layer's work, by the longest path that it is below."""
        return share_of(path, self.layer_work, rest=self.work)


def share_of(path: str, shares: Mapping[str, float], *, rest: float) -> float:
    """The share of a layer, by the longest path that it is below; `rest` of one that is below none."""
    parts = path.split(".")
    for end in range(len(parts), 0, -1):
        if (name := ".".join(parts[:end])) in shares:
            return shares[name]
    return rest


def whole(load: Load) -> dict[str, Held]:
    """Every parameter as it is."""
    return {
        name: Held(shape=one.shape, stored=one.nbytes, gradient=one.nbytes if one.learns else 0, steps=one.learns)
        for name, one in load.sizes.items()
    }


def shards(held: Mapping[str, Held], sizes: Mapping[str, Size], *, ranks: int, rank: int) -> dict[str, Held]:
    """Each part cut again along its first dimension, as FSDP2 cuts: equal rows, padded in storage to the largest.

    A number without dimensions counts as one row.
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


def all_reduce(size: float, ranks: int) -> float:
    """Bytes that each rank sends."""
    return 2 * gather(size, ranks)


def gather(size: float, ranks: int) -> float:
    """Bytes that each rank sends in an all-gather or a reduce-scatter of `size` bytes in all."""
    return size * (ranks - 1) / ranks


def averaged(load: Load, *, factor: float = 1.0) -> list[Transfer]:
    """The gradients of ranks that share the batch, added up once a step. factor: of their bytes that are sent."""
    ranks = load.placement.data_ranks
    if ranks == 1:
        return []
    sent = all_reduce(load.gradient_bytes * factor, ranks)
    return [Transfer(what="all-reduce of gradients", sent=sent, over=ranks)]


def grouped(places: Iterable[Place]) -> list[Place]:
    """The same places, those that hold alike as one."""
    found: list[tuple[Place, list[int]]] = []
    for place in places:
        kind = replace(place, ranks=())
        alike = next((ranks for one, ranks in found if one == kind), None)
        if alike is None:
            found.append((kind, list(place.ranks)))
        else:
            alike.extend(place.ranks)
    return [replace(one, ranks=tuple(ranks)) for one, ranks in found]
