"""Orders of an epoch's samples. An order can be read from any position without reading the positions before it."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from exp.data.randomness import permutation, seed_for

# The maximum length of an order that is stored as a tensor, of 32 MiB. Longer orders are computed when they are read.
LISTED = 2**22
# The number of positions that are computed at once: 512 KiB of indices, which makes Python's overhead negligible.
PAGE = 2**16
# The number of half rounds of the Feistel network. Each changes one half of the bits with a hash of the other half.
# After four, neighboring indices are still correlated; six suffice.
HALF_ROUNDS = 6


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
