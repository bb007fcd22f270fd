"""Batches of any torch Dataset, through torch's DataLoader with its workers."""

from __future__ import annotations

import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import DataLoader

from exp.data.faults import data_fault
from exp.data.loader import Loader
from exp.data.randomness import generators_kept
from exp.data.sampler import GlobalBatches, ShareSampler
from exp.data.samples import SampleSource, as_batch
from exp.signals import heed
from exp.types import Batch, Stage


@dataclass(frozen=True, kw_only=True)
class Fetching:
    """How samples are fetched: DataLoader's own words, null for its default."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    multiprocessing_context: str | None = None

    def __post_init__(self) -> None:
        methods = multiprocessing.get_all_start_methods()
        if self.multiprocessing_context not in (None, *methods):
            raise data_fault(
                "multiprocessing_context",
                got=self.multiprocessing_context,
                expected=f"null or one of {', '.join(methods)}",
            )
        if self.prefetch_factor is not None and self.prefetch_factor < 1:
            raise data_fault("prefetch_factor", got=str(self.prefetch_factor), expected="null, or 1 or more")

    def dataloader(self, dataset: Any, **arguments: Any) -> DataLoader:
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


class WorkerLoader(Loader):
    """Sends (epoch, index) pairs to the workers, so that a batch does not depend on who fetches it."""

    def __init__(
        self,
        *,
        stage: Stage,
        source: SampleSource,
        batches: GlobalBatches,
        rank: int,
        world_size: int,
        fetching: Fetching,
        collate: Callable[[Any], Any],
    ) -> None:
        super().__init__(stage=stage)
        self.batches = batches
        self.rank, self.world_size = rank, world_size
        self._fetching = fetching
        self._sampler = ShareSampler(batches=batches, rank=rank, world_size=world_size)
        self._arguments = {"batch_sampler": self._sampler, "collate_fn": collate}
        self._source = source

    @functools.cached_property
    def _dataloader(self) -> DataLoader:
        # One for all epochs, so that workers can persist.
        return self._fetching.dataloader(self._source, **self._arguments)

    def _length(self) -> int:
        return len(self.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        self._sampler.epoch, self._sampler.start = epoch, start
        fetched = kept_apart(iter(self._dataloader), in_process=not self._fetching.num_workers)
        for batch, data in enumerate(fetched, start):
            yield Batch(as_batch(data), self._sampler.share(batch).size, self.batches.size(batch), self.world_size)


def kept_apart(iterator: Iterator[Any], *, in_process: bool) -> Iterator[Any]:
    """The iterator's items; where it runs in this process, what it does to the random generators is undone."""
    if not in_process:
        yield from iterator
        return
    while True:
        with generators_kept():
            item = next(iterator, _END)
        if item is _END:
            return
        yield item


_END = object()


def ignore_signals(worker: int) -> None:
    """A signal to the group is for the run's own process, which ends its workers once its state is saved."""
    heed(signal.SIG_IGN)
