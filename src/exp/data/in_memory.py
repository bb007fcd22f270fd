"""Data that fits in memory: read by a tensor of indices, never sample by sample."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor
from torch.utils.data import Dataset, Subset, TensorDataset

Entries = tuple[Tensor, ...] | dict[str, Tensor]


@runtime_checkable
class Indexed(Protocol):
    """What a data set needs so that its batches are gathered in one call."""

    def __len__(self) -> int:
        """Samples in it."""

    def gather(self, indices: Tensor) -> Entries:
        """The samples at indices, int64 `[b]`: (input, target) of new tensors `[b, ...]`, or a mapping of them."""


@runtime_checkable
class Renewed(Protocol):
    """Data in memory whose samples differ from epoch to epoch, such as a text cut at another offset."""

    def at_epoch(self, *, seed: int, epoch: int) -> Indexed:
        """The same number of samples, as they are in this epoch of training."""


@runtime_checkable
class Divided(Protocol):
    """A data set that makes its own parts, where a random choice of samples would not do."""

    def divide(self, sizes: Mapping[str, int | float]) -> Mapping[str, Dataset | Indexed]:
        """Parts by stage. sizes: whole numbers count samples, others are fractions of the whole."""


@runtime_checkable
class Prepared(Protocol):
    """A part that takes something from the training part, such as a mean or a vocabulary."""

    def prepare(self, train: Any) -> Indexed:
        """This part as a model sees it. train: the training part before it is prepared, which may be this one."""


class Tensors(Dataset):
    """Tensors of one length, a pair (input, target) or a mapping of names.

    num_classes: of a classification; None for a regression, and where it is not known.
    """

    def __init__(self, *, entries: Entries, num_classes: int | None = None) -> None:
        self.entries = entries
        self.num_classes = num_classes
        lengths = {len(tensor) for tensor in tensors_of(entries)}
        if len(lengths) != 1:
            raise ValueError(f"the tensors hold {sorted(lengths)} samples; expected one length")
        self._length = lengths.pop()

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: int) -> Entries:
        return mapped(self.entries, lambda tensor: tensor[index])

    def gather(self, indices: Tensor) -> Entries:
        return mapped(self.entries, lambda tensor: tensor.index_select(0, indices))

    def select(self, indices: Tensor) -> Tensors:
        """A data set of these samples alone, copied."""
        return Tensors(entries=self.gather(indices), num_classes=self.num_classes)


class Selection(Dataset):
    """Some samples of a data set in memory, without a copy of them."""

    def __init__(self, *, source: Indexed, indices: Tensor) -> None:
        self.source = source
        self.indices = indices
        self.num_classes: int | None = getattr(source, "num_classes", None)

    def __len__(self) -> int:
        return len(self.indices)

    def __getitem__(self, index: int) -> Entries:
        return mapped(self.gather(torch.tensor([index])), lambda tensor: tensor[0])

    def gather(self, indices: Tensor) -> Entries:
        return self.source.gather(self.indices.index_select(0, indices))


def as_indexed(dataset: Any) -> Any:
    """torch's TensorDataset, or a Subset of one, as ours; any other data set as it is."""
    if type(dataset) is TensorDataset:
        return Tensors(entries=dataset.tensors)
    if type(dataset) is Subset:
        source = as_indexed(dataset.dataset)
        if isinstance(source, Indexed):
            return Selection(source=source, indices=torch.as_tensor(dataset.indices, dtype=torch.int64))
    return dataset


def tensors_of(entries: Entries) -> tuple[Tensor, ...]:
    return tuple(entries.values()) if isinstance(entries, Mapping) else tuple(entries)


def mapped(entries: Entries, function: Callable[[Tensor], Tensor]) -> Entries:
    """The function's result for each tensor, as the same pair or mapping."""
    if isinstance(entries, Mapping):
        return {name: function(tensor) for name, tensor in entries.items()}
    return tuple(function(tensor) for tensor in entries)
