"""Base class of loaders, and the order in which the samples of an epoch are read.

A loader yields the batches of one rank. It can start at any batch of any epoch, so that a run can be resumed.
"""

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

# The maximum number of samples whose order is stored as a tensor, which takes 32 MiB. Longer orders are computed when
# they are read.
LISTED = 2**22
# The number of positions that are computed at once. They take 512 KiB, which is enough to make Python's overhead
# negligible.
PAGE = 2**16
# The number of half rounds of the Feistel network. A half round changes one half of the bits with a hash of the other
# half. After four half rounds, the results for neighboring numbers are still correlated. Six half rounds suffice.
HALF_ROUNDS = 6


class Loader(ABC):
    """Base class of loaders, which yield the batches of one split on one rank.

    All ranks yield the same number of batches.

    A training loader starts the next epoch with each iteration. Its first iteration is epoch 0. A loader of another
    split stays at epoch 0, so that its random numbers are the same in each iteration.

    Args:
        stage: The name of the split.

    Attributes:
        sampler: The sampler that yields the indices of the samples in each batch. None for an IterableDataset.
    """

    sampler: ShareSampler | None = None

    def __init__(self, *, stage: Stage) -> None:
        self.stage = stage
        self._position = (0, 0)

    def set_position(self, epoch: int, batch: int) -> None:
        """Set the position at which the next iteration starts.

        Args:
            epoch: The epoch, counted from 0.
            batch: The number of the global batch in the epoch, counted from 0.

        Raises:
            RunError: The position is outside the data.
        """
        length = self._length()
        if epoch < 0 or batch < 0 or (length is not None and batch > length):
            raise RunError(
                f"data: the run would resume at batch {batch} of epoch {epoch}, although {self.stage} has {length} "
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
            TypeError: The split is a stream of unknown length.
        """
        length = self._length()
        if length is None:
            raise TypeError("data: the length of this stream is unknown")
        return length

    @abstractmethod
    def _length(self) -> int | None:
        """Return the number of global batches in an epoch. Return None if the number is unknown."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Yield the samples of this rank in each global batch of an epoch.

        Args:
            epoch: The epoch, counted from 0.
            start: The number of the first global batch, counted from 0.
        """


@runtime_checkable
class Epochs(Protocol):
    """Interface of data sets and samplers with a method `set_epoch`. exp calls it before an epoch is read."""

    def set_epoch(self, epoch: int) -> None: ...


# The last epoch passed to `set_epoch`, by the id of the data set. If several splits share a data set, `set_epoch` is
# called once per epoch.
_RECEIVED: dict[int, int] = {}


def find_epoch_aware(dataset: object) -> tuple[Epochs, ...]:
    """Return the data sets that have a method `set_epoch`.

    If the data set does not have the method, the data sets that it wraps are searched. They are in the attributes
    `dataset`, `source` and `datasets`, as in torch's Subset and ConcatDataset.
    """
    if callable(getattr(dataset, "set_epoch", None)) and isinstance(dataset, Epochs):
        _RECEIVED.pop(id(dataset), None)
        return (dataset,)
    held = [getattr(dataset, name, None) for name in ("dataset", "source")]
    several = getattr(dataset, "datasets", None)
    held += several.values() if isinstance(several, dict) else several if isinstance(several, list | tuple) else ()
    return tuple(part for one in held if isinstance(one, Dataset) for part in find_epoch_aware(one))


def set_epochs(parts: Sequence[Epochs], epoch: int, *, seed: int) -> None:
    """Call `set_epoch` of data sets, with random generators that are seeded from (seed, epoch)."""
    for part in parts:
        if _RECEIVED.get(id(part)) != epoch:
            with preserve_generators():
                reseed_epoch(seed=seed, rank=0, epoch=epoch)
                part.set_epoch(epoch)
            _RECEIVED[id(part)] = epoch


class Order(ABC):
    """Base class of the order in which the samples of an epoch are read."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Tensor:
        """Return the indices of the samples at the positions `start` to `stop` - 1, int64 `[stop - start]`."""


class Sequential(Order):
    """Order of increasing indices: 0, 1, 2, ..."""

    def slice(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop)


@dataclass(frozen=True, eq=False)
class Listed(Order):
    """Order that is stored as a tensor.

    Args:
        indices: The indices of the samples in the order in which they are read, int64 `[N]`.
    """

    indices: Tensor

    def slice(self, start: int, stop: int) -> Tensor:
        return self.indices[start:stop]


class Permuted(Order):
    """Random permutation of the indices below `length`. It is computed from a seed, without storing all indices.

    A Feistel network permutes all numbers that have as many bits as `length`. If a result is not below `length`, it is
    permuted again until it is below. This takes at most two permutations on average (Black and Rogaway, Ciphers with
    Arbitrary Finite Domains, 2002). The order is computed in pages of consecutive positions. The last page is cached,
    because the next positions are usually on the same page.

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
    """Return a random order of the indices below `length`. The order depends only on (seed, epoch)."""
    if length <= LISTED:
        return Listed(permutation(seed=seed, epoch=epoch, length=length))
    return Permuted(length=length, seed=seed_for(seed, "order", epoch))


def _mix_bits(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Return the hashes of numbers, uint64 `[n]`, computed with the finalizer of MurmurHash3.

    Args:
        values: The numbers, uint64 `[n]`.
        key: The key of the hash function.
    """
    mixed = values ^ key
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))


# A function that returns the indices of the samples in an epoch, in the order in which they are read, int64 `[N]`. Its
# argument is the epoch, counted from 0.
Draw = Callable[[int], Tensor]


class EpochBatches(ABC):
    """Base class of the choice of samples for all global batches of a split.

    The samples of a batch depend only on (seed, epoch) and the number of the batch. All epochs have the same number of
    batches.

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
        """Yield the range of positions that each batch takes in the order of the epoch.

        Args:
            epoch: The epoch, counted from 0.
            start: The number of the first batch, counted from 0.

        Yields:
            The first position of the batch, and its last position plus 1.
        """


@dataclass(frozen=True, kw_only=True)
class GlobalBatches(EpochBatches):
    """Global batches of equal size. Only the last batch of an epoch may be shorter.

    Args:
        length: The number of samples in an epoch.
        batch_size: The number of samples in a batch.
        shuffle: Whether to shuffle the samples. Ignored if `draw` is set.
        drop_last: Whether to drop the last batch of an epoch if it is shorter.
        seed: The seed of the run.
        draw: A function that returns the indices of the samples in an epoch. Default: None, which reads each of the
            `length` samples once.
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
    """Samples of a global batch that one rank reads: the positions `start` to `stop` - 1.

    Args:
        start: The position of the rank's first sample in the global batch.
        stop: The position of the rank's last sample plus 1.
        size: The number of samples that count. If there are fewer samples than ranks, `size` is 0 on some ranks. These
            ranks read the first sample as a placeholder, which does not count.
    """

    start: int
    stop: int
    size: int


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches in an epoch.

    Args:
        samples: The number of samples in an epoch.
        batch_size: The number of samples in a batch.
        drop_last: Whether the last batch is dropped if it is shorter.
    """
    return samples // batch_size if drop_last else -(-samples // batch_size)


def share(*, size: int, rank: int, world_size: int) -> Share:
    """Return the samples of a global batch that a rank reads.

    If `size` is not divisible by `world_size`, the first ranks read one more sample than the other ranks.

    Args:
        size: The number of samples in the global batch.
        rank: The rank.
        world_size: The number of ranks.
    """
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    count = base + (rank < extra)
    return Share(start=start, stop=start + count, size=count) if count else Share(start=0, stop=1, size=0)


class ShareSampler:
    """Batch sampler that yields, for each global batch, the samples that this rank reads.

    A sample is a pair (epoch, index). Worker processes need the epoch, because persistent workers keep their copy of
    the data set over all epochs.

    Args:
        batches: The global batches.
        rank: The rank of this process.
        world_size: The number of ranks.

    Attributes:
        epoch: The epoch of the next iteration, counted from 0.
        start: The number of the global batch at which the next iteration starts.
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
        """Yield the size of each global batch, and the samples of the batch that this rank reads.

        Args:
            epoch: The epoch, counted from 0.
            start: The number of the first global batch, counted from 0.
        """
        for first, last in self.batches.spans(epoch, start):
            yield last - first, self.share_of(last - first)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.batches.order(self.epoch)
        for first, last in self.batches.spans(epoch, self.start):
            mine = self.share_of(last - first)
            yield [(epoch, index) for index in order.slice(first + mine.start, first + mine.stop).tolist()]
