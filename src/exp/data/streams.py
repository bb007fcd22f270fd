"""Batches of an IterableDataset.

Every rank reads the whole stream, and uses only its own samples of each global batch. All ranks therefore have the same
number of batches, even if the length of the stream is unknown. Every sample is used by exactly one rank.

Every worker process also reads the whole stream, and makes every num_workers-th batch. Transforms and collation take
most of the time. They are applied only to the samples that a worker needs. A Recorded stream parses a record only if
its sample is needed, so that skipping a record is cheap.

This module uses a private name of torch: torch.utils.data._utils.worker._worker_info, which get_worker_info reads. The
name exists in torch 2.11 to 2.13, and a test checks it.
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
    """Interface of streams of records that are cheap to skip.

    The order of the records depends only on (seed, epoch). Reading the records does not use the random generators.
    """

    def records(self, *, seed: int, epoch: int, shuffle: bool) -> Iterator[object]:
        """Yield the records of an epoch.

        Args:
            seed: The seed of the run.
            epoch: The epoch, counted from 0.
            shuffle: Whether to shuffle the records.
        """

    def sample(self, record: object) -> object:
        """Return the sample that is made from a record."""


@dataclass(kw_only=True, eq=False)
class ShareOfStream(IterableDataset[tuple[object, int, int]]):
    """Stream of the batches that one worker of one rank makes in an epoch.

    An item is the tuple (collated data, size, global size). The size is the number of samples of this rank. The global
    size is the number of samples of all ranks. If a sample cannot be read, the error is yielded instead of the data.

    Args:
        dataset: The stream of samples.
        transforms: The transforms of samples.
        assembly: The function that makes a batch from a list of samples.
        batch_size: The number of samples in a global batch.
        drop_last: Whether to drop the last batch if it has fewer samples.
        shuffle_buffer: The number of samples in the shuffle buffer. The values 0 and 1 mean no shuffling.
        seed: The seed of the run.
        stage: The name of the split.
        rank: The rank of this process.
        world_size: The number of ranks.
        shuffle: Whether to shuffle the records of a Recorded stream in each epoch. Default: False.
        epoch: The epoch to read, counted from 0. Default: 0.
        start: The number of the first global batch to yield, counted from 0. Default: 0.
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
        # get_worker_info must return None in the user's stream, because streams that detect a worker usually read only
        # some of their samples.
        _utils.worker._worker_info = None
        samples = enumerate(self._shuffle(self._read()))
        skipped = islice(samples, self.start * self.batch_size)
        if error := next((sample for _, sample in skipped if isinstance(sample, ExpError)), None):
            yield error, 0, 1
            return
        batch = 0
        while group := list(islice(samples, self.batch_size)):
            if errors := [sample for _, sample in group if isinstance(sample, ExpError)]:
                yield errors[0], 0, 1  # All workers of all ranks yield the error, so that all ranks stop.
                return
            if len(group) < self.batch_size and self.drop_last:
                return
            if batch % workers == number:
                mine = share(size=len(group), rank=self.rank, world_size=self.world_size)
                made = [self._transform(*pair) for pair in group[mine.start : mine.stop]]
                yield self.assembly(made), mine.size, len(group)
            batch += 1

    def _read(self) -> Iterator[Sample | ExpError]:
        """Yield the samples of the stream.

        The generators are seeded from (seed, split, epoch, index) before each sample is read. If a sample cannot be
        read, the error is yielded as the last item.
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
            raise  # The consumer of this generator has closed it.
        except (ConfigError, SampleError) as error:
            yield error
            return
        except BaseException as error:
            yield user_error(error, what=f"reading {self.assembly.name_of(index)}")
            return
        if wanted is not None and index < wanted:
            yield RunError(
                f"the stream of {self.stage} ended before sample {index}; expected {wanted} samples, the length of the "
                "stream. Correct the length, or look for a StopIteration in the stream's code, which ends the stream"
            )

    def _open(self) -> Iterator[object]:
        if isinstance(self.dataset, Recorded):
            return self.dataset.records(seed=self.seed, epoch=self.epoch, shuffle=self.shuffle)
        return open_stream(self.dataset, epoch=self.epoch)

    def _shuffle(self, samples: Iterator[Sample | ExpError]) -> Iterator[Sample | ExpError]:
        """Yield the samples of a stream in a random order, with a buffer of `shuffle_buffer` samples.

        The order depends only on (seed, epoch).
        """
        size = self.shuffle_buffer
        if size < 2:
            yield from samples
            return
        buffer = list(islice(samples, size))
        # All ranks and workers compute the same order, because they read the whole stream and draw one number per
        # sample.
        generator = sample_generator(seed=self.seed, epoch=self.epoch, index=-1)
        for sample in samples:
            place = int(generator.integers(size))
            buffer[place], sample = sample, buffer[place]
            yield sample
        for place in generator.permutation(len(buffer)):
            yield buffer[place]

    def _transform(self, position: int, sample: Sample | ExpError) -> Sample | ExpError:
        """Return a sample after its transforms. Return an error if the sample is an error, or if a transform fails.

        Args:
            position: The position of the sample in the shuffled stream, from which the generators are seeded.
            sample: The sample.
        """
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
    """Loader of the batches of an IterableDataset on one rank.

    Args:
        stage: The name of the split.
        stream: The stream of batches.
        options: The options of torch's DataLoader.
    """

    def __init__(self, *, stage: Stage, stream: ShareOfStream, options: FetchOptions) -> None:
        super().__init__(stage=stage)
        self.stream = stream
        # Workers cannot persist over epochs, because they must receive a new ShareOfStream object for each epoch.
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
    """Return the number of samples in a stream. Return None if the stream does not define its length."""
    try:
        return samples_in(dataset)
    except (TypeError, NotImplementedError):
        return None


def open_stream(dataset: IterableDataset[object], *, epoch: int) -> Iterator[object]:
    """Return an iterator over the samples of an epoch.

    The method `set_epoch` of the stream is called first, if the stream has this method.
    """
    if isinstance(dataset, Epochs):
        dataset.set_epoch(epoch)
    return iter(dataset)
