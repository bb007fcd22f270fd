"""Data sets in memory, and their loader. The loader reads several batches with one tensor of indices."""

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
# Statistics of the training split by name: tensors and plain values, which checkpoints store.
Fitted: TypeAlias = Mapping[str, Any]

# The number of bytes that are gathered at once. It suffices to permute a small data set in one call, and is small
# enough for the cache: with 32 MiB, new memory pages made batches of text seven times slower.
CHUNK_BYTES = 4 * 2**20


@runtime_checkable
class Indexed(Protocol):
    """A data set that reads a whole batch in one call."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, indices: Tensor) -> Entries:
        """Return the samples at indices.

        Args:
            indices: The indices of b samples, int64 `[b]`.

        Returns:
            The pair (input, target), or a mapping, of new tensors `[b, ...]`.
        """


@runtime_checkable
class Samples(Protocol):
    """A data set of any library that returns a sample by its index."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


@runtime_checkable
class EpochDependent(Protocol):
    """Data in memory that has different samples in each epoch, such as blocks of a text at another offset."""

    def at_epoch(self, *, seed: int, epoch: int) -> Indexed:
        """Return the training samples of an epoch. Every epoch has the same number of samples."""


@runtime_checkable
class Splittable(Protocol):
    """A data set that divides itself into splits.

    Random samples would be a wrong split, for example for a time series.
    """

    def divide(self, sizes: Mapping[Stage, int | float]) -> Mapping[Stage, AnyDataset]:
        """Return the splits by stage.

        Args:
            sizes: The size of each split: a number of samples, or a fraction of the data set.
        """


@runtime_checkable
class Selectable(Protocol):
    """A data set that can return a subset of its samples as a data set."""

    def select(self, indices: Tensor) -> AnyDataset:
        """Return the samples at indices, int64 `[n]`, as a data set of the same class."""


@runtime_checkable
class Fittable(Protocol):
    """A split that is prepared with statistics of the training split, such as a mean or a vocabulary."""

    def fit(self) -> Fitted:
        """Return the statistics of this split. exp calls it for the training split only."""

    def prepare(self, fitted: Fitted) -> AnyDataset:
        """Return this split with prepared samples, for example standardized ones.

        Args:
            fitted: The statistics of the training split, computed in this run or read from a checkpoint.
        """


@runtime_checkable
class Noted(Protocol):
    """A split with notes for users that are available once the split is prepared."""

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> Sequence[str]:
        """Return the notes, one line each.

        Args:
            fitted: The statistics of the training split.
            stage: The stage of this split.
        """


@runtime_checkable
class Raw(Protocol):
    """A split that can return samples in the units of its file, before standardization."""

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return the samples at indices before they are standardized, by entry name.

        Args:
            indices: The indices, int64 `[b]`.
            fitted: The statistics of the training split.
        """


class Gathered(Dataset[Entries], ABC):
    """Base class of data sets with `gather`. A single sample is read as a batch of one sample."""

    @abstractmethod
    def gather(self, indices: Tensor) -> Entries:
        """Return the samples at indices; see Indexed."""

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.gather(torch.tensor([index])), lambda tensor: tensor[0])


class Tensors(Dataset[Entries]):
    """Tensors of equal length as a data set: a pair (input, target), or a mapping of names to tensors.

    Args:
        entries: The tensors.
        num_classes: The number of classes; None for a regression, or if the number is unknown.
        num_outputs: The number of values that a model returns for a sample. None if the classes or the target determine
            it.

    Attributes:
        indices: The indices of these samples in the data set from which they were selected; None without selection.
        whole_length: The length of the data set from which these samples were selected; None without selection.
        value_names: The names of columns and classes, for display.
    """

    indices: Tensor | None = None
    whole_length: int | None = None
    value_names: ValueNames | None = None

    def __init__(self, *, entries: Entries, num_classes: int | None = None, num_outputs: int | None = None) -> None:
        self.entries = entries
        self.num_classes, self.num_outputs = num_classes, num_outputs
        lengths = {len(tensor) for tensor in tensors_of(entries)}
        if len(lengths) != 1:
            raise ValueError(f"the tensors hold {sorted(lengths)} samples; expected one length")

    def __len__(self) -> int:
        return len(tensors_of(self.entries)[0])

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.entries, lambda tensor: tensor[index])

    def gather(self, indices: Tensor) -> Entries:
        return map_tensors(self.entries, lambda tensor: tensor.index_select(0, indices))

    def select(self, indices: Tensor) -> Self:
        """Return a data set of the same class with copies of the samples at indices."""
        part = copy.copy(self)
        part.entries = self.gather(indices)
        part.indices, part.whole_length = indices, len(self)
        return part


class Selection(Gathered):
    """A subset of a data set in memory that refers to the samples without copying them."""

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
    """Loader that gathers the samples of this rank by index, a chunk of several batches at a time.

    A chunk always starts at the same batch number, also after a resume. Each batch therefore has the same alignment in
    memory as without a resume. Another alignment may change the last bit of a vectorized kernel's result.
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
        # All batches of a chunk have the same size. A short last batch is a chunk with one batch.
        for _, several in itertools.groupby(spans, lambda pair: (pair[0] // chunk, pair[1][1] - pair[1][0])):
            numbered = list(several)
            (number, (begin, end)), (_, (_, stop)) = numbered[0], numbered[-1]
            size, mine = end - begin, self.sampler.share_of(end - begin)
            rows = order.slice(begin, stop).view(-1, size)[:, mine.start : mine.stop]
            set_epochs(self._epochs, epoch, seed=self.batches.seed)
            for data in self._views(dataset, rows.reshape(-1), each=rows.shape[1])[max(0, start - number) :]:
                yield Batch(data, mine.size, size, self.sampler.world_size)

    def _views(self, dataset: Indexed, indices: Tensor, *, each: int) -> list[Entries]:
        """Return the samples at indices as batches of `each` samples. The batches are views of shared tensors."""
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
    """Return the samples at indices. Raise UserCodeError if a user's data set fails."""
    try:
        return dataset.gather(indices)
    except Exception as error:
        many = f", {int(indices[1])} and so on" if len(indices) > 1 else ""
        raise UserCodeError.of(error, what=f"gathering sample {int(indices[0])}{many} of {stage}") from error


def sample_name(dataset: object, index: int, *, stage: Stage) -> str:
    """Return a sample's name for messages: its index in the split, and its index in the whole data set."""
    indices = getattr(dataset, "indices", None) if isinstance(dataset, Tensors | Selection | Subset) else None
    within = "" if indices is None else f" (sample {int(indices[index])} of data.dataset)"
    return f"sample {index} of {stage}{within}"


def as_indexed(dataset: AnyDataset) -> AnyDataset:
    """Return a TensorDataset of torch, or its Subset, as a data set in memory. Return any other data set unchanged."""
    if type(dataset) is TensorDataset:
        return Tensors(entries=dataset.tensors)
    if type(dataset) is Subset:
        source = as_indexed(dataset.dataset)
        if isinstance(source, Indexed):
            return Selection(source=source, indices=torch.as_tensor(dataset.indices, dtype=torch.int64))
    return dataset


def samples_in(dataset: AnyDataset) -> int:
    """Return the length of a data set.

    The function exists because the type of torch's Dataset does not declare `__len__`.

    Raises:
        TypeError: The data set has no length.
        NotImplementedError: The data set has no length.
        UserCodeError: The user's method fails.
    """
    try:
        return len(cast(Sized, dataset))
    except (TypeError, NotImplementedError):
        raise
    except Exception as error:
        raise UserCodeError.of(error, what=f"the length of the data set {type(dataset).__name__}") from error


def tensors_of(entries: Entries) -> tuple[Tensor, ...]:
    """Return the tensors of a sample or a batch, which is a pair or a mapping."""
    return tuple(entries.values()) if isinstance(entries, Mapping) else tuple(entries)
