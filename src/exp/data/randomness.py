"""Seeds of the random generators.

The generators are seeded before each batch from (seed, rank, epoch, batch), and before each sample from (seed, split,
epoch, sample). Checkpoints therefore need not store the state of the generators: a resumed run draws the same random
numbers as an uninterrupted run. The random numbers of a sample do not depend on the worker, the hooks or the number of
ranks.
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
    """Return a 64-bit seed that is computed from integers and texts.

    The seed is the same in every process and in every version of Python.

    Args:
        parts: The integers and texts, such as a seed, the name of a split and an epoch.
    """
    return int.from_bytes(_digest(parts, size=8), "little")


def reseed(*, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()) -> None:
    """Seed the generators of Python, NumPy and torch before a training or evaluation step. This takes about 10 us.

    Args:
        seed: The seed of the run.
        rank: The rank of this process.
        epoch: The epoch, counted from 0.
        batch: The number of the batch in the epoch, counted from 0.
        stage: The name of the split. Default: `train`.
        turn: Numbers that identify a pass over the batch if there are several passes, such as the number of the
            optimization phase and of its repeat. Default: empty, for the first pass.
    """
    _seed_generators(step_seed(seed=seed, rank=rank, epoch=epoch, batch=batch, stage=stage, turn=turn))


def step_seed(
    *, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()
) -> int:
    """Return the seed that `reseed` uses. See `reseed` for the parameters."""
    return seed_for(seed, stage, rank, epoch, batch, *turn)


def reseed_sample(*, seed: int, epoch: int, index: int, stage: Stage = "train") -> None:
    """Seed the generators of Python, NumPy and torch before a sample is read. This takes about 10 us.

    The seed does not depend on the worker. It depends on the split, so that data sets which generate random samples
    have different samples in each split.

    Args:
        seed: The seed of the run.
        epoch: The epoch, counted from 0.
        index: The index of the sample in the split.
        stage: The name of the split. Default: `train`.
    """
    stages = () if stage == "train" else (stage,)
    _seed_generators(seed_for(seed, "sample", *stages, epoch, index))


def reseed_batch(*, seed: int, stage: Stage, rank: int, epoch: int, batch: int) -> None:
    """Seed the generators of Python, NumPy and torch before the transforms of a batch.

    Args:
        seed: The seed of the run.
        stage: The name of the split.
        rank: The rank of this process.
        epoch: The epoch, counted from 0.
        batch: The number of the batch in the epoch, counted from 0.
    """
    _seed_generators(seed_for(seed, "batch", stage, rank, epoch, batch))


def reseed_sampler(*, seed: int, stage: Stage, epoch: int) -> None:
    """Seed the generators of Python, NumPy and torch before a sampler chooses the samples of an epoch.

    Args:
        seed: The seed of the run.
        stage: The name of the split.
        epoch: The epoch, counted from 0. The value -1 means the construction of the sampler.
    """
    _seed_generators(seed_for(seed, "sampler", stage, epoch))


def reseed_epoch(*, seed: int, rank: int, epoch: int) -> None:
    """Seed the generators of Python, NumPy and torch before the hooks that run at the start of an epoch.

    Args:
        seed: The seed of the run.
        rank: The rank of this process.
        epoch: The epoch, counted from 0. The value -1 means the start of training.
    """
    _seed_generators(seed_for(seed, "epoch", rank, epoch))


def initialisation(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch before the weights of a model are initialized."""
    _seed_generators(seed_for(seed, "initialisation"))


def permutation(*, seed: int, epoch: int, length: int) -> Tensor:
    """Return a random permutation of the indices below `length`, int64 `[length]`.

    The permutation depends only on the seed of the run and the epoch.
    """
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def sample_generator(*, seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a new NumPy generator that is seeded from the run, the epoch and the sample. This takes about 15 us.

    Args:
        seed: The seed of the run.
        epoch: The epoch, counted from 0.
        index: The index of the sample in the split.
    """
    key = int.from_bytes(_digest((seed, "sample", epoch, index), size=16), "little")
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Return a context manager that restores the state of the generators of Python, NumPy and torch on exit.

    Code that reads data in the main process uses this context manager, so that it does not change the dropout of a
    model.
    """
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)


def _digest(parts: tuple[int | str, ...], *, size: int) -> bytes:
    # operator.index converts NumPy integers, and rejects floats. The repr of a float may depend on the version.
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=size).digest()


def _seed_generators(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed is not used, because it seeds every backend, which takes a hundred times as long.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif _has_mps():
        torch.mps.manual_seed(value & 0xFFFFFFFF)


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()
