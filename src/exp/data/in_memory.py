"""Data sets in memory, and their loader, which reads several batches with one tensor of indices."""

from __future__ import annotations

import copy
import itertools
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from exp.data.entries import BatchForm
from exp.data.labels import Labels
from exp.data.loader import GlobalBatches, Loader, ShareSampler, find_epoch_aware, set_epochs
from exp.data.value_names import ValueNames, value_names
from exp.errors import UserCodeError
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Batch, Stage

Entries = tuple[Tensor, ...] | dict[str, Tensor]
AnyDataset: TypeAlias = "Dataset[object] | Indexed"
# The statistics of the training split by name, tensors and plain values. Checkpoints store them.
Fitted: TypeAlias = Mapping[str, Any]

# Bytes gathered at once. Large enough to permute a small data set in one call, small enough for the cache: with 32 MiB,
# new memory pages made batches of text seven times slower.
CHUNK_BYTES = 4 * 2**20


@runtime_checkable
class Indexed(Protocol):
    """A data set that reads a whole batch in one call."""

    def __len__(self) -> int:
        """Return the number of samples."""

    def gather(self, indices: Tensor) -> Entries:
        """Return the samples at indices, int64 `[b]`: (input, target) of new tensors `[b, ...]`, or a mapping."""


@runtime_checkable
class Samples(Protocol):
    """A data set of any library that returns samples by number."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


@runtime_checkable
class EpochDependent(Protocol):
    """Data in memory whose samples depend on the epoch, such as blocks of a text at another offset."""

    def at_epoch(self, *, seed: int, epoch: int) -> Indexed:
        """Return the samples of an epoch of training. Their number is the same in each epoch."""


@runtime_checkable
class Splittable(Protocol):
    """A data set that defines its splits, if a random choice of samples would be wrong."""

    def divide(self, sizes: Mapping[Stage, int | float]) -> Mapping[Stage, AnyDataset]:
        """Return the splits by stage. sizes: Numbers of samples, or fractions of the whole."""


@runtime_checkable
class Selectable(Protocol):
    """A data set from which samples can be selected."""

    def select(self, indices: Tensor) -> AnyDataset:
        """Return the samples at indices, int64 `[n]`, as a data set of the same class."""


@runtime_checkable
class Fittable(Protocol):
    """A split that is prepared with statistics of the training split, such as a mean or a vocabulary."""

    def fit(self) -> Fitted:
        """Return the statistics, for the training split."""

    def prepare(self, fitted: Fitted) -> AnyDataset:
        """Return this split as a model receives it. fitted: The statistics of this run or of an earlier run."""


@runtime_checkable
class Noted(Protocol):
    """A split with notes for users, which are known after it is prepared."""

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> Sequence[str]:
        """Return the notes, one line each. fitted: As in Fittable."""


@runtime_checkable
class Raw(Protocol):
    """A split that can be shown in the units of its file."""

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return the samples at indices before they are standardized, by entry. fitted: As in Fittable."""


class Gathered(Dataset[Entries], ABC):
    """A data set that reads a sample as a batch of one."""

    @abstractmethod
    def gather(self, indices: Tensor) -> Entries:
        """Return the samples at indices; see Indexed."""

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.gather(torch.tensor([index])), lambda tensor: tensor[0])


class Tensors(Dataset[Entries]):
    """Tensors of one length, a pair (input, target) or a mapping of names.

    Args:
        entries: The tensors.
        num_classes: The number of classes; None for a regression, or if it is unknown.
        num_outputs: The numbers that a model returns for a sample; None if the classes or the target determine it.

    Attributes:
        indices: The numbers of the samples in the whole data set; None for the whole data set.
        whole_length: The number of samples in the whole data set.
        value_names: The names of columns and classes, for people.
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
        """Return a copy of these samples as a data set of the same class."""
        part = copy.copy(self)
        part.entries = self.gather(indices)
        part.indices, part.whole_length = indices, len(self)
        return part


class Selection(Gathered):
    """Some samples of a data set in memory, without a copy."""

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
    """Gathers the samples of this rank in the order of the epoch, a chunk of batches at a time.

    The edges of a chunk depend only on the number of the batch, so that a resumed run reads from the same addresses
    within it. The last bit of a vectorized kernel may depend on the alignment of its operands.
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
        # The batches of a chunk have one size; a short last batch is a chunk of one.
        for _, several in itertools.groupby(spans, lambda pair: (pair[0] // chunk, pair[1][1] - pair[1][0])):
            numbered = list(several)
            (number, (begin, end)), (_, (_, stop)) = numbered[0], numbered[-1]
            size, mine = end - begin, self.sampler.share_of(end - begin)
            rows = order.slice(begin, stop).view(-1, size)[:, mine.start : mine.stop]
            set_epochs(self._epochs, epoch, seed=self.batches.seed)
            for data in self._views(dataset, rows.reshape(-1), each=rows.shape[1])[max(0, start - number) :]:
                yield Batch(data, mine.size, size, self.sampler.world_size)

    def _views(self, dataset: Indexed, indices: Tensor, *, each: int) -> list[Entries]:
        """Return the samples at indices as batches of `each`, which share one storage."""
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
    """Return the name of a sample for messages, with its number in the whole data set."""
    indices = getattr(dataset, "indices", None) if isinstance(dataset, Tensors | Selection | Subset) else None
    within = "" if indices is None else f" (sample {int(indices[index])} of data.dataset)"
    return f"sample {index} of {stage}{within}"


def as_indexed(dataset: AnyDataset) -> AnyDataset:
    """Return torch's TensorDataset, or a Subset of one, as a data set in memory; any other data set unchanged."""
    if type(dataset) is TensorDataset:
        return Tensors(entries=dataset.tensors)
    if type(dataset) is Subset:
        source = as_indexed(dataset.dataset)
        if isinstance(source, Indexed):
            return Selection(source=source, indices=torch.as_tensor(dataset.indices, dtype=torch.int64))
    return dataset


def samples_in(dataset: AnyDataset) -> int:
    """Return the length of a data set, which torch's Dataset does not declare.

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
    """Return the tensors of a pair or a mapping."""
    return tuple(entries.values()) if isinstance(entries, Mapping) else tuple(entries)
