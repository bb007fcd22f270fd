"""What every loader of ours is: an iterable of Batch that can be set to a position."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator

from exp.errors import RunError
from exp.types import Batch, Stage


class Loader(ABC):
    """One rank's view of one stage. Every rank yields the same number of batches.

    The first pass is epoch 0, the next one epoch 1, and so on. A loader for evaluation stays at epoch 0: what is
    random in it is the same each time.
    """

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
        """This rank's shares of the batches from `start` on."""
