"""Batches of any torch Dataset, sample by sample, through torch's DataLoader with its workers."""

from __future__ import annotations

import functools
import signal
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, TypeVar

import torch
from torch.utils.data import DataLoader, Dataset

from exp.data.in_memory import samples_in
from exp.data.loader import Loader, ShareSampler
from exp.data.randomness import preserve_generators, reseed_sample
from exp.signals import heed
from exp.types import Batch, Stage

Transform = Callable[[Any], Any]
Collate = Callable[[Any], Any]
StartMethod = Literal["fork", "spawn", "forkserver"]
Item = TypeVar("Item")


@dataclass(frozen=True, kw_only=True)
class FetchOptions:
    """How samples are fetched: DataLoader's own words, null for its default."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    multiprocessing_context: StartMethod | None = None

    def dataloader(self, dataset: Dataset[object], **arguments: Any) -> DataLoader[object]:
        parallel: dict[str, Any] = {}
        if self.num_workers:
            parallel = {
                "prefetch_factor": self.prefetch_factor,
                "persistent_workers": self.persistent_workers,
                "multiprocessing_context": self.multiprocessing_context,
                "worker_init_fn": ignore_signals,
            }
        return DataLoader(
            dataset,
            num_workers=self.num_workers,
            pin_memory=self.pin_memory,
            # DataLoader draws a seed for its workers: from here, so that torch's own generator stays where it is.
            generator=torch.Generator(),
            **parallel,
            **arguments,
        )


class SampleSource(Dataset[object]):
    """Samples by (epoch, index), each with the random generators set to (seed, epoch, index) first.

    So augmentation that draws from Python, NumPy or torch gives the same sample whoever fetches it, and when.
    """

    def __init__(self, *, dataset: Dataset[object], transforms: Sequence[Transform], seed: int) -> None:
        self.dataset = dataset
        self.transforms = tuple(transforms)
        self.seed = seed

    def __len__(self) -> int:
        return samples_in(self.dataset)

    def __getitem__(self, position: tuple[int, int]) -> object:
        epoch, index = position
        reseed_sample(seed=self.seed, epoch=epoch, index=index)
        return apply_transforms(self.dataset[index], self.transforms)


class WorkerLoader(Loader):
    """Sends (epoch, index) pairs to the workers, so that a batch does not depend on who fetches it."""

    def __init__(
        self, *, stage: Stage, source: SampleSource, sampler: ShareSampler, options: FetchOptions, collate: Collate
    ) -> None:
        super().__init__(stage=stage)
        self._source, self._sampler, self._options, self._collate = source, sampler, options, collate

    @functools.cached_property
    def _dataloader(self) -> DataLoader[object]:
        # One for all epochs, so that workers can persist.
        return self._options.dataloader(self._source, batch_sampler=self._sampler, collate_fn=self._collate)

    def _length(self) -> int:
        return len(self._sampler.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        sampler = self._sampler
        sampler.epoch, sampler.start = epoch, start
        fetched = isolate_generators(iter(self._dataloader), in_process=not self._options.num_workers)
        for batch, data in enumerate(fetched, start):
            size = sampler.batches.size(batch)
            yield Batch(as_batch(data), sampler.share_of(size).size, size, sampler.world_size)


def isolate_generators(iterator: Iterator[Item], *, in_process: bool) -> Iterator[Item]:
    """Yields the iterator's items. Where it runs in this process, the random generators are restored after each."""
    if not in_process:
        yield from iterator
        return
    while True:
        with preserve_generators():
            try:
                item = next(iterator)
            except StopIteration:
                return
        yield item


def ignore_signals(worker: int) -> None:
    """Ignores signals to the group: the run's own process ends its workers once its state is saved."""
    heed(signal.SIG_IGN)


def apply_transforms(sample: object, transforms: Sequence[Transform]) -> object:
    """The sample with each transform applied to its input: the first of a pair, the entry `input` of a mapping."""
    if not transforms:
        return sample
    if isinstance(sample, Mapping):
        return {**sample, "input": applied(sample["input"], transforms)}
    if isinstance(sample, tuple | list):
        return (applied(sample[0], transforms), *sample[1:])
    return applied(sample, transforms)


def applied(value: object, transforms: Sequence[Transform]) -> object:
    for transform in transforms:
        value = transform(value)
    return value


def as_batch(data: object) -> object:
    """A batch with its pair as a tuple: collating and pinning turn one into a list."""
    return tuple(data) if type(data) is list else data
