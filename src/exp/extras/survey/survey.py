"""Survey of the data: sizes, statistics, classes and repeated samples. All samples are read once."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from exp.data.data import Data
from exp.data.entries import ValueNames, value_names
from exp.data.in_memory import samples_in
from exp.data.labels import is_whole
from exp.data.loader import batch_count
from exp.data.randomness import preserve_generators
from exp.data.streams import declared_length
from exp.extras.survey.read_once import entries_of, read_once
from exp.extras.survey.tallies import Numbers, combine, moments, statistics
from exp.shared_types import Stage, dtype_name

CHANNELS = (3, 4)
# Maximum number of columns without names that have separate statistics. If there are more columns, such as the
# amplitudes of a sound, they have common statistics.
MOST_COLUMNS = 256
# Maximum number of different integers in an input that are counted like classes.
FEW = 20


@dataclass(frozen=True, kw_only=True)
class Value:
    """Description of a value in a batch.

    Args:
        dtype: Name of the dtype, or of the Python type.
        shape: Shape of the value. None if the value is neither a tensor nor a list.
    """

    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Classes:
    """Numbers of samples of each class in a value, such as the target.

    Args:
        counts: Number of occurrences of each label that is not negative.
        names: Names of the classes, in the order of their numbers.
        ignored: Number of occurrences of negative labels.
        imbalance: Number of occurrences of the most frequent class, divided by that of the least frequent class.
    """

    counts: dict[int, int]
    names: Sequence[str]
    ignored: int
    imbalance: float

    def name_of(self, label: int) -> str:
        """Return the number of a class as text, such as "3 cat". If the class has no name, return only the number."""
        return f"{label} {self.names[label]}" if 0 <= label < len(self.names) else str(label)


@dataclass(kw_only=True)
class Part:
    """Survey of a split, after the transforms of its samples. The file data.json contains these fields.

    Attributes:
        samples: Number of samples. None for a stream of unknown length.
        batches: Number of batches. None for a stream of unknown length.
        looked_at: Number of samples that were read.
        batch: Description of each value in the first batch, by name.
        numbers: Statistics of each column of a value, by name of the value.
        classes: Numbers of samples of each class, by name of the value.
        lengths: Statistics of the lengths of sequences, by name of the value.
    """

    samples: int | None
    batches: int | None
    looked_at: int = 0
    batch: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)
    classes: dict[str, Classes] = field(default_factory=dict)
    lengths: dict[str, Numbers] = field(default_factory=dict)


@dataclass(kw_only=True)
class Survey:
    """Survey of all splits, with the samples that occur more than once.

    Attributes:
        parts: Survey of each split, by name.
        repeats: Equal samples of two splits. The key is the names of the two splits, which may be equal. The value is a
            list of pairs: the index of a sample in the first split, and the index of an equal sample in the second.
    """

    parts: dict[Stage, Part] = field(default_factory=dict)
    repeats: dict[tuple[Stage, Stage], list[tuple[int, int]]] = field(default_factory=dict)


def survey(data: Data, *, count: int, targets: Sequence[str]) -> Survey:
    """Return the survey of the first `count` samples of each split.

    Args:
        data: The data.
        count: Maximum number of samples to read of each split.
        targets: Names of the values of a batch that are targets.

    Raises:
        ExpError: A sample cannot be read.
    """
    found = Survey()
    # The index of the first sample that has a hash, by split and hash.
    known: dict[Stage, dict[bytes, int]] = {}
    with preserve_generators():
        for stage in data.stages:
            found.parts[stage], hashes = _read(data, stage, count=count, targets=targets)
            own = known.setdefault(stage, {})
            for index, one in enumerate(hashes):
                if one is not None:
                    for within in [within for within, seen in known.items() if one in seen]:
                        found.repeats.setdefault((stage, within), []).append((index, known[within][one]))
                    own.setdefault(one, index)
    return found


def _read(data: Data, stage: Stage, *, count: int, targets: Sequence[str]) -> tuple[Part, Sequence[bytes | None]]:
    """Return the survey of a split, and the hash of each sample that was read. See `survey` for the parameters."""
    dataset = data.part(stage)
    samples = declared_length(dataset) if isinstance(dataset, IterableDataset) else samples_in(dataset)
    names = value_names(dataset)
    try:
        batches = len(data.loader(stage))
    except TypeError:
        batches = None
    part = Part(samples=samples, batches=batches)
    entries: dict[str, _Entry] = {}
    hashes: list[bytes | None] = []
    for read in read_once(data, stage, count=count, targets=sorted(targets)):
        values = entries_of(read.data)
        part.batch = part.batch or {name: _describe(value) for name, value in values.items()}
        values |= data.in_own_units(stage, torch.arange(read.first, read.first + read.count))
        for name, value in values.items():
            entry = entries.setdefault(name, _Entry(name, names, is_target=name in targets))
            entry.add(value, read.sizes.get(name))
        part.looked_at += read.count
        hashes += read.hashes
    if part.samples is None and part.looked_at < count:  # The whole stream was read, so its length is known.
        part.samples, drop_last = part.looked_at, data.drop_last and stage == "train"
        part.batches = batch_count(part.looked_at, data.batch_size, drop_last=drop_last)
    for name, entry in entries.items():
        entry.close(name, part)
    return part, hashes


class _Entry:
    """Statistics of one value of a sample, collected from all batches of a split.

    Args:
        name: Name of the value.
        names: Names of the columns and classes in the split.
        is_target: Whether the value is a target.
    """

    def __init__(self, name: str, names: ValueNames, *, is_target: bool) -> None:
        self._columns, self._class_names = list(names.columns.get(name, ())), names.classes.get(name, ())
        self._is_target, self._is_scalar = is_target, True
        # Moments by the names of the columns. If the number of columns differs between batches, there are several
        # entries, and the value has no statistics.
        self._moments: dict[tuple[str, ...], np.ndarray] = {}
        self._counts: Counter[int] = Counter()
        self._lengths: list[int] = []

    def add(self, value: object, sizes: Sequence[tuple[int, ...]] | None) -> None:
        """Add the value of a batch to the statistics.

        Args:
            value: The value.
            sizes: Shape of the value in each sample before padding. None if the value was not padded.
        """
        if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            self._lengths += [len(one) for one in value]
        if not isinstance(value, Tensor) or not value.dim():
            return
        value = value.to_dense()
        value = value.abs() if value.is_complex() else value
        columns, names = self._by_column(value) if sizes is None else (self._without_padding(value, sizes), ("",))
        if is_whole(value) and (self._is_target or value.dim() < 3):
            self._is_scalar &= value.dim() == 1
            labels, counts = columns.unique(return_counts=True)
            self._counts.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
            columns, names = columns.reshape(-1, 1), ("",)
        found = moments(columns)
        self._moments[names] = combine(self._moments[names], found) if names in self._moments else found

    def close(self, name: str, part: Part) -> None:
        """Write the statistics to the survey of a split.

        Args:
            name: Name of the value.
            part: Survey of the split, which is changed in place.
        """
        if self._lengths:
            (part.lengths[name],) = statistics(moments(torch.tensor(self._lengths)[:, None]), [""])
        counts = dict(sorted(self._counts.items()))
        if counts and (self._is_target or (self._is_scalar and len(counts) <= FEW)):
            own = {label: count for label, count in counts.items() if label >= 0}
            imbalance = max(own.values(), default=1) / min(own.values(), default=1)
            ignored = sum(counts.values()) - sum(own.values())
            part.classes[name] = Classes(counts=own, names=self._class_names, ignored=ignored, imbalance=imbalance)
        elif len(self._moments) == 1:
            ((names, found),) = self._moments.items()
            part.numbers[name] = statistics(found, names)

    def _without_padding(self, value: Tensor, sizes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the numbers of a value without padding, `[K, 1]`. Add the lengths of its sequences to the statistics.

        Args:
            value: The padded value, `[B, ...]`.
            sizes: Shape of the value in each sample before padding.
        """
        self._lengths += [size[0] for size in sizes]
        rows = zip(value, sizes, strict=True)
        return torch.cat([row[tuple(map(slice, size))].reshape(-1) for row, size in rows])[:, None]

    def _by_column(self, value: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """Return the numbers of a value as C columns, `[N, C]`, and the names of the columns.

        Columns are named columns of the data, columns of a matrix, or channels of a picture. If the value has no such
        columns, all its numbers form one column with an empty name.
        """
        width = value.shape[-1]
        if value.dim() >= 2 and len(self._columns) == width:
            return value.reshape(-1, width), tuple(self._columns)
        if value.dim() == 2 and is_whole(value):
            self._lengths += [width] * len(value)
        elif value.dim() == 2 and 1 < width <= MOST_COLUMNS:
            return value, tuple(map(str, range(width)))
        if value.dim() >= 4 and value.shape[1] in CHANNELS:
            channels = value.shape[1]
            return value.movedim(1, -1).reshape(-1, channels), tuple(f"channel {place}" for place in range(channels))
        return value.reshape(-1, 1), ("",)


def _describe(value: object) -> Value:
    if isinstance(value, Tensor):
        return Value(dtype=dtype_name(value.dtype), shape=tuple(value.shape))
    if isinstance(value, list | tuple):
        return Value(dtype=f"list of {type(value[0]).__name__}" if value else "list", shape=(len(value),))
    return Value(dtype=type(value).__name__, shape=None)
