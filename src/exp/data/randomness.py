"""The one owner of randomness: streams are derived from (seed, rank, epoch, batch) or (seed, part, epoch, sample).

Nothing random is saved, because nothing needs to be: a stream is found again from its position. So a run resumes
exactly, and workers, hooks and the number of ranks do not change what another stream draws.
"""

from __future__ import annotations

import functools
import hashlib
import operator
import random
from collections.abc import Iterator
from contextlib import contextmanager

import numpy as np
import torch
from torch import Tensor

from exp.shared_types import Stage


def seed_for(*parts: int | str) -> int:
    """A number of 64 bits that is a function of the parts, in every process and on every version of Python."""
    return int.from_bytes(_digest(parts, size=8), "little")


def reseed(*, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()) -> None:
    """Sets Python's, NumPy's and torch's generators to the stream of one step. About 10 us.

    turn: which of several passes over the batch it is, such as the phase and its repeat; empty for the first.
    """
    _seed_generators(step_seed(seed=seed, rank=rank, epoch=epoch, batch=batch, stage=stage, turn=turn))


def step_seed(
    *, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()
) -> int:
    """The number that `reseed` starts the generators from."""
    return seed_for(seed, stage, rank, epoch, batch, *turn)


def reseed_sample(*, seed: int, epoch: int, index: int, stage: Stage = "train") -> None:
    """Sets the same generators to the stream of one sample, so that no worker's history shows in it. About 10 us.

    stage: whose sample it is. With one stream for all, samples that are made at random would be the same in the parts.
    """
    whose = () if stage == "train" else (stage,)
    _seed_generators(seed_for(seed, "sample", *whose, epoch, index))


def reseed_batch(*, seed: int, stage: Stage, rank: int, epoch: int, batch: int) -> None:
    """Sets the same generators to the stream of the transforms of one rank's share of a batch."""
    _seed_generators(seed_for(seed, "batch", stage, rank, epoch, batch))


def reseed_sampler(*, seed: int, stage: Stage, epoch: int) -> None:
    """Sets the same generators to the stream of one pass of a sampler; epoch -1 is that in which it is made."""
    _seed_generators(seed_for(seed, "sampler", stage, epoch))


def reseed_epoch(*, seed: int, rank: int, epoch: int) -> None:
    """Set the same generators to the stream of the hooks at an epoch's start; epoch -1 is the start of training."""
    _seed_generators(seed_for(seed, "epoch", rank, epoch))


def initialisation(seed: int) -> None:
    """Sets the same generators to the stream that a model's first weights are drawn from."""
    _seed_generators(seed_for(seed, "initialisation"))


def permutation(*, seed: int, epoch: int, length: int) -> Tensor:
    """The order of an epoch: every index below length once. int64 `[length]`."""
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def sample_generator(*, seed: int, epoch: int, index: int) -> np.random.Generator:
    """A generator of its own for one sample of one epoch. About 15 us."""
    key = int.from_bytes(_digest((seed, "sample", epoch, index), size=16), "little")
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restores the generators afterwards, so that reading data in this process does not change a model's dropout."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)


def _digest(parts: tuple[int | str, ...], *, size: int) -> bytes:
    # operator.index makes NumPy's integers plain and refuses floats, whose repr is no promise.
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=size).digest()


def _seed_generators(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed does the same for every backend at once, at a hundred times the cost.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif _has_mps():
        torch.mps.manual_seed(value & 0xFFFFFFFF)


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()
