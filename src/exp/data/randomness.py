"""Seeds of the random generators, derived from (seed, rank, epoch, batch) or (seed, split, epoch, sample).

The generators are seeded again at each of these positions, so checkpoints store no generator state. A resumed run
therefore draws the same numbers. Workers, hooks and the number of ranks do not change each other's random numbers.
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
    """Return a 64-bit seed computed from the parts. It is the same in every process and in every version of Python."""
    return int.from_bytes(_digest(parts, size=8), "little")


def reseed(*, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()) -> None:
    """Seed the generators of Python, NumPy and torch for one step. This takes about 10 us.

    Args:
        seed: The seed of the run.
        rank: The rank.
        epoch: The epoch, from 0.
        batch: The number of the batch in the epoch, from 0.
        stage: The stage.
        turn: The numbers that identify a further pass over the batch, such as the phase and its repeat. Empty for the
            first pass.
    """
    _seed_generators(step_seed(seed=seed, rank=rank, epoch=epoch, batch=batch, stage=stage, turn=turn))


def step_seed(
    *, seed: int, rank: int, epoch: int, batch: int, stage: Stage = "train", turn: tuple[int, ...] = ()
) -> int:
    """Return the seed that `reseed` uses."""
    return seed_for(seed, stage, rank, epoch, batch, *turn)


def reseed_sample(*, seed: int, epoch: int, index: int, stage: Stage = "train") -> None:
    """Seed the generators of Python, NumPy and torch for one sample. This takes about 10 us.

    The seed does not depend on the worker. It differs between stages, so that randomly generated samples differ between
    splits.
    """
    stages = () if stage == "train" else (stage,)
    _seed_generators(seed_for(seed, "sample", *stages, epoch, index))


def reseed_batch(*, seed: int, stage: Stage, rank: int, epoch: int, batch: int) -> None:
    """Seed the generators of Python, NumPy and torch for the batch transforms of one rank."""
    _seed_generators(seed_for(seed, "batch", stage, rank, epoch, batch))


def reseed_sampler(*, seed: int, stage: Stage, epoch: int) -> None:
    """Seed the generators of Python, NumPy and torch for one epoch of a sampler.

    Epoch -1 is the creation of the sampler.
    """
    _seed_generators(seed_for(seed, "sampler", stage, epoch))


def reseed_epoch(*, seed: int, rank: int, epoch: int) -> None:
    """Seed the generators of Python, NumPy and torch for the hooks at the start of an epoch.

    -1 is the start of training.
    """
    _seed_generators(seed_for(seed, "epoch", rank, epoch))


def initialisation(seed: int) -> None:
    """Seed the generators of Python, NumPy and torch for the initial weights of a model."""
    _seed_generators(seed_for(seed, "initialisation"))


def permutation(*, seed: int, epoch: int, length: int) -> Tensor:
    """Return a random permutation of the indices below `length`, int64 `[length]`. It depends only on (seed, epoch)."""
    generator = torch.Generator().manual_seed(seed_for(seed, "order", epoch))
    return torch.randperm(length, generator=generator)


def sample_generator(*, seed: int, epoch: int, index: int) -> np.random.Generator:
    """Return a NumPy generator for one sample of one epoch. This takes about 15 us."""
    key = int.from_bytes(_digest((seed, "sample", epoch, index), size=16), "little")
    return np.random.Generator(np.random.Philox(key=key))


@contextmanager
def preserve_generators() -> Iterator[None]:
    """Restore the generators of Python, NumPy and torch on exit.

    Reading data in the main process therefore does not change a model's dropout.
    """
    python, numpy, torch_state = random.getstate(), np.random.get_state(), torch.default_generator.get_state()
    try:
        yield
    finally:
        random.setstate(python)
        np.random.set_state(numpy)
        torch.default_generator.set_state(torch_state)


def _digest(parts: tuple[int | str, ...], *, size: int) -> bytes:
    # operator.index converts NumPy's integers. It rejects floats, because their repr may differ between versions.
    plain = [part if isinstance(part, str) else operator.index(part) for part in parts]
    return hashlib.blake2b(repr(plain).encode(), digest_size=size).digest()


def _seed_generators(value: int) -> None:
    random.seed(value)
    np.random.seed(value & 0xFFFFFFFF)
    # torch.manual_seed would seed every backend, which takes a hundred times as long.
    torch.default_generator.manual_seed(value)
    if torch.cuda.is_initialized():
        torch.cuda.manual_seed(value)
    elif _has_mps():
        torch.mps.manual_seed(value & 0xFFFFFFFF)


@functools.cache
def _has_mps() -> bool:
    return torch.backends.mps.is_available()
