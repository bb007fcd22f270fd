"""Batches of an IterableDataset: every rank reads the whole stream and keeps its share of each global batch.

Every rank therefore has the same number of batches, also for a stream of unknown length, and each sample counts once.
Transforms and collation, which cost most, are applied only to a rank's own samples. Each worker reads the whole stream,
too, and makes every num_workers-th batch.

Skipping a record of a Recorded stream is cheap. The values of a record are read and parsed when its sample is needed.

Private name of torch (seen in 2.11 to 2.13, and tested): torch.utils.data._utils.worker._worker_info, which
get_worker_info reads.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Protocol, runtime_checkable

from torch.utils.data import IterableDataset, _utils, get_worker_info

from exp.data.data_errors import SampleError
from exp.data.in_memory import samples_in
from exp.data.joint_transforms import Transform, apply_transforms
from exp.data.loader import Epochs, Loader, batch_count, share
from exp.data.randomness import reseed_sample, sample_generator
from exp.data.workers import Assembly, FetchOptions, Sample, batch_of, isolate_generators, user_error
from exp.errors import ConfigError, ExpError, RunError
from exp.shared_types import Batch, Stage

END = object()


@runtime_checkable
class Recorded(Protocol):
    """A stream of records that are cheap to skip. Only their order is random, a function of (seed, epoch)."""

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[object]:
        """Yield the records of one epoch."""

    def sample(self, record: object) -> object:
        """Return the sample of a record."""


@dataclass(kw_only=True, eq=False)
class ShareOfStream(IterableDataset[tuple[object, int, int]]):
    """Yields (collated data, size, global size) for each batch of this worker.

    Args:
        dataset: The stream.
        transforms: The transforms of samples.
        assembly: Makes a batch from samples.
        batch_size: The samples of a global batch.
        drop_last: Whether a short last batch is left out.
        shuffle_buffer: The number of samples among which the order is random; below 2 for none.
        seed: The seed of the run.
        stage: The stage.
        rank: This rank.
        world_size: The number of ranks.
        shuffle: Whether each epoch has another order of records.
        epoch: The epoch of the first batch.
        start: The number of the first batch in the epoch.
    """

    dataset: IterableDataset[object]
    transforms: Sequence[Transform]
    assembly: Assembly
    batch_size: int
    drop_last: bool
    shuffle_buffer: int
    seed: int
    stage: Stage
    rank: int
    world_size: int
    shuffle: bool = False
    epoch: int = 0
    start: int = 0

    def __iter__(self) -> Iterator[tuple[object, int, int]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        hide_worker()
        samples = enumerate(self._shuffle(self._read()))
        skipped = islice(samples, self.start * self.batch_size)
        if error := next((sample for _, sample in skipped if isinstance(sample, ExpError)), None):
            yield error, 0, 1
            return
        batch = 0
        while group := list(islice(samples, self.batch_size)):
            if errors := [sample for _, sample in group if isinstance(sample, ExpError)]:
                yield errors[0], 0, 1  # every worker and rank yields it
                return
            if len(group) < self.batch_size and self.drop_last:
                return
            if batch % workers == number:
                mine = share(size=len(group), rank=self.rank, world_size=self.world_size)
                made = [self._transform(*pair) for pair in group[mine.start : mine.stop]]
                yield self.assembly(made), mine.size, len(group)
            batch += 1

    def _read(self) -> Iterator[Sample | ExpError]:
        """Yield the samples. The generators are set to (seed, split, epoch, index) before each sample.

        A sample that cannot be read is the last one; its error is yielded.
        """
        index, wanted = 0, declared_length(self.dataset)
        is_random = not isinstance(self.dataset, Recorded)
        try:
            reseed_sample(seed=self.seed, epoch=self.epoch, index=0, stage=self.stage)
            iterator = self._open()
            while True:
                if is_random:
                    reseed_sample(seed=self.seed, epoch=self.epoch, index=index, stage=self.stage)
                sample = next(iterator, END)
                if sample is END:
                    break
                yield Sample(index=index, data=sample)
                index += 1
        except GeneratorExit:
            raise  # the reader of this generator needs no more samples
        except (ConfigError, SampleError) as error:
            yield error
            return
        except BaseException as error:
            yield user_error(error, what=f"reading {self.assembly.name_of(index)}")
            return
        if wanted is not None and index < wanted:
            yield RunError(
                f"the stream of {self.stage} ended before sample {index}; expected {wanted} samples, its length. A "
                "StopIteration in its code, such as that of next() without a default, also ends it"
            )

    def _open(self) -> Iterator[object]:
        if isinstance(self.dataset, Recorded):
            return self.dataset.records(seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return open_stream(self.dataset, epoch=self.epoch)

    def _shuffle(self, samples: Iterator[Sample | ExpError]) -> Iterator[Sample | ExpError]:
        """Yield the samples in an order that is random within a buffer, a function of (seed, epoch)."""
        size = self.shuffle_buffer
        if size < 2:
            yield from samples
            return
        buffer = list(islice(samples, size))
        # One draw for each sample from one generator: every rank and worker reads the whole stream, so all agree.
        generator = sample_generator(seed=self.seed, epoch=self.epoch, index=-1)
        for sample in samples:
            place = int(generator.integers(size))
            buffer[place], sample = sample, buffer[place]
            yield sample
        for place in generator.permutation(len(buffer)):
            yield buffer[place]

    def _transform(self, position: int, sample: Sample | ExpError) -> Sample | ExpError:
        """Return a sample after the transforms. position: Its place in the epoch, which seeds the generators."""
        if isinstance(sample, ExpError):
            return sample
        reseed_sample(seed=self.seed, epoch=self.epoch, index=position, stage=self.stage)
        try:
            data = self.dataset.sample(sample.data) if isinstance(self.dataset, Recorded) else sample.data
            return replace(sample, data=apply_transforms(data, self.transforms))
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            return user_error(error, what=f"transforming {self.assembly.name_of(sample.index)}")


class StreamLoader(Loader):
    """Shares of this rank in the global batches of a stream."""

    def __init__(self, *, stage: Stage, stream: ShareOfStream, options: FetchOptions) -> None:
        super().__init__(stage=stage)
        self.stream = stream
        # Workers cannot persist, because each epoch sends them a copy of the stream with that epoch.
        self._options = replace(options, persistent_workers=False)

    def _length(self) -> int | None:
        samples = declared_length(self.stream.dataset)
        if samples is None:
            return None
        return batch_count(samples, self.stream.batch_size, drop_last=self.stream.drop_last)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        stream = replace(self.stream, epoch=epoch, start=start)
        iterator = iter(self._options.dataloader(stream, batch_size=None))
        for data, size, global_size in isolate_generators(iterator, in_process=not self._options.num_workers):
            yield Batch(batch_of(data), size, global_size, stream.world_size)


def declared_length(dataset: IterableDataset[object]) -> int | None:
    """Return the number of samples of a stream; None if it is unknown."""
    try:
        return samples_in(dataset)
    except (TypeError, NotImplementedError):
        return None


def open_stream(dataset: IterableDataset[object], *, epoch: int) -> Iterator[object]:
    """Return an iterator over the samples of one epoch."""
    if isinstance(dataset, Epochs):
        dataset.set_epoch(epoch)
    return iter(dataset)


def hide_worker() -> None:
    """Hide the worker from a stream that would shard itself over workers."""
    _utils.worker._worker_info = None
