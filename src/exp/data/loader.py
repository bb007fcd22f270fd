"""Loaders of one rank: iterables of Batch that can be set to a position, and the samples of each global batch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

from torch import Tensor
from torch.utils.data import Dataset

from exp.data.orders import Listed, Order, Sequential, shuffle_order
from exp.data.randomness import preserve_generators, reseed_epoch
from exp.errors import RunError
from exp.shared_types import Batch, Stage


class Loader(ABC):
    """Batches of one rank and one stage. Every rank yields the same number of batches.

    Each pass of a training loader is the next epoch, from epoch 0. A loader for evaluation stays at epoch 0, so that
    its random numbers are the same in each pass.

    Attributes:
        sampler: The samples of each batch; None for a stream.
    """

    sampler: ShareSampler | None = None

    def __init__(self, *, stage: Stage) -> None:
        self.stage = stage
        self._position = (0, 0)

    def set_position(self, epoch: int, batch: int) -> None:
        """Let the next pass start at a global batch of an epoch.

        Raises:
            RunError: The position is outside the data.
        """
        length = self._length()
        if epoch < 0 or batch < 0 or (length is not None and batch > length):
            raise RunError(
                f"data: the position is batch {batch} of epoch {epoch}, and an epoch has {length} batches of the "
                f"{self.stage} split; expected a position inside it. Resume a checkpoint with the data and the "
                "data.batch_size of its run"
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
        """Return the number of global batches in an epoch; None if it is unknown."""

    @abstractmethod
    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        """Return this rank's shares of the batches from number `start`."""


@runtime_checkable
class Epochs(Protocol):
    """A data set, a stream or a sampler with `set_epoch`, which is called before an epoch is read."""

    def set_epoch(self, epoch: int) -> None: ...


# The last epoch that each data set received, by its id, because splits share a data set.
_RECEIVED: dict[int, int] = {}


def find_epoch_aware(dataset: object) -> tuple[Epochs, ...]:
    """Return the data sets with `set_epoch`: this one, or those that it wraps as torch's data sets do."""
    if callable(getattr(dataset, "set_epoch", None)) and isinstance(dataset, Epochs):
        _RECEIVED.pop(id(dataset), None)
        return (dataset,)
    held = [getattr(dataset, name, None) for name in ("dataset", "source")]
    several = getattr(dataset, "datasets", None)
    held += several.values() if isinstance(several, dict) else several if isinstance(several, list | tuple) else ()
    return tuple(part for one in held if isinstance(one, Dataset) for part in find_epoch_aware(one))


def set_epochs(parts: Sequence[Epochs], epoch: int, *, seed: int) -> None:
    """Call `set_epoch` of data sets, with random numbers that are a function of (seed, epoch)."""
    for part in parts:
        if _RECEIVED.get(id(part)) != epoch:
            with preserve_generators():
                reseed_epoch(seed=seed, rank=0, epoch=epoch)
                part.set_epoch(epoch)
            _RECEIVED[id(part)] = epoch


# Returns the indices of an epoch's samples in their order, int64 `[N]`.
Draw = Callable[[int], Tensor]


class EpochBatches(ABC):
    """The global batches of every epoch, a function of (seed, epoch). Every epoch has the same number of batches.

    Attributes:
        seed: The seed of the run.
        batch_size: The samples of the largest batch.
    """

    seed: int
    batch_size: int

    @abstractmethod
    def __len__(self) -> int:
        """Return the number of batches in an epoch."""

    @abstractmethod
    def order(self, epoch: int) -> Order:
        """Return the order of the samples of an epoch."""

    @abstractmethod
    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        """Yield the first position of each batch from number `start`, and the position after it, in that order."""


@dataclass(frozen=True, kw_only=True)
class GlobalBatches(EpochBatches):
    """Batches of one size, except a short last one.

    Args:
        length: The samples of an epoch.
        batch_size: The samples of a batch.
        shuffle: Whether the samples are shuffled.
        drop_last: Whether a short last batch is left out.
        seed: The seed of the run.
        draw: The samples of an epoch; None takes each of `length` samples once.
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
    """The share of one rank in a global batch: the samples `start` to `stop` of the batch.

    Args:
        start: The first sample.
        stop: The sample after the last one.
        size: The samples that count; 0 for a rank without samples, which reads one sample as a placeholder.
    """

    start: int
    stop: int
    size: int


def batch_count(samples: int, batch_size: int, *, drop_last: bool) -> int:
    """Return the number of batches in an epoch, with or without a short last one."""
    return samples // batch_size if drop_last else -(-samples // batch_size)


def share(*, size: int, rank: int, world_size: int) -> Share:
    """Return the share of a rank in a global batch of `size` samples. The first ranks may have one more."""
    base, extra = divmod(size, world_size)
    start = rank * base + min(rank, extra)
    count = base + (rank < extra)
    return Share(start=start, stop=start + count, size=count) if count else Share(start=0, stop=1, size=0)


class ShareSampler:
    """Yields the samples of this rank in each global batch, as (epoch, index) pairs.

    Each index has its epoch, because persistent workers keep the data set of the first epoch.
    """

    def __init__(self, *, batches: EpochBatches, rank: int, world_size: int) -> None:
        self.batches, self.rank, self.world_size = batches, rank, world_size
        self.epoch = self.start = 0

    def __len__(self) -> int:
        return len(self.batches) - self.start

    def share_of(self, size: int) -> Share:
        """Return the share of this rank in a global batch of `size` samples."""
        return share(size=size, rank=self.rank, world_size=self.world_size)

    def sizes(self, epoch: int, start: int) -> Iterator[tuple[int, Share]]:
        """Yield the size of each global batch from number `start`, and the share of this rank."""
        for first, last in self.batches.spans(epoch, start):
            yield last - first, self.share_of(last - first)

    def __iter__(self) -> Iterator[list[tuple[int, int]]]:
        epoch, order = self.epoch, self.batches.order(self.epoch)
        for first, last in self.batches.spans(epoch, self.start):
            mine = self.share_of(last - first)
            yield [(epoch, index) for index in order.slice(first + mine.start, first + mine.stop).tolist()]
