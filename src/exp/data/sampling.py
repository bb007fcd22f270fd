"""Run a sampler of torch's kind so that what it gives is a function of (seed, epoch), and look at what it gives."""

from __future__ import annotations

import functools
import inspect
import itertools
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torch.utils.data import Sampler
from torch.utils.data.distributed import DistributedSampler

from exp.data.faults import data_fault
from exp.data.loader import EpochBatches, Epochs
from exp.data.orders import Listed, Order
from exp.data.randomness import preserve_generators, reseed_sampler
from exp.errors import LIBRARIES, REFUSALS, ConfigError, ExpError, RunError, UserCodeError, refusal, said
from exp.shared_types import Stage

# Makes a sampler: its class, or that with some of its values.
MakeSampler = Callable[..., Sampler[Any]]
# Whose passes depend on the generators alone, and on no pass before.
STATELESS = ("exp", "torch")


class Passes:
    """The passes of one sampler over one part, by epoch.

    The generators of Python, NumPy and torch are set to (seed, stage, epoch) before a pass, and `set_epoch` is called
    where the sampler has it. One that keeps something from pass to pass gives the same in a resumed run, for there the
    passes of the epochs before are made again.

    make: a new sampler. key: of the config, below `data.`.
    """

    def __init__(self, make: Callable[[], Sampler[Any]], *, key: str, stage: Stage, seed: int) -> None:
        self._make, self._key, self._stage, self._seed = make, key, stage, seed
        self._sampler = self._made()
        self._done = 0
        self._last: tuple[int, list[Any]] | None = None

    @property
    def name(self) -> str:
        """The sampler's class."""
        return type(self._sampler).__name__

    def __call__(self, epoch: int) -> list[Any]:
        """All that the sampler gives in an epoch.

        Raises: UserCodeError.
        """
        if self._last is None or self._last[0] != epoch:
            with preserve_generators():
                self._last = (epoch, self._pass(epoch))
        return self._last[1]

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
            raise UserCodeError.of(error, what=f"epoch {epoch} of the sampler {self.name}") from error

    def _made(self) -> Sampler[Any]:
        with preserve_generators():
            reseed_sampler(seed=self._seed, stage=self._stage, epoch=-1)
            sampler = self._make()
        if isinstance(sampler, DistributedSampler):
            raise data_fault(
                self._key,
                got=f"{type(sampler).__name__}, which shares its samples out over ranks",
                expected="a sampler of the whole training part: exp shares out what it gives",
                cure="Derive it from torch.utils.data.Sampler",
            )
        return sampler


class SampledOrder:
    """The samples that a sampler takes in an epoch, in its order; a Draw.

    samples: of the part.
    Raises: ConfigError where the sampler's first epoch cannot be used.
    """

    def __init__(self, passes: Passes, *, samples: int) -> None:
        self._passes, self._samples = passes, samples
        first = passes(0)
        if fault := self._wrong(first):
            raise data_fault("sampler", got=f"{passes.name}, which gives {fault[0]}", expected=fault[1])
        self._length = len(first)

    def __len__(self) -> int:
        return self._length

    def __call__(self, epoch: int) -> Tensor:
        """Raises: RunError where an epoch has another number of samples than the first, or none that are there."""
        found = self._passes(epoch)
        if len(found) != self._length:
            raise RunError(
                f"data.sampler: {self._passes.name} gives {len(found)} samples in epoch {epoch}, and gave "
                f"{self._length} in epoch 0; expected as many in every epoch"
            )
        if fault := self._wrong(found):
            raise RunError(f"data.sampler: {self._passes.name} gives {fault[0]} in epoch {epoch}; expected {fault[1]}")
        return torch.tensor(found, dtype=torch.int64)

    def _wrong(self, found: list[Any]) -> tuple[str, str] | None:
        if not found:
            return "no sample", "one or more"
        return wrong_index(found, samples=self._samples)


class SampledBatches(EpochBatches):
    """The global batches that a batch sampler gives.

    samples: of the part. is_whole: whether each of them must be in one batch, as in an evaluation.
    Raises: ConfigError where the batch sampler's first epoch cannot be used.
    """

    def __init__(self, passes: Passes, *, samples: int, seed: int, is_whole: bool) -> None:
        self._passes, self._samples, self._is_whole, self.seed = passes, samples, is_whole, seed
        first = passes(0)
        if fault := self._wrong(first):
            raise data_fault("batch_sampler", got=f"{passes.name}, which gives {fault[0]}", expected=fault[1])
        self._length = len(first)
        self.batch_size = max(map(len, first))

    def __len__(self) -> int:
        return self._length

    def order(self, epoch: int) -> Order:
        return Listed(torch.tensor([index for batch in self._batches(epoch) for index in batch], dtype=torch.int64))

    def spans(self, epoch: int, start: int) -> Iterator[tuple[int, int]]:
        edges = list(itertools.accumulate(map(len, self._batches(epoch)), initial=0))
        return itertools.pairwise(edges[start:])

    def _batches(self, epoch: int) -> list[Any]:
        """Raises: RunError where an epoch has another number of batches than the first, or none that can be."""
        found = self._passes(epoch)
        if len(found) != self._length:
            raise RunError(
                f"data.batch_sampler: {self._passes.name} gives {len(found)} batches in epoch {epoch}, and gave "
                f"{self._length} in epoch 0; expected as many in every epoch"
            )
        if epoch and (fault := self._wrong(found)):
            raise RunError(
                f"data.batch_sampler: {self._passes.name} gives {fault[0]} in epoch {epoch}; expected {fault[1]}"
            )
        return found

    def _wrong(self, found: list[Any]) -> tuple[str, str] | None:
        if not found:
            return "no batch", "one or more"
        for batch in found:
            if not isinstance(batch, list | tuple):
                return f"a {type(batch).__name__}", "lists of samples: one sample at a time is for data.sampler"
            if not batch:
                return "an empty batch", "one sample in it or more"
            if fault := wrong_index(batch, samples=self._samples):
                return fault
        seen = [index for batch in found for index in batch]
        if self._is_whole and sorted(seen) != list(range(self._samples)):
            got = f"{len(seen)} samples of an evaluation of {self._samples}, {len(set(seen))} of them different"
            return got, "each sample once"
        return None


def wrong_index(found: Iterable[Any], *, samples: int) -> tuple[str, str] | None:
    """What is there and what must be, of the first that is no sample's number; None where all are."""
    for index in found:
        if isinstance(index, list | tuple):
            return "lists of samples", "one sample at a time: lists are for data.batch_sampler"
        if not hasattr(index, "__index__"):
            return f"a {type(index).__name__}", "numbers of samples, which are integers"
        if not 0 <= index < samples:
            return f"the sample {int(index)}", f"numbers from 0 to {samples - 1}: those of the part"
    return None


def maker(make: MakeSampler, *, key: str, offers: Mapping[str, object]) -> Callable[[], Sampler[Any]]:
    """What makes the sampler, with those of the offers that it takes and was not given.

    key: of the config, below `data.`.
    """
    given = dict(make.keywords) if isinstance(make, functools.partial) else {}
    taken = inspect.signature(make).parameters
    values = {name: value for name, value in offers.items() if name in taken and given.get(name) is None}
    whole = functools.partial(make, **values)

    def made() -> Sampler[Any]:
        target = make.func if isinstance(make, functools.partial) else make
        try:
            sampler = whole()
        except ExpError:
            raise
        except Exception as error:
            if not isinstance(error, REFUSALS) and target.__module__.partition(".")[0] in LIBRARIES:
                raise  # a bug
            got = f"{getattr(target, '__name__', target)} refused its values ({type(error).__name__}: {said(error)})"
            raise ConfigError([refusal(error, key=f"data.{key}", known=given, got=got)]) from error
        return sampler

    return made
