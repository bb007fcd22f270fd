"""Which samples make which global batch, and which of them are one rank's: arithmetic alone, no data."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from exp.data.randomness import permutation


@dataclass(frozen=True, kw_only=True)
class GlobalBatches:
    """The global batches of an epoch over `length` samples. The order is a function of (seed, epoch) alone."""

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int

    def __len__(self) -> int:
        return self.length // self.batch_size if self.drop_last else -(-self.length // self.batch_size)

    def order(self, epoch: int) -> Tensor:
        """Indices of the samples in the order in which they are seen, int64 `[length]`."""
        if self.shuffle:
            return permutation(seed=self.seed, epoch=epoch, length=self.length)
        return torch.arange(self.length)

    def size(self, batch: int) -> int:
        """Samples of one global batch, B: all the same but for a short last one."""
        return min(self.batch_size, self.length - batch * self.batch_size)


@dataclass(frozen=True, kw_only=True)
class Share:
    """One rank's part of a global batch: samples start to stop of it.

    size: how many of them count; 0 where the rank has none and reads one stand-in sample instead.
    """

    start: int
    stop: int
    size: int


def share(*, size: int, rank: int, world_size: int) -> Share:
    """Splits a global batch of `size` samples as evenly as it goes; the first ranks hold one more."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    count = base + (rank < extra)
    return Share(start=start, stop=start + count, size=count) if count else Share(start=0, stop=1, size=0)


class ShareSampler:
    """Yields, for each global batch from a position on, this rank's samples as (epoch, index) pairs.

    The epoch travels with each index, since persistent workers hold a copy of the data set from the first epoch.
    """

    def __init__(self, *, batches: GlobalBatches, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size
        self.epoch = 0
        self.start = 0

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def share(self, batch: int) -> Share:
        return share(size=self.batches.size(batch), rank=self.rank, world_size=self.world_size)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.batches.order(self.epoch)
        for batch in range(self.start, len(self.batches)):
            first = batch * self.batches.batch_size
            mine = self.share(batch)
            yield [(epoch, index) for index in order[first + mine.start : first + mine.stop].tolist()]
