"""Reads each sample of the data once, and collects sizes, statistics, classes and repeated samples."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from exp.data.data import Data
from exp.data.in_memory import samples_in
from exp.data.labels import is_whole
from exp.data.loader import batch_count
from exp.data.randomness import preserve_generators
from exp.data.streams import declared_length
from exp.data.value_names import ValueNames, value_names
from exp.extras.survey.read_once import entries_of, read_once
from exp.extras.survey.tallies import Numbers, combine, moments, statistics
from exp.shared_types import Stage, dtype_name

CHANNELS = (1, 3, 4)
# The least height and width of a picture that is recognized by its shape alone.
LEAST_SIDE = 8
# Unnamed columns with a row of their own; more columns, such as the samples of a sound, are one entry.
MOST_COLUMNS = 256
# Different whole numbers of an input that count as classes.
FEW = 20
# Pictures of a part that are drawn.
PICTURES = 16


@dataclass(frozen=True, kw_only=True)
class Value:
    """Dtype and shape of a value of a batch; the shape is None for texts."""

    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Classes:
    """The counts of labels.

    Args:
        counts: By label.
        names: Of the classes, in the order of their numbers.
        ignored: Samples with a negative label.
        imbalance: The count of the most frequent class divided by that of the rarest one.
    """

    counts: dict[int, int]
    names: Sequence[str]
    ignored: int
    imbalance: float

    def name_of(self, label: int) -> str:
        """Return the number of a class, and its name."""
        return f"{label} {self.names[label]}" if 0 <= label < len(self.names) else str(label)


@dataclass(kw_only=True)
class Part:
    """The samples of a part after all transforms of single samples. data.json has these fields.

    Args:
        samples, batches: None if a stream does not state its length.
        looked_at: How many samples were read.
        batch: The values of the first batch, by name.
        numbers, classes, lengths: By the name of the value; lengths are those of sequences.
        incomparable: How many samples cannot be compared with others.
    """

    samples: int | None
    batches: int | None
    looked_at: int = 0
    batch: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)
    classes: dict[str, Classes] = field(default_factory=dict)
    lengths: dict[str, Numbers] = field(default_factory=dict)
    incomparable: int = 0


@dataclass(kw_only=True)
class Shown:
    """Samples of a part that are drawn.

    Args:
        indices: The numbers of the samples that `pictures` and `labels` hold.
        pictures, labels: Pictures `[N, C, H, W]` or `[N, H, W]`, and targets `[N, ...]`, by name.
    """

    indices: list[int] = field(default_factory=list)
    pictures: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)


@dataclass(kw_only=True)
class Survey:
    """All parts, and the samples that are in them more than once.

    Args:
        parts, shown: By stage.
        repeats: Samples that are in the data more than once, as pairs of numbers. The key has the part of the first
            number and the part of the second number.
    """

    parts: dict[Stage, Part] = field(default_factory=dict)
    shown: dict[Stage, Shown] = field(default_factory=dict)
    repeats: dict[tuple[Stage, Stage], list[tuple[int, int]]] = field(default_factory=dict)


def survey(data: Data, *, count: int, targets: Sequence[str]) -> Survey:
    """Return what the first `count` samples of each part hold.

    Args:
        data: The data.
        count: The most samples of each part.
        targets: The entries of a batch that are targets.

    Raises:
        ExpError: A sample cannot be read.
    """
    found = Survey()
    # By stage and hash, the number of the first sample.
    known: dict[Stage, dict[bytes, int]] = {}
    with preserve_generators():
        for stage in data.stages:
            found.parts[stage], found.shown[stage], hashes = _read(data, stage, count=count, targets=targets)
            own = known.setdefault(stage, {})
            for index, one in enumerate(hashes):
                if one is not None:
                    for within in [within for within, seen in known.items() if one in seen]:
                        found.repeats.setdefault((stage, within), []).append((index, known[within][one]))
                    own.setdefault(one, index)
    return found


def _read(
    data: Data, stage: Stage, *, count: int, targets: Sequence[str]
) -> tuple[Part, Shown, Sequence[bytes | None]]:
    """Return a part, its pictures, and the hash of each sample."""
    dataset = data.part(stage)
    samples = declared_length(dataset) if isinstance(dataset, IterableDataset) else samples_in(dataset)
    places = torch.arange(PICTURES)
    if not isinstance(dataset, IterableDataset):  # the first samples of class folders are all of one class
        places = places * (min(samples or 0, count) - 1) // (PICTURES - 1)
    wanted, names = set(places.tolist()), value_names(dataset)
    try:
        batches = len(data.loader(stage))
    except TypeError:
        batches = None
    part, shown = Part(samples=samples, batches=batches), Shown()
    entries: dict[str, _Entry] = {}
    hashes: list[bytes | None] = []
    for read in read_once(data, stage, count=count, targets=sorted(targets)):
        values = entries_of(read.data)
        part.batch = part.batch or {name: _describe(value) for name, value in values.items()}
        values |= data.in_own_units(stage, torch.arange(read.first, read.first + read.count))
        kept = [place for place in range(read.count) if read.first + place in wanted]
        for name, value in values.items():
            entry = entries.setdefault(name, _Entry(name, names, is_target=name in targets))
            entry.add(value, read.sizes.get(name), places=kept)
        shown.indices += [read.first + place for place in kept]
        part.looked_at += read.count
        hashes += read.hashes
    part.incomparable = hashes.count(None)
    if part.samples is None and part.looked_at < count:  # the stream has ended
        part.samples, drop_last = part.looked_at, data.drop_last and stage == "train"
        part.batches = batch_count(part.looked_at, data.batch_size, drop_last=drop_last)
    for name, entry in entries.items():
        entry.close(name, part, shown)
    return part, shown, hashes


class _Entry:
    """Adds up one value of the batches of a part."""

    def __init__(self, name: str, names: ValueNames, *, is_target: bool) -> None:
        self._columns, self._class_names = list(names.columns.get(name, ())), names.classes.get(name, ())
        self._is_target, self._is_scalar, self._is_picture = is_target, True, False
        # By the names of columns. An entry with another width in each batch has no statistics.
        self._moments: dict[tuple[str, ...], np.ndarray] = {}
        self._counts: Counter[int] = Counter()
        self._lengths: list[int] = []
        self._kept: list[Tensor] = []

    def add(self, value: object, sizes: Sequence[tuple[int, ...]] | None, *, places: Sequence[int]) -> None:
        """Add a batch.

        Args:
            value: The batch's value.
            sizes: The shape of each sample before padding; None without padding.
            places: Samples of the batch to keep for pictures.
        """
        if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            self._lengths += [len(one) for one in value]
        if not isinstance(value, Tensor) or not value.dim():
            return
        value = value.to_dense()
        value = value.abs() if value.is_complex() else value
        self._is_picture = sizes is None and not self._is_target and _is_picture(value, self._columns)
        if places and (self._is_picture or self._is_target):
            self._kept.append(value[list(places)])
        columns, names = self._by_column(value) if sizes is None else (self._without_padding(value, sizes), ("",))
        if is_whole(value) and not self._is_picture:
            self._is_scalar &= value.dim() == 1
            labels, counts = columns.unique(return_counts=True)
            self._counts.update(dict(zip(labels.tolist(), counts.tolist(), strict=True)))
            columns, names = columns.reshape(-1, 1), ("",)
        found = moments(columns)
        self._moments[names] = combine(self._moments[names], found) if names in self._moments else found

    def close(self, name: str, part: Part, shown: Shown) -> None:
        """Store the sums under a name."""
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
        if len({one.shape[1:] for one in self._kept}) == 1:
            (shown.pictures if self._is_picture else shown.labels)[name] = torch.cat(self._kept)

    def _without_padding(self, value: Tensor, sizes: Sequence[tuple[int, ...]]) -> Tensor:
        """Return the values `[K, 1]`, and collect the lengths of sequences."""
        self._lengths += [size[0] for size in sizes]
        rows = zip(value, sizes, strict=True)
        return torch.cat([row[tuple(map(slice, size))].reshape(-1) for row, size in rows])[:, None]

    def _by_column(self, value: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """Return the values as `[N, C]`, and the names of the columns; one without a name for a whole entry."""
        width = value.shape[-1]
        if value.dim() >= 2 and len(self._columns) == width:
            return value.reshape(-1, width), tuple(self._columns)
        if value.dim() == 2 and is_whole(value):
            self._lengths += [width] * len(value)
        elif value.dim() == 2 and 1 < width <= MOST_COLUMNS:
            return value, tuple(map(str, range(width)))
        if value.dim() >= 4 and value.shape[1] in CHANNELS[1:]:
            channels = value.shape[1]
            return value.movedim(1, -1).reshape(-1, channels), tuple(f"channel {place}" for place in range(channels))
        return value.reshape(-1, 1), ("",)


def _is_picture(value: Tensor, columns: Sequence[str]) -> bool:
    """Return whether a batch has the shape of pictures, `[B, C, H, W]` or `[B, H, W]`."""
    if value.dim() == 4:
        return value.shape[1] in CHANNELS and min(value.shape[2:]) > 1 and value.dtype != torch.bool
    has_numbers = value.dtype == torch.uint8 or value.is_floating_point()
    return value.dim() == 3 and not columns and has_numbers and min(value.shape[1:]) >= LEAST_SIDE


def _describe(value: object) -> Value:
    if isinstance(value, Tensor):
        return Value(dtype=dtype_name(value.dtype), shape=tuple(value.shape))
    if isinstance(value, list | tuple):
        return Value(dtype=f"list of {type(value[0]).__name__}" if value else "list", shape=(len(value),))
    return Value(dtype=type(value).__name__, shape=None)
