"""Batches of an IterableDataset: every rank reads the whole stream and keeps its share of each global batch.

So every rank has the same number of batches whatever the stream's length, which need not be known, and each sample
counts once. Reading costs more than it would in shards, but what is costly, the transforms and the collation, is done
only for a rank's own samples. With workers, each one reads the stream, too, and makes every num_workers-th batch.

A stream of records, such as exp's own of files, is passed over alike, which is cheap: whoever needs a sample makes it
of its record, by reading and parsing it.

Private name of torch (seen in 2.11 to 2.13, and tested): torch.utils.data._utils.worker._worker_info, which
get_worker_info reads.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from itertools import islice
from typing import Any, Protocol, runtime_checkable

from torch.utils.data import IterableDataset, _utils, get_worker_info

from exp.data.data_errors import SampleError
from exp.data.in_memory import samples_in
from exp.data.joint_transforms import Transform, apply_transforms
from exp.data.loader import Epochs, Loader, batch_count, share
from exp.data.randomness import reseed_sample, sample_generator
from exp.data.workers import (
    Assembly,
    FetchOptions,
    Sample,
    isolate_generators,
    received,
    told,
)
from exp.errors import ConfigError, ExpError, RunError
from exp.shared_types import Batch, Stage

END = object()


@runtime_checkable
class Recorded(Protocol):
    """A stream of records that are cheap to pass over, and of which a sample is made where it is needed.

    Nothing in either is random but the order, which is a function of (seed, epoch).
    """

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[Any]:
        """The records of one epoch, in their order or another."""

    def sample(self, record: Any) -> object:
        """The sample of one of them."""


@dataclass(kw_only=True, eq=False)
class ShareOfStream(IterableDataset[tuple[object, int, int]]):
    """Yields (collated data, size, global size) for each batch that this worker makes.

    shuffle: whether records come in another order in each epoch. epoch, start: the position of the first batch.
    fingerprint: of each sample, before transforms; None takes none.
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
    fingerprint: Callable[[object], object] | None = None

    def __iter__(self) -> Iterator[tuple[object, int, int]]:
        worker = get_worker_info()
        number, workers = (0, 1) if worker is None else (worker.id, worker.num_workers)
        hide_worker()
        samples = enumerate(self._shuffled(self._seeded()))
        skipped = islice(samples, self.start * self.batch_size)
        if error := next((sample for _, sample in skipped if isinstance(sample, ExpError)), None):
            yield error, 0, 1
            return
        batch = 0
        while group := list(islice(samples, self.batch_size)):
            if errors := [sample for _, sample in group if isinstance(sample, ExpError)]:
                yield errors[0], 0, 1  # by every worker and rank, whoever would have had the sample
                return
            if len(group) < self.batch_size and self.drop_last:
                return
            if batch % workers == number:
                mine = share(size=len(group), rank=self.rank, world_size=self.world_size)
                made = [self._transformed(*pair) for pair in group[mine.start : mine.stop]]
                yield self.assembly(made), mine.size, len(group)
            batch += 1

    def _seeded(self) -> Iterator[Sample | ExpError]:
        """The stream, with the generators set to (seed, part, epoch, index) before each one is read.

        A sample that cannot be read is the last one, given as the error that says so.
        """
        index, wanted = 0, declared_length(self.dataset)
        is_random = not isinstance(self.dataset, Recorded)
        try:
            reseed_sample(seed=self.seed, epoch=self.epoch, index=0, stage=self.stage)
            iterator = self._opened()
            while True:
                if is_random:
                    reseed_sample(seed=self.seed, epoch=self.epoch, index=index, stage=self.stage)
                sample = next(iterator, END)
                if sample is END:
                    break
                yield Sample(index=index, data=sample)
                index += 1
        except GeneratorExit:
            raise  # whoever reads the stream wants no more of it
        except (ConfigError, SampleError) as error:
            yield error
            return
        except BaseException as error:
            yield told(error, what=f"reading {self.assembly.named(index)}")
            return
        if wanted is not None and index < wanted:
            yield RunError(
                f"the stream of {self.stage} ended before sample {index}, and says by its length that it has {wanted}; "
                "expected as many. A StopIteration within it, as of a next() without a default, ends it, too"
            )

    def _opened(self) -> Iterator[object]:
        if isinstance(self.dataset, Recorded):
            return self.dataset.records(seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return open_stream(self.dataset, epoch=self.epoch)

    def _shuffled(self, samples: Iterator[Sample | ExpError]) -> Iterator[Sample | ExpError]:
        """The samples in an order that is random within a buffer, a function of (seed, epoch)."""
        size = self.shuffle_buffer
        if size < 2:
            yield from samples
            return
        buffer = list(islice(samples, size))
        # One draw a sample from one generator: every rank and worker walks the whole stream, so all agree.
        generator = sample_generator(seed=self.seed, epoch=self.epoch, index=-1)
        for sample in samples:
            place = int(generator.integers(size))
            buffer[place], sample = sample, buffer[place]
            yield sample
        for place in generator.permutation(len(buffer)):
            yield buffer[place]

    def _transformed(self, position: int, sample: Sample | ExpError) -> Sample | ExpError:
        """position: in the order of the epoch, which transforms draw by."""
        if isinstance(sample, ExpError):
            return sample
        reseed_sample(seed=self.seed, epoch=self.epoch, index=position, stage=self.stage)
        try:
            data = self.dataset.sample(sample.data) if isinstance(self.dataset, Recorded) else sample.data
            # First: a transform may change it in place.
            taken = None if self.fingerprint is None else self.fingerprint(data)
            return replace(sample, data=apply_transforms(data, self.transforms), fingerprint=taken)
        except (ConfigError, SampleError) as error:
            return error
        except BaseException as error:
            return told(error, what=f"transforming {self.assembly.named(sample.index)}")


class StreamLoader(Loader):
    """This rank's shares of the global batches of a stream."""

    def __init__(self, *, stage: Stage, stream: ShareOfStream, options: FetchOptions) -> None:
        super().__init__(stage=stage)
        self.stream = stream
        # A stream is copied into its workers once an epoch, with that epoch in it: they cannot persist.
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
            yield Batch(received(data), size, global_size, stream.world_size)


def declared_length(dataset: IterableDataset[object]) -> int | None:
    """The samples of a stream; None where it does not know."""
    try:
        return samples_in(dataset)
    except (TypeError, NotImplementedError):
        return None


def open_stream(dataset: IterableDataset[object], *, epoch: int) -> Iterator[object]:
    """The samples of one epoch."""
    if isinstance(dataset, Epochs):
        dataset.set_epoch(epoch)
    return iter(dataset)


def hide_worker() -> None:
    """Lets a stream that shards itself over workers believe that it is read by one process."""
    _utils.worker._worker_info = None
