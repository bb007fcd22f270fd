"""Batches of any torch Dataset, sample by sample, through torch's DataLoader with its workers."""

from __future__ import annotations

import functools
import multiprocessing
import signal
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from multiprocessing import util
from typing import Any, Literal, TypeVar

import torch
from torch import Tensor
from torch.utils.data import DataLoader, Dataset, default_collate, get_worker_info

from exp.data.collate import Collate
from exp.data.data_errors import SampleError, data_error
from exp.data.entries import BatchForm, target_in
from exp.data.in_memory import sample_name, samples_in
from exp.data.joint_transforms import Transform, apply_transforms, plain_tensors
from exp.data.labels import Labels
from exp.data.loader import Loader, ShareSampler, tell_epoch, wanting_epochs
from exp.data.randomness import preserve_generators, reseed_sample
from exp.errors import ConfigError, ErrorDetails, ExpError, Interrupted, UserCodeError, one_line
from exp.shared_types import Batch, Stage
from exp.signals import install_handler

StartMethod = Literal["fork", "spawn", "forkserver"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class FetchOptions:
    """How samples are fetched: DataLoader's own words, null for its default."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    multiprocessing_context: StartMethod | None = None

    def dataloader(self, dataset: Dataset[Any], **arguments: Any) -> DataLoader[object]:
        parallel: dict[str, Any] = {}
        if self.num_workers:
            # A run that fails keeps them alive by its traceback.
            util.Finalize(None, end_workers, exitpriority=0)
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


@dataclass(frozen=True, kw_only=True)
class Sample:
    """One sample and its number, in its part or from the beginning of its stream.

    fingerprint: of what the data set gave; None where nobody asked, and where it has none.
    """

    index: int
    data: object
    fingerprint: object = None


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Makes a batch of samples, and refuses labels that are none of the classes.

    form: names the batch's entries.
    named: a sample in words, by its index.
    """

    collate: Collate
    form: BatchForm
    labels: Labels
    named: Callable[[int], str]

    def __call__(self, samples: Sequence[Sample | ExpError]) -> object:
        """The batch; an ExpError, not raised, where one of the samples is one, or no batch can be made of them."""
        if (failed := next((sample for sample in samples if isinstance(sample, ExpError)), None)) is not None:
            return failed
        read = [sample for sample in samples if isinstance(sample, Sample)]
        is_default = self.collate is default_collate
        try:
            # torch's would make a batch of tv_tensors one in a worker, and a plain tensor outside.
            batch = self.collate([plain_tensors(sample.data) if is_default else sample.data for sample in read])
            batch = self.form(batch)
            self.labels.refuse(batch, lambda place: self._place(read, place, batch))
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            place = f"from {self.named(read[0].index)} to {self.named(read[-1].index)}"
            if is_default and isinstance(error, TypeError | RuntimeError):
                return SampleError(_misfit(error, place))
            return told(error, what=f"making a batch of {len(read)} samples, {place},")
        return batch

    def _place(self, samples: Sequence[Sample], place: int, batch: object) -> str:
        target = target_in(batch)
        if isinstance(target, Tensor) and target.dim() and len(target) == len(samples):
            return self.named(samples[place].index)
        # A collate function of the user's own may put several samples into one row.
        return f"one of the samples from {self.named(samples[0].index)} to {self.named(samples[-1].index)}"


def _misfit(error: BaseException, place: str) -> ErrorDetails:
    """Return the error of samples that torch's collate function makes no batch of."""
    return ErrorDetails(
        key="data.collate",
        got=f"samples {place}: {one_line(error)}",
        expected="tensors, arrays, numbers and texts of one size, in tuples, lists or mappings",
        fix="Pad them by data.collate=pad, bring them to one size in data.transforms, or name a data.collate",
    )


def received(data: object) -> object:
    """What a loader got, as a batch with its pair as a tuple: collating and pinning turn one into a list.

    Raises: ExpError where it is one, made where a sample was read.
    """
    if isinstance(data, ExpError):
        raise data
    return as_batch(data)


def told(error: BaseException, *, what: str) -> UserCodeError:
    """The error that tells what the user's own code raised, SystemExit and GeneratorExit included.

    Raises: the same where a signal may have raised it. Workers ignore those.
    """
    if isinstance(error, KeyboardInterrupt | Interrupted) and get_worker_info() is None:
        raise error
    return UserCodeError.of(error, what=what)


class SampleSource(Dataset["Sample | ExpError"]):
    """Samples by (epoch, index), each with the random generators set to (seed, part, epoch, index) first.

    So augmentation that draws from Python, NumPy or torch gives the same sample whoever fetches it, and when.

    A sample that cannot be read is given as the UserCodeError that says so: raised, torch would tell it in words of its
    own in a worker, and take a StopIteration for the end of the data.

    fingerprint: of each sample, before transforms; None takes none.
    """

    def __init__(
        self,
        *,
        dataset: Dataset[object],
        transforms: Sequence[Transform],
        seed: int,
        stage: Stage,
        fingerprint: Callable[[object], object] | None = None,
    ) -> None:
        self.dataset = dataset
        self.fingerprint = fingerprint
        self.transforms = tuple(transforms)
        self.seed = seed
        self.stage = stage
        self._epochs = wanting_epochs(dataset)
        self._length = len(self) if self._epochs else 0

    def __len__(self) -> int:
        return samples_in(self.dataset)

    def __getitem__(self, position: tuple[int, int]) -> Sample | ExpError:
        epoch, index = position
        try:
            if self._epochs:
                self._tell_epoch(epoch)
            reseed_sample(seed=self.seed, epoch=epoch, index=index, stage=self.stage)
            raw = self.dataset[index]
            # First: a transform may change it in place.
            taken = None if self.fingerprint is None else self.fingerprint(raw)
            return Sample(index=index, data=apply_transforms(raw, self.transforms), fingerprint=taken)
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            return told(error, what=f"reading {self.named(index)}")

    def _tell_epoch(self, epoch: int) -> None:
        tell_epoch(self._epochs, epoch, seed=self.seed)
        if len(self) != self._length:
            got = f"{len(self)} samples in epoch {epoch}, and {self._length} before"
            raise data_error(self.stage, got=got, expected="as many samples in every epoch")

    def named(self, index: int) -> str:
        """A sample in words."""
        return sample_name(self.dataset, index, stage=self.stage)


class WorkerLoader(Loader):
    """Sends (epoch, index) pairs to the workers, so that a batch does not depend on who fetches it."""

    sampler: ShareSampler

    def __init__(
        self, *, stage: Stage, source: SampleSource, sampler: ShareSampler, options: FetchOptions, assembly: Assembly
    ) -> None:
        super().__init__(stage=stage)
        self._source, self.sampler, self._options, self._assembly = source, sampler, options, assembly

    @functools.cached_property
    def _dataloader(self) -> DataLoader[object]:
        # One for all epochs, so that workers can persist.
        return self._options.dataloader(self._source, batch_sampler=self.sampler, collate_fn=self._assembly)

    def _length(self) -> int:
        return len(self.sampler.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        sampler = self.sampler
        sampler.epoch, sampler.start = epoch, start
        fetched = isolate_generators(iter(self._dataloader), in_process=not self._options.num_workers)
        for data, (size, mine) in zip(fetched, sampler.sizes(epoch, start), strict=False):
            yield Batch(received(data), mine.size, size, sampler.world_size)


def isolate_generators(iterator: Iterator[Item], *, in_process: bool) -> Iterator[Item]:
    """Yields the iterator's items. Where it runs in this process, the random generators are restored after each."""
    if not in_process:
        try:
            yield from iterator
        except (ConnectionError, EOFError) as error:
            # What torch says, where the pipe of a dead worker breaks before torch has looked after it.
            raise RuntimeError(f"DataLoader worker (pid unknown) is gone: {error}.") from error
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
    install_handler(signal.SIG_IGN)


def end_workers() -> None:
    """End workers that are left at exit: multiprocessing asks by SIGTERM, which they ignore, and waits for ever."""
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def as_batch(data: object) -> object:
    """A batch with its pair as a tuple: collating and pinning turn one into a list."""
    return tuple(data) if type(data) is list else data
