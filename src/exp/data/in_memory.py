"""Data sets in memory, and their loader, which gathers many batches by one tensor of indices."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping, Sequence, Sized
from typing import Any, Protocol, Self, TypeAlias, cast, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

from exp.data.entries import BatchForm
from exp.data.labels import Labels
from exp.data.loader import GlobalBatches, Loader, ShareSampler, tell_epoch, wanting_epochs
from exp.data.value_names import ValueNames, value_names
from exp.errors import UserCodeError
from exp.nested import map_tensors, tensors_in
from exp.shared_types import Batch, Stage

Entries = tuple[Tensor, ...] | dict[str, Tensor]
AnyDataset: TypeAlias = "Dataset[object] | Indexed"
# By name, tensors and plain values: what the training part tells of itself. Checkpoints keep it.
Fitted: TypeAlias = Mapping[str, Any]

# Bytes gathered at once. Large enough that a small data set is permuted once an epoch, small enough to stay in cache:
# with 32 MiB, fresh pages made batches of text seven times slower.
CHUNK_BYTES = 4 * 2**20


@runtime_checkable
class Indexed(Protocol):
    """A data set whose batches are gathered in one call."""

    def __len__(self) -> int:
        """Samples in it."""

    def gather(self, indices: Tensor) -> Entries:
        """The samples at indices, int64 `[b]`: (input, target) of new tensors `[b, ...]`, or a mapping of them."""


@runtime_checkable
class Samples(Protocol):
    """A data set of any library that gives samples by their numbers."""

    def __len__(self) -> int: ...

    def __getitem__(self, index: int) -> object: ...


@runtime_checkable
class EpochDependent(Protocol):
    """Data in memory whose samples differ from epoch to epoch, such as a text cut at another offset."""

    def at_epoch(self, *, seed: int, epoch: int) -> Indexed:
        """The same number of samples, as they are in this epoch of training."""


@runtime_checkable
class Splittable(Protocol):
    """A data set that makes its own parts, where a random choice of samples would not do."""

    def divide(self, sizes: Mapping[Stage, int | float]) -> Mapping[Stage, AnyDataset]:
        """Parts by stage. sizes: whole numbers count samples, others are fractions of the whole."""


@runtime_checkable
class Selectable(Protocol):
    """A data set of which some samples are one of its kind."""

    def select(self, indices: Tensor) -> AnyDataset:
        """These samples, int64 `[n]`."""


@runtime_checkable
class Fittable(Protocol):
    """A part that takes something from the training part, such as a mean or a vocabulary."""

    def fit(self) -> Fitted:
        """What the training part tells all parts, itself too."""

    def prepare(self, fitted: Fitted) -> AnyDataset:
        """This part as a model sees it. fitted: what the training part told, of this run or of an earlier one."""


@runtime_checkable
class Noted(Protocol):
    """Part with notes for users, which it knows after it is prepared."""

    def notes_in(self, fitted: Fitted, *, stage: Stage) -> Sequence[str]:
        """Return the notes, one line each. fitted: as of Fittable."""


@runtime_checkable
class Raw(Protocol):
    """Part that can be shown in the units of its file."""

    def in_own_units(self, indices: Tensor, fitted: Fitted) -> dict[str, Tensor]:
        """Return the samples at indices before standardising, by entry. fitted: as of Fittable."""


class Tensors(Dataset[Entries]):
    """Tensors of one length, a pair (input, target) or a mapping of names.

    num_classes: of a classification; None for a regression, and where it is not known.
    num_outputs: how many numbers a model gives for a sample; None where the classes or the target say it.
    indices: an attribute, of the samples in the data set of which this is a part; None where it is whole.
    whole_length: an attribute, the samples of that data set.
    value_names: an attribute, what columns and classes are called, for people.
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
        """Copies these samples into a data set of their own, of the same kind."""
        part = copy.copy(self)
        part.entries = self.gather(indices)
        part.indices, part.whole_length = indices, len(self)
        return part


class Selection(Dataset[Entries]):
    """Some samples of a data set in memory, without a copy of them."""

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

    def __getitem__(self, index: int) -> Entries:
        return map_tensors(self.gather(torch.tensor([index])), lambda tensor: tensor[0])

    def gather(self, indices: Tensor) -> Entries:
        return self.source.gather(self.indices.index_select(0, indices))


class IndexedLoader(Loader):
    """Gathers this rank's samples in the epoch's order, a chunk of batches at a time.

    A chunk's edges depend on the batch's number alone, so that a resumed run reads from the same addresses within it:
    vectorised kernels may differ in the last bit with the alignment of their operands.
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
        self._epochs, self._epoch = wanting_epochs(dataset), 0
        self.dataset, self.batches, self.sampler, self.pin_memory = dataset, sampler.batches, sampler, pin_memory
        first = tensors_in(gathered(dataset, torch.zeros(1, dtype=torch.int64), stage=stage))
        sample_bytes = sum(tensor.nbytes for tensor in first)
        mine = sampler.share_of(self.batches.batch_size)
        self._chunk = max(1, CHUNK_BYTES // max(1, sample_bytes * (mine.stop - mine.start)))

    def _length(self) -> int:
        return len(self.batches)

    def _batches(self, epoch: int, start: int) -> Iterator[Batch]:
        dataset, self._epoch = self.dataset, epoch
        if self.stage == "train" and isinstance(dataset, EpochDependent):
            dataset = dataset.at_epoch(seed=self.batches.seed, epoch=epoch)
        if not isinstance(self.batches, GlobalBatches):
            yield from self._unequal(dataset, epoch, start)
            return
        order = self.batches.order(epoch)
        full = self.batches.length // self.batches.batch_size
        world_size, size = self.sampler.world_size, self.batches.batch_size
        mine = self.sampler.share_of(size)
        for first in range(start - start % self._chunk, full, self._chunk):
            indices = order.slice(first * size, min(first + self._chunk, full) * size)
            rows = indices.view(-1, size)[:, mine.start : mine.stop]
            skipped = max(0, start - first)
            for data in self._views(dataset, rows.reshape(-1), each=rows.shape[1])[skipped:]:
                yield Batch(data, mine.size, size, world_size)
        if start <= full < len(self.batches):
            size = self.batches.size(full)
            mine = self.sampler.share_of(size)
            behind = full * self.batches.batch_size
            indices = order.slice(behind + mine.start, behind + mine.stop)
            for data in self._views(dataset, indices, each=len(indices)):
                yield Batch(data, mine.size, size, world_size)

    def _unequal(self, dataset: Indexed, epoch: int, start: int) -> Iterator[Batch]:
        """Batches of several sizes, each gathered by itself."""
        order = self.batches.order(epoch)
        for first, last in self.batches.spans(epoch, start):
            mine = self.sampler.share_of(last - first)
            indices = order.slice(first + mine.start, first + mine.stop)
            for data in self._views(dataset, indices, each=len(indices)):
                yield Batch(data, mine.size, last - first, self.sampler.world_size)

    def _views(self, dataset: Indexed, indices: Tensor, *, each: int) -> list[Entries]:
        """The samples at indices as batches of `each`, which share one storage."""
        tell_epoch(self._epochs, self._epoch, seed=self.batches.seed)
        entries = cast(Entries, self._form(gathered(dataset, indices, stage=self.stage)))
        if self._labels is not None:
            self._labels.refuse(entries, lambda place: sample_name(dataset, int(indices[place]), stage=self.stage))
        if self.pin_memory:
            entries = map_tensors(entries, Tensor.pin_memory)
        if isinstance(entries, Mapping):
            columns = [tensor.split(each) for tensor in entries.values()]
            return [dict(zip(entries, row, strict=True)) for row in zip(*columns, strict=True)]
        return list(zip(*(tensor.split(each) for tensor in entries), strict=True))


def gathered(dataset: Indexed, indices: Tensor, *, stage: Stage) -> Entries:
    """The samples at indices.

    Raises: UserCodeError where a data set of the user's own cannot give them.
    """
    try:
        return dataset.gather(indices)
    except Exception as error:
        many = f", {int(indices[1])} and so on" if len(indices) > 1 else ""
        raise UserCodeError.of(error, what=f"gathering sample {int(indices[0])}{many} of {stage}") from error


def sample_name(dataset: object, index: int, *, stage: Stage) -> str:
    """A sample in words, with its number in the data set of which this is a part."""
    indices = getattr(dataset, "indices", None) if isinstance(dataset, Tensors | Selection | Subset) else None
    within = "" if indices is None else f" (sample {int(indices[index])} of data.dataset)"
    return f"sample {index} of {stage}{within}"


def as_indexed(dataset: AnyDataset) -> AnyDataset:
    """torch's TensorDataset, or a Subset of one, as ours; any other data set as it is."""
    if type(dataset) is TensorDataset:
        return Tensors(entries=dataset.tensors)
    if type(dataset) is Subset:
        source = as_indexed(dataset.dataset)
        if isinstance(source, Indexed):
            return Selection(source=source, indices=torch.as_tensor(dataset.indices, dtype=torch.int64))
    return dataset


def samples_in(dataset: AnyDataset) -> int:
    """The length of a data set, which torch's Dataset does not declare.

    Raises: TypeError, NotImplementedError where it has none; UserCodeError.
    """
    try:
        return len(cast(Sized, dataset))
    except (TypeError, NotImplementedError):
        raise
    except Exception as error:
        raise UserCodeError.of(error, what=f"the length of the data set {type(dataset).__name__}") from error


def tensors_of(entries: Entries) -> tuple[Tensor, ...]:
    return tuple(entries.values()) if isinstance(entries, Mapping) else tuple(entries)
