"""Random streams, which are derived from (seed, rank, epoch, batch) or (seed, split, epoch, sample).

No state of a generator is saved, because a stream follows from its position. A run therefore resumes exactly, and
workers, hooks and the number of ranks do not change other streams.
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
    """Return a 64-bit number that is a function of the parts, in every process and every version of Python."""
    return int.from_bytes(_digest(parts, size=8), "little")


def reseed(*, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()) -> None:
    """Set the generators of Python, NumPy and torch to the stream of one step. It takes about 10 us.

    Args:
        seed: The seed of the run.
        rank: The rank.
        epoch: The epoch.
        batch: The number of the batch.
        stage: The stage.
        turn: The pass over the batch, such as the phase and its repeat; empty for the first pass.
    """
    _seed_generators(step_seed(seed=seed, rank=rank, epoch=epoch, batch=batch, stage=stage, turn=turn))


def step_seed(
    *, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()
) -> int:
    """Return the seed that `reseed` sets."""
    return seed_for(seed, stage, rank, epoch, batch, *turn)


def reseed_sample(*, seed: int, epoch: int, index: int, stage: Stage = "train") -> None:
    """Set the same generators to the stream of one sample, which does not depend on the worker. It takes about 10 us.

    Each stage has another stream, so that randomly generated samples differ between splits.
    """
    stages = () if stage == "train" else (stage,)
    _seed_generators(seed_for(seed, "sample", *stages, epoch, index))


def reseed_batch(*, seed: int, stage: Stage, rank: int, epoch: int, batch: int) -> None:
    """Set the same generators to the stream of the transforms of one rank's share of a batch."""
    _seed_generators(seed_for(seed, "batch", stage, rank, epoch, batch))


def reseed_sampler(*, seed: int, stage: Stage, epoch: int) -> None:
    """Set the same generators to the stream of one epoch of a sampler. It is created in epoch -1."""
    _seed_generators(seed_for(seed, "sampler", stage, epoch))


def reseed_epoch(*, seed: int, rank: int, epoch: int) -> None:
    """Set the same generators to the stream of the hooks at the start of an epoch; -1 is the start of training."""
    _seed_generators(seed_for(seed, "epoch", rank, epoch))


def initialisation(seed: int) -> None:
    """Set the same generators to the stream of a model's initial weights."""
    _seed_generators(seed_for(seed, "initialisation"))


def permutation(*, seed: int, epoch: int, length: int) -> Tensor:
    """Return the order of an epoch, every index below `length` once, int64 `[length]`."""
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def sample_generator(*, seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a generator for one sample of one epoch. It takes about 15 us."""
    key = int.from_bytes(_digest((seed, "sample", epoch, index), size=16), "little")
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the generators at the end, so that reading data in this process does not change a model's dropout."""
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)


def _digest(parts: tuple[int | str, ...], *, size: int) -> bytes:
    # operator.index converts NumPy's integers, and refuses floats, whose repr may change.
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=size).digest()


def _seed_generators(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed seeds every backend at a hundred times the cost.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif _has_mps():
        torch.mps.manual_seed(value & 0xFFFFFFFF)


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()
