"""Loaders of one rank: an iterable of Batch that can be set to a position, and the samples of each global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import Dataset

from exp.data.orders import Listed, Order, Sequential, shuffled, shuffled_blocks
from exp.data.randomness import preserve_generators, reseed_epoch
from exp.errors import RunError
from exp.shared_types import Batch, Stage


class Loader(ABC):
    """One rank's view of one stage. Every rank yields the same number of batches.

    The first pass is epoch 0, the next one epoch 1, and so on. A loader for evaluation stays at epoch 0: what is
    random in it is the same each time.

    sampler: an attribute, which samples each batch takes; None of a stream.
    """

    sampler: ShareSampler | None = None

    def __init__(self, *, stage: Stage) -> None:
        self.stage = stage
        self._position = (0, 0)

    def set_position(self, epoch: int, batch: int) -> None:
        """The next pass starts at this global batch of this epoch; the one after it at the epoch that follows.

        Raises: RunError where the position lies outside the data.
        """
        length = self._length()
        if epoch < 0 or batch < 0 or (length is not None and batch > length):
            raise RunError(
                f"data: the position is batch {batch} of epoch {epoch}, and an epoch has {length} batches of the "
                f"{self.stage} part; expected a position inside it. A checkpoint goes on with the data and the "
                "data.batch_size that it was written with"
            )
        self._position = (epoch, batch)

    def __iter__(self) -> Iterator[Batch]:
        epoch, start = self._position
        self._position = (epoch + 1 if self.stage == "train" else 0, 0)
        return self._batches(epoch if self.stage == "train" else 0, start)

    def __len__(self) -> int:
        """Global batches of an epoch.

        Raises: TypeError where a stream does not know its length.
        """
        length = self._length()
        if length is None:
            raise TypeError("data: this stream of samples does not know its length")
        return length

    @abstractmethod
    def _length(self) -> int | None:
        """Global batches of an epoch; None where it is not known."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return this rank's shares of the batches from `start` on."""


@runtime_checkable
class Epochs(Protocol):
    """A data set, a stream or a sampler that wants to know its epoch before it is read."""

    def set_epoch(self, epoch: int) -> None: ...


# The epoch that each data set was told last, by its id: parts of one data set share it.
_TOLD: dict[int, int] = {}


def wanting_epochs(dataset: object) -> tuple[Epochs, ...]:
    """Return the data sets that want to know their epoch: this one, or those that it holds as torch's kinds do."""
    if callable(getattr(dataset, "set_epoch", None)) and isinstance(dataset, Epochs):
        _TOLD.pop(id(dataset), None)
        return (dataset,)
    held = [getattr(dataset, name, None) for name in ("dataset", "source")]
    several = getattr(dataset, "datasets", None)
    held += several.values() if isinstance(several, dict) else several if isinstance(several, list | tuple) else ()
    return tuple(part for one in held if isinstance(one, Dataset) for part in wanting_epochs(one))


def tell_epoch(parts: Sequence[Epochs], epoch: int, *, seed: int) -> None:
    """Call `set_epoch` of data sets whose samples are read next; what it draws is a function of (seed, epoch)."""
    for part in parts:
        if _TOLD.get(id(part)) != epoch:
            with preserve_generators():
                reseed_epoch(seed=seed, rank=0, epoch=epoch)
                part.set_epoch(epoch)
            _TOLD[id(part)] = epoch


class Draw(Protocol):
    """Which samples of a part an epoch takes, in which order: a function of the epoch alone."""

    def __len__(self) -> int:
        """Samples of an epoch."""

    def __call__(self, epoch: int) -> Tensor:
        """Their indices, int64 `[len]`."""


class EpochBatches(ABC):
    """The global batches of every epoch. All epochs have as many. What they hold is a function of (seed, epoch) alone.

    seed: of the run. batch_size: samples of the largest batch.
    """

    seed: int
    batch_size: int

    @abstractmethod
    def __len__(self) -> int:
        """Batches of an epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """The samples in the order in which they are seen."""

    @abstractmethod
    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield where each batch from `start` on begins in that order, and where it ends."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatches(EpochBatches):
    """Batches of one size, but for a short last one, of `length` samples in each epoch.

    draw: which samples they are; None takes each of `length` once, shuffled or in their order.
    block, window: samples of a block, and blocks that are shuffled together; None shuffles each sample by itself.
    """

    length: int
    batch_size: int
    shuffle: bool
    drop_last: bool
    seed: int
    draw: Draw | None = None
    block: int | None = None
    window: int = 1

    def __len__(self) -> int:
        return batch_count(self.length, self.batch_size, drop_last=self.drop_last)

    def order(self, epoch: int) -> Order:
        if self.draw is not None:
            return Listed(self.draw(epoch))
        if not self.shuffle:
            return Sequential(self.length)
        if self.block is None:
            return shuffled(self.length, seed=self.seed, epoch=epoch)
        return shuffled_blocks(self.length, seed=self.seed, epoch=epoch, block=self.block, window=self.window)

    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        for batch in range(start, len(self)):
            first = batch * self.batch_size
            yield first, min(first + self.batch_size, self.length)

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


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """The batches of an epoch, with or without a short last one."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


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

    def __init__(self, *, batches: EpochBatches, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def share_of(self, size: int) -> Share:
        """This rank's part of a global batch of `size` samples."""
        return share(size=size, rank=self.rank, world_size=self.world_size)

    def sizes(self, epoch: int, start: int) -> Iterator[tuple[int, Share]]:
        """The samples of each global batch from `start` on, and this rank's part of it."""
        for first, last in self.batches.spans(epoch, start):
            yield last - first, self.share_of(last - first)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.batches.order(self.epoch)
        for first, last in self.batches.spans(epoch, self.start):
            mine = self.share_of(last - first)
            yield [(epoch, index) for index in order.slice(first + mine.start, first + mine.stop).tolist()]
