"""Data sets in memory, their loader, and the interfaces of data sets.

The loader reads several batches with a single index operation.
"""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from exp.data.entries import BatchForm, ValueNames, value_names
from exp.data.labels import Labels
from exp.data.loader import GlobalBatches, Loader, ShareSampler, find_epoch_aware, set_epochs
from exp.errors import UserCodeError
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Batch, Stage

Entries = tuple[Tensor, ...] | dict[str, Tensor]
AnyDataset: TypeAlias = "Dataset[object] | Indexed"
# Statistics of the training split by name. The values are tensors or Python objects that a checkpoint can store.
Fitted: TypeAlias = Mapping[str, Any]

# The number of bytes of samples that are read with one index operation. 4 MiB suffice to read a small data set in one
# operation. With 32 MiB, batches of text took seven times as long, because memory pages were allocated again and again.
CHUNK_BYTES = 4 * 2**20


@runtime_checkable
class Indexed(Protocol):
    """Interface of data sets that can read a whole batch in one call."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, indices: Tensor) -> Entries:
        """Return a batch of the samples at some indices.

        Args:
            indices: The indices of b samples, int64 `[b]`.

        Returns:
            The pair (input, target), or a mapping from names to values. The values are new tensors `[b, ...]`.
        """


@runtime_checkable
class Samples(Protocol):
    """Interface of data sets that return a sample by its index, such as torch's map-style data sets."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


@runtime_checkable
class EpochDependent(Protocol):
    """Interface of data sets in memory with different samples in each epoch.

    An example is a text that is cut into blocks at a different offset in each epoch.
    """

    def at_epoch(self, *, seed: int, epoch: int) -> Indexed:
        """Return the training samples of an epoch. Every epoch has the same number of samples.

        Args:
            seed: The seed of the run.
            epoch: The epoch, counted from 0.
        """


@runtime_checkable
class Splittable(Protocol):
    """Interface of data sets that divide their samples into splits themselves.

    A time series, for example, must not be divided at random.
    """

    def divide(self, sizes: Mapping[Stage, int | float]) -> Mapping[Stage, AnyDataset]:
        """Return a mapping from the names of the splits to their data sets.

        Args:
            sizes: The size of each split by name: a number of samples, or a fraction of the data set.
        """


@runtime_checkable
class Selectable(Protocol):
    """Interface of data sets that can return a subset of their samples as a data set."""

    def select(self, indices: Tensor) -> AnyDataset:
        """Return a data set of the same class with the samples at some indices.

        Args:
            indices: The indices, int64 `[n]`.
        """


@runtime_checkable
class Fittable(Protocol):
    """Interface of splits that are prepared with statistics of the training split, such as a mean or a vocabulary."""

    def fit(self) -> Fitted:
        """Return the statistics of this split. exp calls this method only for the training split."""

    def prepare(self, fitted: Fitted) -> AnyDataset:
        """Return a data set with the samples of this split after their preparation, such as standardization.

        Args:
            fitted: The statistics of the training split. They were computed in this run, or read from a checkpoint.
        """


@runtime_checkable
class Noted(Protocol):
    """Interface of splits that have notes for users, for example about words that the training split does not have."""

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> Sequence[str]:
        """Return the notes on this split. A note is one line.

        Args:
            fitted: The statistics of the training split.
            stage: The name of this split.
        """


@runtime_checkable
class Raw(Protocol):
    """Interface of splits that can return samples in the units of their file, before standardization."""

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return the samples at some indices before standardization.

        Args:
            indices: The indices of b samples, int64 `[b]`.
            fitted: The statistics of the training split.

        Returns:
            A mapping from the names of the entries to tensors `[b, ...]`.
        """


class Gathered(Dataset[Entries], ABC):
    """Base class of data sets with a method `gather`, which also reads single samples."""

    @abstractmethod
    def gather(self, indices: Tensor) -> Entries:
        """Return a batch of the samples at some indices; see Indexed.gather."""

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.gather(torch.tensor([index])), lambda tensor: tensor[0])


class Tensors(Dataset[Entries]):
    """Data set of tensors in memory, all of the same length.

    Args:
        entries: The pair (input, target), or a mapping from names to tensors. Row i of all tensors is sample i.
        num_classes: The number of classes. Default: None, for a regression, or if the number is unknown.
        num_outputs: The number of values that the model predicts for a sample. Default: None, which means the number of
            classes, or the size of the target.

    Attributes:
        indices: The indices of the samples in the original data set, if `select` returned this data set. None
            otherwise.
        whole_length: The length of the original data set, if `select` returned this data set. None otherwise.
        value_names: The names of columns and classes, for display. None if they have no names.
    """

    indices: Tensor | None = None
    whole_length: int | None = None
    value_names: ValueNames | None = None

    def __init__(self, *, entries: Entries, num_classes: int | None = None, num_outputs: int | None = None) -> None:
        self.entries = entries
        self.num_classes, self.num_outputs = num_classes, num_outputs
        lengths = {len(tensor) for tensor in tensors_of(entries)}
        if len(lengths) != 1:
            raise ValueError(f"the tensors have the lengths {sorted(lengths)}; expected equal lengths")

    def __len__(self) -> int:
        return len(tensors_of(self.entries)[0])

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.entries, lambda tensor: tensor[index])

    def gather(self, indices: Tensor) -> Entries:
        return map_tensors(self.entries, lambda tensor: tensor.index_select(0, indices))

    def select(self, indices: Tensor) -> Self:
        """Return a data set of the same class with copies of the samples at some indices.

        Args:
            indices: The indices, int64 `[n]`.
        """
        part = copy.copy(self)
        part.entries = self.gather(indices)
        part.indices, part.whole_length = indices, len(self)
        return part


class Selection(Gathered):
    """Subset of a data set in memory. The samples are not copied.

    Args:
        source: The data set.
        indices: The indices of the subset's samples in the data set, int64 `[n]`.
    """

    def __init__(self, *, source: Indexed, indices: Tensor) -> None:
        self.source = source
        self.indices = indices
        self.num_classes: int | None = getattr(source, "num_classes", None)
        self.num_outputs: int | None = getattr(source, "num_outputs", None)

    @property
    def value_names(self) -> ValueNames:
        return value_names(self.source)

    def __len__(self) -> int:
        return len(self.indices)

    def gather(self, indices: Tensor) -> Entries:
        return self.source.gather(self.indices.index_select(0, indices))


class IndexedLoader(Loader):
    """Loader of data in memory. It reads a chunk of several batches with one index operation.

    Chunks start at fixed batch numbers. A resumed run therefore reads the same chunks as an uninterrupted run, so that
    each batch has the same alignment in memory. A different alignment may change the last bit of the result of a
    vectorized kernel.

    Args:
        stage: The name of the split.
        dataset: The split.
        sampler: The sampler, which yields the samples of this rank.
        pin_memory: Whether batches are copied to pinned memory.
        form: The conversion of batches for the network.
        labels: The valid labels. Default: None, which does not check labels.
    """

    sampler: ShareSampler

    def __init__(
        self,
        *,
        stage: Stage,
        dataset: Indexed,
        sampler: ShareSampler,
        pin_memory: bool,
        form: BatchForm,
        labels: Labels | None = None,
    ) -> None:
        super().__init__(stage=stage)
        self._form, self._labels = form, labels
        self._epochs = find_epoch_aware(dataset)
        self.dataset, self.batches, self.sampler, self.pin_memory = dataset, sampler.batches, sampler, pin_memory
        first = tensors_in(gather_samples(dataset, torch.zeros(1, dtype=torch.int64), stage=stage))
        sample_bytes = sum(tensor.nbytes for tensor in first)
        mine = sampler.share_of(self.batches.batch_size)
        self._chunk = max(1, CHUNK_BYTES // max(1, sample_bytes * (mine.stop - mine.start)))

    def _length(self) -> int:
        return len(self.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset, order = self.dataset, self.batches.order(epoch)
        if self.stage == "train" and isinstance(dataset, EpochDependent):
            dataset = dataset.at_epoch(seed=self.batches.seed, epoch=epoch)
        chunk = self._chunk if isinstance(self.batches, GlobalBatches) else 1
        first = start - start % chunk
        spans = enumerate(self.batches.spans(epoch, first), first)
        # All batches of a chunk have the same size. If the last batch of the epoch is shorter, it forms its own chunk.
        for _, several in itertools.groupby(spans, lambda pair: (pair[0] // chunk, pair[1][1] - pair[1][0])):
            numbered = list(several)
            (number, (begin, end)), (_, (_, stop)) = numbered[0], numbered[-1]
            size, mine = end - begin, self.sampler.share_of(end - begin)
            rows = order.slice(begin, stop).view(-1, size)[:, mine.start : mine.stop]
            set_epochs(self._epochs, epoch, seed=self.batches.seed)
            for data in self._views(dataset, rows.reshape(-1), each=rows.shape[1])[max(0, start - number) :]:
                yield Batch(data, mine.size, size, self.sampler.world_size)

    def _views(self, dataset: Indexed, indices: Tensor, *, each: int) -> list[Entries]:
        """Return the samples at some indices as consecutive batches. The batches are views of the same tensors.

        Args:
            dataset: The data set.
            indices: The indices of the samples in all batches, int64 `[n]`.
            each: The number of samples in a batch.
        """
        entries = cast(Entries, self._form(gather_samples(dataset, indices, stage=self.stage)))
        if self._labels is not None:
            self._labels.refuse(entries, lambda place: sample_name(dataset, int(indices[place]), stage=self.stage))
        if self.pin_memory:
            entries = map_tensors(entries, Tensor.pin_memory)
        if isinstance(entries, Mapping):
            columns = [tensor.split(each) for tensor in entries.values()]
            return [dict(zip(entries, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(tensor.split(each) for tensor in entries), strict=True))


def gather_samples(dataset: Indexed, indices: Tensor, *, stage: Stage) -> Entries:
    """Return a batch of the samples at some indices.

    Args:
        dataset: The split.
        indices: The indices, int64 `[b]`.
        stage: The name of the split, for the error.

    Raises:
        UserCodeError: The data set raises an error.
    """
    try:
        return dataset.gather(indices)
    except Exception as error:
        many = f", {int(indices[1])} and so on" if len(indices) > 1 else ""
        raise UserCodeError.of(error, what=f"gathering sample {int(indices[0])}{many} of {stage}") from error


def sample_name(dataset: object, index: int, *, stage: Stage) -> str:
    """Return the name of a sample for messages, such as "sample 3 of val (sample 17 of data.dataset)".

    Args:
        dataset: The split.
        index: The index of the sample in the split.
        stage: The name of the split.
    """
    indices = getattr(dataset, "indices", None) if isinstance(dataset, Tensors | Selection | Subset) else None
    within = "" if indices is None else f" (sample {int(indices[index])} of data.dataset)"
    return f"sample {index} of {stage}{within}"


def as_indexed(dataset: AnyDataset) -> AnyDataset:
    """Return a data set with a method `gather` for torch's TensorDataset, or for a Subset of such a data set.

    Return any other data set unchanged.
    """
    if type(dataset) is TensorDataset:
        return Tensors(entries=dataset.tensors)
    if type(dataset) is Subset:
        source = as_indexed(dataset.dataset)
        if isinstance(source, Indexed):
            return Selection(source=source, indices=torch.as_tensor(dataset.indices, dtype=torch.int64))
    return dataset


def samples_in(dataset: AnyDataset) -> int:
    """Return the number of samples in a data set.

    The function exists because the type of torch's Dataset does not declare `__len__`.

    Raises:
        TypeError: The data set has no length.
        NotImplementedError: The data set has no length.
        UserCodeError: The method `__len__` of a user's data set raises another error.
    """
    try:
        return len(cast(Sized, dataset))
    except (TypeError, NotImplementedError):
        raise
    except Exception as error:
        raise UserCodeError.of(error, what=f"the length of the data set {type(dataset).__name__}") from error


def tensors_of(entries: Entries) -> tuple[Tensor, ...]:
    """Return the tensors of a sample or batch without their names."""
    return tuple(entries.values()) if isinstance(entries, Mapping) else tuple(entries)
