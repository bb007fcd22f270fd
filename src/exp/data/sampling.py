"""Run a sampler of torch's kind so that what it gives is a function of (seed, epoch), and check what it gives."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from exp.data.data_errors import data_error
from exp.data.loader import EpochBatches, Epochs
from exp.data.orders import Listed, Order
from exp.data.randomness import preserve_generators, reseed_sampler
from exp.errors import (
    LIBRARIES,
    REFUSALS,
    ConfigError,
    ExpError,
    RunError,
    UserCodeError,
    constructor_error,
    message_of,
)
from exp.shared_types import Stage

# Makes a sampler: its class, or that with some of its values.
MakeSampler = Callable[..., Sampler[Any]]
# Packages whose samplers depend on the generators alone, and on no pass before.
STATELESS = ("exp", "torch")
# What an epoch must not hold, and the expected values; None for an epoch that can be used.
Judge = Callable[[list[Any]], tuple[str, str] | None]


class Passes:
    """The passes of one sampler over one split, by epoch. All epochs have as many items as the first.

    The generators of Python, NumPy and torch are set to (seed, stage, epoch) before a pass, and `set_epoch` is called
    if the sampler has it. A sampler that keeps something from pass to pass gives the same in a resumed run, because
    the passes of the epochs before are made again.

    Args:
        make: makes the sampler.
        key: of the config, below `data.`.
        stage: of the split.
        seed: of the run.
        judge: judges an epoch.

    Raises:
        ConfigError: for a first epoch that cannot be used.
    """

    def __init__(self, make: Callable[[], Sampler[Any]], *, key: str, stage: Stage, seed: int, judge: Judge) -> None:
        self._make, self._key, self._stage, self._seed, self._judge = make, key, stage, seed, judge
        self._sampler, self._done = self._made(), 0
        self._last: tuple[int, list[Any]] | None = None
        self.length = 0
        self.length = len(self(0))

    def __call__(self, epoch: int) -> list[Any]:
        """Return all items of an epoch.

        Raises: RunError for an epoch that cannot be used; UserCodeError.
        """
        if self._last is not None and self._last[0] == epoch:
            return self._last[1]
        with preserve_generators():
            found = self._pass(epoch)
        wrong = self._judge(found) if found else ("nothing", "one sample or batch, or more")
        if self.length and len(found) != self.length:
            wrong = f"{len(found)} items", f"{self.length} as in epoch 0"
        if wrong is not None:
            got = f"{type(self._sampler).__name__}, which gives {wrong[0]} in epoch {epoch}"
            if not self.length:
                raise data_error(self._key, got=got, expected=wrong[1])
            raise RunError(f"data.{self._key}: {got}; expected {wrong[1]}")
        self._last = (epoch, found)
        return found

    def _pass(self, epoch: int) -> list[Any]:
        if type(self._sampler).__module__.partition(".")[0] in STATELESS or isinstance(self._sampler, Epochs):
            return self._one(epoch)
        if epoch < self._done:
            self._sampler, self._done = self._made(), 0
        for earlier in range(self._done, epoch):
            self._one(earlier)
        self._done = epoch + 1
        return self._one(epoch)

    def _one(self, epoch: int) -> list[Any]:
        sampler = self._sampler
        reseed_sampler(seed=self._seed, stage=self._stage, epoch=epoch)
        try:
            if isinstance(sampler, Epochs):
                sampler.set_epoch(epoch)
            return list(sampler)
        except Exception as error:
            raise UserCodeError.of(error, what=f"epoch {epoch} of the sampler {type(sampler).__name__}") from error

    def _made(self) -> Sampler[Any]:
        with preserve_generators():
            reseed_sampler(seed=self._seed, stage=self._stage, epoch=-1)
            sampler = self._make()
        if isinstance(sampler, DistributedSampler):
            got = f"{type(sampler).__name__}, which shares its samples out over ranks"
            expected = "a sampler of the whole training part, derived from torch.utils.data.Sampler"
            raise data_error(self._key, got=got, expected=expected)
        return sampler


class SampledOrder:
    """The samples that a sampler takes in an epoch, in its order; a Draw. samples: of the split."""

    def __init__(self, make: Callable[[], Sampler[Any]], *, samples: int, seed: int) -> None:
        judge = functools.partial(_wrong_index, samples=samples)
        self._passes = Passes(make, key="sampler", stage="train", seed=seed, judge=judge)

    def __len__(self) -> int:
        return self._passes.length

    def __call__(self, epoch: int) -> Tensor:
        return torch.tensor(self._passes(epoch), dtype=torch.int64)


class SampledBatches(EpochBatches):
    """The global batches that a batch sampler gives. samples: of the split, which an evaluation must see once each."""

    def __init__(self, make: Callable[[], Sampler[Any]], *, samples: int, stage: Stage, seed: int) -> None:
        self._samples, self._is_whole, self.seed = samples, stage != "train", seed
        self._passes = Passes(make, key="batch_sampler", stage=stage, seed=seed, judge=self._wrong)
        self.batch_size = max(map(len, self._passes(0)))

    def __len__(self) -> int:
        return self._passes.length

    def order(self, epoch: int) -> Order:
        return Listed(torch.tensor([index for batch in self._passes(epoch) for index in batch], dtype=torch.int64))

    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        edges = list(itertools.accumulate(map(len, self._passes(epoch)), initial=0))
        return itertools.pairwise(edges[start:])

    def _wrong(self, found: list[Any]) -> tuple[str, str] | None:
        for batch in found:
            if not isinstance(batch, list | tuple) or not batch:
                return f"{batch!r}", "lists of samples: one sample at a time is for data.sampler"
            if error := _wrong_index(batch, samples=self._samples):
                return error
        seen = [index for batch in found for index in batch]
        if self._is_whole and sorted(seen) != list(range(self._samples)):
            got = f"{len(seen)} samples of an evaluation of {self._samples}, {len(set(seen))} of them different"
            return got, "each sample once"
        return None


def _wrong_index(found: list[Any] | tuple[Any, ...], *, samples: int) -> tuple[str, str] | None:
    """Return the first item that is no sample's number, and the expected items; None if all are."""
    for index in found:
        if not hasattr(index, "__index__") or not 0 <= index < samples:
            return f"{index!r}", f"integers from 0 to {samples - 1}, the numbers of samples"
    return None


def maker(make: MakeSampler, *, key: str, offers: Mapping[str, object]) -> Callable[[], Sampler[Any]]:
    """Return the function that makes a sampler, with the offers that it takes and was not given.

    key: of the config, below `data.`.
    """
    target, given = (make.func, dict(make.keywords)) if isinstance(make, functools.partial) else (make, {})
    taken = inspect.signature(make).parameters
    values = {name: value for name, value in offers.items() if name in taken and given.get(name) is None}

    def made() -> Sampler[Any]:
        try:
            return make(**values)
        except ExpError:
            raise
        except Exception as error:
            if not isinstance(error, REFUSALS) and target.__module__.partition(".")[0] in LIBRARIES:
                raise  # a bug
            name = getattr(target, "__name__", target)
            got = f"{name} refused its values ({type(error).__name__}: {message_of(error)})"
            raise ConfigError([constructor_error(error, key=f"data.{key}", known=given, got=got)]) from error

    return made
