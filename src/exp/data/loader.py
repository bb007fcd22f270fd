"""Loaders: iterables of the batches of one rank. Loaders and the orders of samples can be read from any position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Dataset

from exp.data.randomness import permutation, preserve_generators, reseed_epoch, seed_for
from exp.errors import RunError
from exp.shared_types import Batch, Stage

# The maximum length of an order that is stored as a tensor, of 32 MiB. Longer orders are computed when they are read.
LISTED = 2**22
# The number of positions that are computed at once: 512 KiB of indices, which makes Python's overhead negligible.
PAGE = 2**16
# The number of half rounds of the Feistel network. Each changes one half of the bits with a hash of the other half.
# After four, neighboring indices are still correlated; six suffice.
HALF_ROUNDS = 6


class Loader(ABC):
    """Base class of loaders, which yield the batches of one stage on one rank.

    Every rank yields the same number of batches.

    Each iteration over a training loader is the next epoch, starting at epoch 0. An evaluation loader stays at epoch 0,
    so that its random numbers are the same in each iteration.

    Attributes:
        sampler: Yields the indices of the samples in each batch; None for an IterableDataset.
    """

    sampler: ShareSampler | None = None

    def __init__(self, *, stage: Stage) -> None:
        self.stage = stage
        self._position = (0, 0)

    def set_position(self, epoch: int, batch: int) -> None:
        """Set the position at which the next iteration starts.

        Args:
            epoch: The epoch, from 0.
            batch: The number of the global batch in the epoch, from 0.

        Raises:
            RunError: The position is outside the data.
        """
        length = self._length()
        if epoch < 0 or batch < 0 or (length is not None and batch > length):
            raise RunError(
                f"data: the run would continue at batch {batch} of epoch {epoch}, although {self.stage} has {length} "
                f"batches; expected the data and the data.batch_size of the checkpoint's run"
            )
        self._position = (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._position
        self._position = (epoch + 1 if self.stage == "train" else 0, 0)
        return self._batches(epoch if self.stage == "train" else 0, start)

    def __len__(self) -> int:
        """Return the number of global batches in an epoch.

        Raises:
            TypeError: The length of a stream is unknown.
        """
        length = self._length()
        if length is None:
            raise TypeError("data: the length of this stream is unknown")
        return length

    @abstractmethod
    def _length(self) -> int | None:
        """Return the number of global batches in an epoch; None if the number is unknown."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return this rank's samples of each global batch, from batch number `start`."""


@runtime_checkable
class Epochs(Protocol):
    """A data set or sampler with `set_epoch`. exp calls `set_epoch` before an epoch is read."""

    def set_epoch(self, epoch: int) -> None: ...


# The last epoch passed to `set_epoch`, by the id of the data set. Several splits may share a data set, which receives
# each epoch once.
_RECEIVED: dict[int, int] = {}


def find_epoch_aware(dataset: object) -> tuple[Epochs, ...]:
    """Return the data sets with `set_epoch`: this data set, or those that it wraps.

    Wrapped data sets are found in the attributes that torch's data sets use, such as `dataset` and `datasets`.
    """
    if callable(getattr(dataset, "set_epoch", None)) and isinstance(dataset, Epochs):
        _RECEIVED.pop(id(dataset), None)
        return (dataset,)
    held = [getattr(dataset, name, None) for name in ("dataset", "source")]
    several = getattr(dataset, "datasets", None)
    held += several.values() if isinstance(several, dict) else several if isinstance(several, list | tuple) else ()
    return tuple(part for one in held if isinstance(one, Dataset) for part in find_epoch_aware(one))


def set_epochs(parts: Sequence[Epochs], epoch: int, *, seed: int) -> None:
    """Call `set_epoch` of data sets. Random numbers that it draws depend only on (seed, epoch)."""
    for part in parts:
        if _RECEIVED.get(id(part)) != epoch:
            with preserve_generators():
                reseed_epoch(seed=seed, rank=0, epoch=epoch)
                part.set_epoch(epoch)
            _RECEIVED[id(part)] = epoch


class Order(ABC):
    """The indices of an epoch's samples, by position."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Tensor:
        """Return the indices at positions start to stop, int64 `[stop - start]`."""


class Sequential(Order):
    """The indices in increasing order."""

    def slice(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop)


@dataclass(frozen=True, eq=False)
class Listed(Order):
    """An order that is stored as a tensor of indices, int64 `[N]`."""

    indices: Tensor

    def slice(self, start: int, stop: int) -> Tensor:
        return self.indices[start:stop]


class Permuted(Order):
    """A random permutation of the indices below `length` that is computed from a seed, without storing all indices.

    A Feistel network permutes the numbers with as many bits as `length`. A number that is not below `length` is
    permuted again until it is; this takes at most two permutations on average (Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002). The order is computed in pages. The last page is cached, because reading continues
    mostly within it.

    Args:
        length: The number of indices.
        seed: A seed of 64 bits.
    """

    def __init__(self, *, length: int, seed: int) -> None:
        self.length = length
        self._number, self._page = -1, torch.empty(0, dtype=torch.int64)
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = [np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)]
        self._keys = [np.uint64(seed_for(seed, "round", number)) for number in range(HALF_ROUNDS)]

    def slice(self, start: int, stop: int) -> Tensor:
        pieces = []
        for number in range(start // PAGE, -(-stop // PAGE)):
            first = number * PAGE
            if number != self._number:
                self._number, self._page = number, self._indices(first, min(first + PAGE, self.length))
            pieces.append(self._page[max(0, start - first) : stop - first])
        return pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *pieces])

    def _indices(self, start: int, stop: int) -> Tensor:
        found = self._permute(np.arange(start, stop, dtype=np.uint64))
        while len(outside := np.flatnonzero(found >= self.length)):
            found[outside] = self._permute(found[outside])
        return torch.from_numpy(found.astype(np.int64))

    def _permute(self, numbers: np.ndarray) -> np.ndarray:
        halves = [numbers & self._masks[0], numbers >> self._low]
        for number, key in enumerate(self._keys):
            changed = number % 2
            halves[changed] ^= _mix_bits(halves[1 - changed], key) & self._masks[changed]
        return halves[1] << self._low | halves[0]


def shuffle_order(length: int, *, seed: int, epoch: int) -> Order:
    """Return a random order of the indices below `length`. It depends only on (seed, epoch)."""
    if length <= LISTED:
        return Listed(permutation(seed=seed, epoch=epoch, length=length))
    return Permuted(length=length, seed=seed_for(seed, "order", epoch))


def _mix_bits(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the numbers hashed with the finalizer of MurmurHash3, uint64 `[n]`."""
    mixed = values ^ key
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


# A function that returns the indices of an epoch's samples in reading order, int64 `[N]`.
Draw = Callable[[int], Tensor]


class EpochBatches(ABC):
    """The samples of all global batches.

    They depend only on (seed, epoch), and every epoch has the same number of batches.

    Attributes:
        seed: The seed of the run.
        batch_size: The number of samples in the largest batch.
    """

    seed: int
    batch_size: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """Return the order in which the samples of an epoch are read."""

    @abstractmethod
    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield the range of positions of each batch in the order of the epoch, from batch number `start`.

        Yields:
            The first position of the batch, and the position after the last.
        """


@dataclass(frozen=True, kw_only=True)
class GlobalBatches(EpochBatches):
    """Batches of equal size, except a shorter last batch.

    Args:
        length: The number of samples in an epoch.
        batch_size: The number of samples in a batch.
        shuffle: Whether to shuffle the samples.
        drop_last: Whether to drop a short last batch.
        seed: The seed of the run.
        draw: Returns the indices of an epoch's samples. None reads each of the `length` samples once.
    """

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    draw: Draw | None = None

    def __len__(self) -> int:
        return batch_count(self.length, self.batch_size, drop_last=self.drop_last)

    def order(self, epoch: int) -> Order:
        if self.draw is not None:
            return Listed(self.draw(epoch))
        return shuffle_order(self.length, seed=self.seed, epoch=epoch) if self.shuffle else Sequential()

    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        for batch in range(start, len(self)):
            first = batch * self.batch_size
            yield first, min(first + self.batch_size, self.length)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The samples of a global batch that one rank reads: the samples `start` to `stop`.

    Args:
        start: The position of the first sample in the batch.
        stop: The position after the last sample.
        size: The number of samples that count. It is 0 on a rank without samples, which reads one sample as a
            placeholder.
    """

    start: int
    stop: int
    size: int


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches in an epoch. A short last batch counts unless `drop_last` is true."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def share(*, size: int, rank: int, world_size: int) -> Share:
    """Return the samples of a global batch that a rank reads.

    If `size` is not divisible by `world_size`, the first ranks read one more sample than the others.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    count = base + (rank < extra)
    return Share(start=start, stop=start + count, size=count) if count else Share(start=0, stop=1, size=0)


class ShareSampler:
    """Sampler that yields the samples of this rank in each global batch, as (epoch, index) pairs.

    The epoch is part of each pair because persistent workers keep the data set object of the first epoch.
    """

    def __init__(self, *, batches: EpochBatches, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def share_of(self, size: int) -> Share:
        """Return the samples that this rank reads of a global batch of `size` samples."""
        return share(size=size, rank=self.rank, world_size=self.world_size)

    def sizes(self, epoch: int, start: int) -> Iterator[tuple[int, Share]]:
        """Yield the size of each global batch from batch number `start`, and the samples of it that this rank reads."""
        for first, last in self.batches.spans(epoch, start):
            yield last - first, self.share_of(last - first)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.batches.order(self.epoch)
        for first, last in self.batches.spans(epoch, self.start):
            mine = self.share_of(last - first)
            yield [(epoch, index) for index in order.slice(first + mine.start, first + mine.stop).tolist()]
