"""Loader that reads the samples of any torch Dataset with torch's DataLoader and its worker processes."""

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
from exp.data.data_errors import SampleError, data_error, sample_error
from exp.data.entries import BatchForm, target_in
from exp.data.in_memory import sample_name, samples_in
from exp.data.joint_transforms import Transform, apply_transforms, plain_tensors
from exp.data.labels import Labels
from exp.data.loader import Loader, ShareSampler, find_epoch_aware, set_epochs
from exp.data.randomness import preserve_generators, reseed_sample
from exp.errors import ConfigError, ExpError, Interrupted, UserCodeError, one_line
from exp.shared_types import Batch, Stage
from exp.signals import install_handler

StartMethod = Literal["fork", "spawn", "forkserver"]
Item = TypeVar("Item")


@dataclass(frozen=True)
class FetchOptions:
    """Options of torch's DataLoader; see the parameters of DataLoader. None means the default of DataLoader."""

    num_workers: int = 0
    pin_memory: bool = False
    prefetch_factor: int | None = None
    persistent_workers: bool = True
    multiprocessing_context: StartMethod | None = None

    def dataloader(self, dataset: Dataset[Item], **arguments: Any) -> DataLoader[Item]:
        """Return a DataLoader with these options.

        Args:
            dataset: The data set.
            arguments: Additional arguments of DataLoader.
        """
        parallel: dict[str, Any] = {}
        if self.num_workers:
            # Workers are killed at exit. The DataLoader does not stop them if a run fails, because the traceback still
            # refers to the DataLoader.
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
            # DataLoader draws a seed for its workers. It uses this generator, so that the state of torch's default
            # generator does not change.
            generator=torch.Generator(),
            **parallel,
            **arguments,
        )


@dataclass(frozen=True, kw_only=True)
class Sample:
    """Sample with its index.

    Args:
        index: The index of the sample in the split or in the stream.
        data: The values of the sample.
    """

    index: int
    data: object


@dataclass(frozen=True, kw_only=True)
class Assembly:
    """Function that makes a batch from a list of samples and checks its labels.

    Args:
        collate: The collate function.
        form: The function that converts batches to the form that the network expects.
        labels: The valid labels.
        name_of: A function that returns the name of a sample for messages, given the index of the sample.
    """

    collate: Collate
    form: BatchForm
    labels: Labels
    name_of: Callable[[int], str]

    def __call__(self, samples: Sequence[Sample | ExpError]) -> object:
        """Return the batch of a list of samples.

        Errors are returned instead of raised: the error in `samples` if it contains one, or the error that occurs when
        the batch is made.
        """
        if (failed := next((sample for sample in samples if isinstance(sample, ExpError)), None)) is not None:
            return failed
        read = [sample for sample in samples if isinstance(sample, Sample)]
        is_default = self.collate is default_collate
        try:
            # tv_tensors are converted to plain tensors first. If they are not, torch's default_collate returns a
            # tv_tensor in a worker, and a plain tensor in the main process.
            batch = self.collate([plain_tensors(sample.data) if is_default else sample.data for sample in read])
            batch = self.form(batch)
            self.labels.refuse(batch, lambda place: self._place(read, place, batch))
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            place = f"from {self.name_of(read[0].index)} to {self.name_of(read[-1].index)}"
            if is_default and isinstance(error, TypeError | RuntimeError):
                return _collate_error(error, place)
            return user_error(error, what=f"making a batch of {len(read)} samples, {place},")
        return batch

    def _place(self, samples: Sequence[Sample], place: int, batch: object) -> str:
        target = target_in(batch)
        if isinstance(target, Tensor) and target.dim() and len(target) == len(samples):
            return self.name_of(samples[place].index)
        # A user's collate function may combine several samples in one row of the batch.
        return f"one of the samples from {self.name_of(samples[0].index)} to {self.name_of(samples[-1].index)}"


def _collate_error(error: BaseException, place: str) -> SampleError:
    """Return the error for samples that torch's default_collate cannot batch.

    Args:
        error: The exception of default_collate.
        place: The range of samples, such as "from sample 0 of train to sample 7 of train".
    """
    expected = "samples of the same size that contain tensors, arrays, numbers or texts"
    fix = "Pad the samples with data.collate=pad, resize them in data.transforms, or set data.collate to your function"
    got = f"samples {place}, which cannot be batched: {one_line(error)}"
    return sample_error("collate", got=got, expected=expected, fix=fix)


def batch_of(data: object) -> object:
    """Return the batch in an item of a DataLoader. If the item is an ExpError, raise the error."""
    if isinstance(data, ExpError):
        raise data
    return as_batch(data)


def user_error(error: BaseException, *, what: str) -> UserCodeError:
    """Return a UserCodeError for an exception in the user's code, including SystemExit and GeneratorExit.

    KeyboardInterrupt and Interrupted are raised again in the main process, because a signal may have caused them. They
    are not raised again in workers, because workers ignore signals.

    Args:
        error: The exception.
        what: A description of the operation that failed, such as "reading sample 3 of train".
    """
    if isinstance(error, KeyboardInterrupt | Interrupted) and get_worker_info() is None:
        raise error
    return UserCodeError.of(error, what=what)


class SampleSource(Dataset["Sample | ExpError"]):
    """Data set of the transformed samples of a split. The key of a sample is the pair (epoch, index).

    The generators are seeded from (seed, split, epoch, index) before each sample is read. Random augmentation therefore
    does not depend on the process that reads the sample.

    If a sample cannot be read, the error is returned instead of raised. torch would change the message of an exception
    in a worker, and would treat a StopIteration as the end of the data.

    Args:
        dataset: The split.
        transforms: The transforms of its samples.
        seed: The seed of the run.
        stage: The name of the split.
    """

    def __init__(self, *, dataset: Dataset[object], transforms: Sequence[Transform], seed: int, stage: Stage) -> None:
        self.dataset = dataset
        self.transforms = tuple(transforms)
        self.seed = seed
        self.stage = stage
        self._epochs = find_epoch_aware(dataset)
        self._length = len(self) if self._epochs else 0

    def __len__(self) -> int:
        return samples_in(self.dataset)

    def __getitem__(self, position: tuple[int, int]) -> Sample | ExpError:
        epoch, index = position
        try:
            if self._epochs:
                self._set_epoch(epoch)
            reseed_sample(seed=self.seed, epoch=epoch, index=index, stage=self.stage)
            return Sample(index=index, data=apply_transforms(self.dataset[index], self.transforms))
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            return user_error(error, what=f"reading {self.name_of(index)}")

    def _set_epoch(self, epoch: int) -> None:
        set_epochs(self._epochs, epoch, seed=self.seed)
        if len(self) != self._length:
            got = f"{len(self)} samples in epoch {epoch}, but {self._length} samples before"
            raise data_error(self.stage, got=got, expected="the same number of samples in every epoch")

    def name_of(self, index: int) -> str:
        """Return the name of the sample at an index, for messages."""
        return sample_name(self.dataset, index, stage=self.stage)


class WorkerLoader(Loader):
    """Loader that reads samples with torch's DataLoader and its workers.

    Workers receive pairs (epoch, index), so that a batch does not depend on the worker that makes it.

    Args:
        stage: The name of the split.
        source: The samples.
        sampler: The sampler, which yields the samples of this rank in each batch.
        options: The options of torch's DataLoader.
        assembly: The function that makes a batch from a list of samples.
    """

    sampler: ShareSampler

    def __init__(
        self, *, stage: Stage, source: SampleSource, sampler: ShareSampler, options: FetchOptions, assembly: Assembly
    ) -> None:
        super().__init__(stage=stage)
        self._source, self.sampler, self._options, self._assembly = source, sampler, options, assembly

    @functools.cached_property
    def _dataloader(self) -> DataLoader[Sample | ExpError]:
        # All epochs use the same DataLoader, so that its workers can persist.
        return self._options.dataloader(self._source, batch_sampler=self.sampler, collate_fn=self._assembly)

    def _length(self) -> int:
        return len(self.sampler.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        sampler = self.sampler
        sampler.epoch, sampler.start = epoch, start
        fetched = isolate_generators(iter(self._dataloader), in_process=not self._options.num_workers)
        for data, (size, mine) in zip(fetched, sampler.sizes(epoch, start), strict=False):
            yield Batch(batch_of(data), mine.size, size, sampler.world_size)


def isolate_generators(iterator: Iterator[Item], *, in_process: bool) -> Iterator[Item]:
    """Yield the items of a DataLoader's iterator.

    If the items are made in this process, the state of the random generators is restored after each item.

    Args:
        iterator: The iterator.
        in_process: Whether the items are made in this process instead of in workers.
    """
    if not in_process:
        try:
            yield from iterator
        except (ConnectionError, EOFError) as error:
            # If a worker dies, its pipe may break before torch detects the death. The message is the one that torch
            # uses for dead workers.
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
    """Ignore signals that are sent to the process group, as the worker_init_fn of a DataLoader.

    The main process handles these signals: it saves its state, and then stops its workers.
    """
    install_handler(signal.SIG_IGN)


def end_workers() -> None:
    """Kill all workers of this process.

    The function runs at exit, because multiprocessing stops workers with SIGTERM. Workers ignore SIGTERM, so that
    multiprocessing would wait for them forever.
    """
    for child in multiprocessing.active_children():
        if child.daemon:
            child.kill()


def as_batch(data: object) -> object:
    """Return a batch that is a list as a tuple, because collating and pinning convert a pair to a list."""
    return tuple(data) if type(data) is list else data
