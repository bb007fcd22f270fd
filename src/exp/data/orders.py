"""The order of an epoch's samples, of which any stretch is found without those before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exp.data.randomness import permutation, seed_for

# Samples whose order is drawn at once, as a tensor of 32 MiB; the order of more is computed where it is read.
LISTED = 2**22
# Positions that are computed together: enough that Python's share is nothing, 512 KiB of indices.
PAGE = 2**16
# Half a round mixes one half of a number by the other. Six are what a shuffle needs; four let neighbours show.
HALF_ROUNDS = 6


class Order(ABC):
    """The indices of an epoch's samples, by position."""

    @abstractmethod
    def __len__(self) -> int:
        """Samples of the epoch."""

    @abstractmethod
    def slice(self, start: int, stop: int) -> Tensor:
        """The indices at positions start to stop, int64 `[stop - start]`."""


@dataclass(frozen=True)
class Sequential(Order):
    """Every index below length, from 0 on."""

    length: int

    def __len__(self) -> int:
        return self.length

    def slice(self, start: int, stop: int) -> Tensor:
        return torch.arange(start, stop)


@dataclass(frozen=True, eq=False)
class Listed(Order):
    """An order that is at hand. indices: int64 `[N]`."""

    indices: Tensor

    def __len__(self) -> int:
        return len(self.indices)

    def slice(self, start: int, stop: int) -> Tensor:
        return self.indices[start:stop]


class Paged(Order):
    """An order that is computed page by page; the last page is kept, for what is read next is mostly in it."""

    def __init__(self, *, length: int, page: int) -> None:
        self.length, self._size = length, page
        self._number, self._page = -1, torch.empty(0, dtype=torch.int64)

    def __len__(self) -> int:
        return self.length

    def slice(self, start: int, stop: int) -> Tensor:
        pieces = []
        for number in range(start // self._size, -(-stop // self._size)):
            first = number * self._size
            pieces.append(self._kept(number)[max(0, start - first) : stop - first])
        return pieces[0] if len(pieces) == 1 else torch.cat([torch.empty(0, dtype=torch.int64), *pieces])

    def _kept(self, number: int) -> Tensor:
        if number != self._number:
            first = number * self._size
            self._number, self._page = number, self._indices(first, min(first + self._size, self.length))
        return self._page

    @abstractmethod
    def _indices(self, start: int, stop: int) -> Tensor:
        """The indices of one page, int64 `[stop - start]`."""


class Permuted(Paged):
    """Every index below length once, in an order drawn from a seed, without a list of them.

    A Feistel network permutes the numbers of as many bits as length has; one that lands at length or beyond is permuted
    again until it is below (Black and Rogaway, Ciphers with Arbitrary Finite Domains, 2002), twice at most on average.

    seed: 64 bits.
    """

    def __init__(self, *, length: int, seed: int) -> None:
        super().__init__(length=length, page=PAGE)
        bits = max(2, (length - 1).bit_length())
        self._low = np.uint64(bits // 2)
        self._masks = [np.uint64(2 ** (bits // 2) - 1), np.uint64(2 ** (bits - bits // 2) - 1)]
        self._keys = [np.uint64(seed_for(seed, "round", number)) for number in range(HALF_ROUNDS)]

    def _indices(self, start: int, stop: int) -> Tensor:
        found = self._permuted(np.arange(start, stop, dtype=np.uint64))
        while len(beyond := np.flatnonzero(found >= self.length)):
            found[beyond] = self._permuted(found[beyond])
        return torch.from_numpy(found.astype(np.int64))

    def _permuted(self, numbers: np.ndarray) -> np.ndarray:
        halves = [numbers & self._masks[0], numbers >> self._low]
        for number, key in enumerate(self._keys):
            changed = number % 2
            halves[changed] ^= _mixed(halves[1 - changed], key) & self._masks[changed]
        return halves[1] << self._low | halves[0]


class PermutedBlocks(Paged):
    """Every index below length once: blocks of consecutive ones in a random order, shuffled within a window of blocks.

    So what is read for a stretch of the epoch lies in few places of a file. Where blocks begin is drawn, too, so that
    two neighbours are not in one block in every epoch; the block that reaches beyond the end goes on at the beginning,
    and a short one comes last.

    block: samples of a block. window: blocks that are shuffled together. seed: 64 bits.
    """

    def __init__(self, *, length: int, block: int, window: int, seed: int) -> None:
        super().__init__(length=length, page=block * window)
        self._block, self._window, self._seed = block, window, seed
        self._offset = seed_for(seed, "offset") % length
        self._whole = length // block
        self._blocks = shuffled(self._whole, seed=seed_for(seed, "blocks"), epoch=0) if self._whole else None

    def _indices(self, start: int, stop: int) -> Tensor:
        first = start // self._block
        last = -(-stop // self._block)
        blocks = torch.arange(first, last)
        if self._blocks is not None and (whole := min(last, self._whole)) > first:
            blocks[: whole - first] = self._blocks.slice(first, whole)
        places = permutation(seed=self._seed, epoch=start // (self._block * self._window), length=stop - start)
        numbers = blocks[places // self._block] * self._block + places % self._block
        return (numbers + self._offset) % self.length


def shuffled(length: int, *, seed: int, epoch: int) -> Order:
    """A random order of every index below length: a function of (seed, epoch)."""
    if length <= LISTED:
        return Listed(permutation(seed=seed, epoch=epoch, length=length))
    return Permuted(length=length, seed=seed_for(seed, "order", epoch))


def shuffled_blocks(length: int, *, seed: int, epoch: int, block: int, window: int) -> Order:
    """The same, of blocks of consecutive indices that are shuffled in windows of several."""
    return PermutedBlocks(length=length, block=block, window=window, seed=seed_for(seed, "block order", epoch))


def _mixed(values: np.ndarray, key: np.uint64) -> np.ndarray:
    """Random-looking bits of numbers: MurmurHash3's finalizer, uint64 `[n]`."""
    mixed = values ^ key
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xFF51AFD7ED558CCD)
    mixed ^= mixed >> np.uint64(33)
    mixed *= np.uint64(0xC4CEB9FE1A85EC53)
    return mixed ^ (mixed >> np.uint64(33))
