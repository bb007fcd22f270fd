"""Look at what a network is about to see: sizes, figures by column, classes, missing values, repeats, speed."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset

from exp.data.data import Data
from exp.data.fingerprints import Comparison, Repeats
from exp.data.in_memory import IndexedLoader, samples_in
from exp.data.labels import is_whole
from exp.data.loader import batch_count
from exp.data.randomness import preserve_generators
from exp.data.read_once import Read, entries_of
from exp.data.streams import declared_length
from exp.data.tables import Table
from exp.data.value_names import ValueNames, value_names
from exp.extras.survey.tallies import Counts, Lengths, Moments, Numbers, merged
from exp.nested import mapped
from exp.shared_types import Batch, Stage, dtype_name

CHANNELS = (1, 3, 4)
# Pictures are at least so high and so wide, where nothing but their shape tells.
LEAST_SIDE = 8
# Columns without names that are looked at each by itself; of more, such as samples of a sound, all together.
MOST_COLUMNS = 256
# Numbers that are told apart as classes where nothing says that they are.
FEW = 20
# Samples of a part that are kept to be drawn: pictures, and rows of a table for histograms.
PICTURES, ROWS, COLUMNS = 16, 10_000, 64
# Rows from which on a column may be called telling, the share of the changes by chance that is few, and a correlation.
LEAST_ROWS, FEW_CHANGES, NEAR_ONE = 20, 0.05, 0.995


@dataclass(frozen=True, kw_only=True)
class Value:
    """A value of a batch. shape: with the batch's first axis; None where there is none, as of texts."""

    dtype: str
    shape: tuple[int, ...] | None


@dataclass(frozen=True, kw_only=True)
class Classes:
    """How often each label is there. names: of the classes. ignored: labels that are no class."""

    counts: dict[int, int]
    names: Sequence[str]
    ignored: int

    @property
    def total(self) -> int:
        return sum(self.counts.values())

    @property
    def imbalance(self) -> float:
        """How many times the rarest class that is there the most frequent one is."""
        return max(self.counts.values(), default=1) / max(1, min(self.counts.values(), default=1))

    def named(self, label: int) -> str:
        """A class in words."""
        return f"{label} {self.names[label]}" if 0 <= label < len(self.names) else str(label)


@dataclass(frozen=True, kw_only=True)
class Whole:
    """Whole numbers that are no classes, such as tokens.

    unknown: how many are the one that stands for what is unknown; None where none does. vocabulary: how many different
    ones there may be; None where nobody knows.
    """

    count: int
    distinct: int
    vocabulary: int | None
    low: int
    high: int
    unknown: int | None


@dataclass(kw_only=True)
class PartSurvey:
    """What a part holds. Figures are of inputs after all transforms, and of targets before those of whole batches.

    samples, batches: None where a stream does not know. seen: samples that were looked at.
    batch: the first one's values by name, before transforms of whole batches. changed: those that they change or add.
    numbers, classes, whole, lengths: by name.
    pictures: of samples spread over the part, `[N, C, H, W]` or `[N, H, W]`, by name. shown: the samples' numbers.
    labels: their targets, `[N, ...]`, by name.
    telling: columns of a table that number its rows, or tell its target by their order, in words. wordless: rows
    without a word, by column. dates: columns of days since 1970.
    rows: of what is no picture, `[K, C]` in float32, spread over the part, of the first COLUMNS columns, by name.
    """

    stage: Stage
    samples: int | None
    batches: int | None
    seen: int = 0
    batch: dict[str, Value] = field(default_factory=dict)
    changed: dict[str, Value] = field(default_factory=dict)
    numbers: dict[str, list[Numbers]] = field(default_factory=dict)
    classes: dict[str, Classes] = field(default_factory=dict)
    whole: dict[str, Whole] = field(default_factory=dict)
    lengths: dict[str, Lengths] = field(default_factory=dict)
    pictures: dict[str, Tensor] = field(default_factory=dict)
    rows: dict[str, Tensor] = field(default_factory=dict)
    labels: dict[str, Tensor] = field(default_factory=dict)
    shown: list[int] = field(default_factory=list)
    telling: list[str] = field(default_factory=list)
    wordless: dict[str, int] = field(default_factory=dict)
    dates: Sequence[str] = ()


@dataclass(frozen=True, kw_only=True)
class Speed:
    """Of a loader with nothing beside it. start_seconds: until its first batch. The rest is of those behind it."""

    stage: Stage
    workers: int
    start_seconds: float
    batches: int
    samples: int
    seconds: float

    @property
    def samples_per_second(self) -> float | None:
        return self.samples / self.seconds if self.samples and self.seconds else None

    @property
    def batch_ms(self) -> float | None:
        return 1000 * self.seconds / self.batches if self.batches else None


@dataclass(frozen=True, kw_only=True)
class Survey:
    """Of all parts. leaks: samples of a part that are in an earlier one. incomparable: samples without a hash."""

    parts: dict[Stage, PartSurvey]
    leaks: list[Repeats]
    duplicates: list[Repeats]
    incomparable: dict[Stage, int]
    rounded: Sequence[str]
    speed: Speed | None


def survey(
    data: Data, *, count: int, targets: Sequence[str], seconds: float, tell: Callable[[str], None] = lambda _: None
) -> Survey:
    """Look at the first `count` samples of each part.

    targets: the entries of a batch that are targets. seconds: for how long the loader's speed is measured. tell: hears
    what is being done, for a person who waits.
    Raises: what reading a sample raises in training.
    """
    comparison = Comparison()
    with preserve_generators():
        parts = {
            stage: _Part(data, stage, targets=targets, count=count).survey(comparison, tell) for stage in data.stages
        }
        tell("the loader's speed")
        speed = measured(data, next(iter(data.stages)), seconds=seconds)
    return Survey(
        parts=parts,
        leaks=comparison.leaks,
        duplicates=comparison.duplicates,
        incomparable=comparison.incomparable,
        rounded=data.rounded,
        speed=speed,
    )


def measured(data: Data, stage: Stage, *, seconds: float) -> Speed:
    """How fast a part's batches come, in as many epochs as fit into the time; one batch at least."""
    loader = data.loader(stage)
    began = time.perf_counter()
    iterator = iter(loader)
    next(iterator, None)
    first = last = time.perf_counter()
    batches = samples = 0
    while last - first < seconds:
        batch = next(iterator, None)
        if batch is None:
            iterator, last = iter(loader), time.perf_counter()
            if (batch := next(iterator, None)) is None:
                break
        batches, samples, last = batches + 1, samples + batch.global_size, time.perf_counter()
    return Speed(
        stage=stage,
        workers=0 if isinstance(loader, IndexedLoader) else data.num_workers,
        start_seconds=first - began,
        batches=batches,
        samples=samples,
        seconds=last - first,
    )


class _Part:
    """Adds up one part, batch by batch."""

    def __init__(self, data: Data, stage: Stage, *, targets: Sequence[str], count: int) -> None:
        self._data, self._stage, self._targets = data, stage, frozenset(targets)
        part = data.part(stage)
        self._is_stream = isinstance(part, IterableDataset)
        samples = declared_length(part) if isinstance(part, IterableDataset) else samples_in(part)
        self._count = count
        self._known = count if samples is None else min(samples, count)
        # Of classes in folders the first ones would be of one class.
        self._wanted = frozenset(range(PICTURES) if self._is_stream else _spread(PICTURES, self._known).tolist())
        self._names = value_names(part)
        self._entries: dict[str, _Entry] = {}
        self._found = PartSurvey(stage=stage, samples=samples, batches=self._batches())

    def survey(self, comparison: Comparison, tell: Callable[[str], None]) -> PartSurvey:
        found = self._found
        for number, read in enumerate(
            self._data.read_once(self._stage, count=self._count, targets=sorted(self._targets))
        ):
            comparison.add(self._stage, read.first, read.prints)
            self._add(read, number)
            found.seen += read.count
            tell(f"{self._stage}: {found.seen:,}" + (f" of {self._known:,}" if found.samples else "") + " samples")
        if found.samples is None and found.seen < self._count:
            found.samples = found.seen  # the stream has ended
            found.batches = batch_count(
                found.seen, self._data.batch_size, drop_last=self._data.drop_last and self._stage == "train"
            )
        for name, entry in self._entries.items():
            entry.close(name, found)
        table = self._data.raw.get(self._stage)
        if isinstance(table, Table):
            columns = {name: values[: found.seen] for name, values in table.each_column()}
            found.dates = tuple(table.dates)
            found.wordless = {name: int((columns[name] < 0).sum()) for name in table.words}
            if self._stage == self._data.stages[0]:
                found.telling += telling_columns(table, columns, count=found.seen)
        return found

    def _batches(self) -> int | None:
        try:
            return len(self._data.loader(self._stage))
        except TypeError:
            return None

    def _add(self, read: Read, number: int) -> None:
        before = after = entries_of(read.data)
        if self._data.transforms_batches(self._stage):
            # A copy: a transform may change what it is given in place.
            given = Batch(mapped(read.data, Tensor.clone), read.count, read.count, 1)
            made = self._data.transform_batch(given, stage=self._stage, rank=0, epoch=0, number=number)
            after = entries_of(made.data)
        if not number:
            self._found.batch = {name: _described(value) for name, value in before.items()}
            changed = {name: _described(value) for name, value in after.items()}
            self._found.changed = {
                name: value for name, value in changed.items() if value != self._found.batch.get(name)
            }
        # Labels are those of the samples: mixed ones are shares. Of a table a person knows the numbers in its file.
        entries = {**after, **{name: value for name, value in before.items() if name in self._targets}}
        entries |= self._data.in_own_units(self._stage, torch.arange(read.first, read.first + read.count))
        quota = ROWS if self._found.samples is None else -(-ROWS * read.count // max(self._known, 1))
        for name, value in entries.items():
            if name not in self._entries:
                self._entries[name] = _Entry(name, self._names, is_target=name in self._targets)
            sizes = read.sizes.get(name)
            self._entries[name].add(value, sizes, places=self._places(read), quota=quota)
        self._found.shown += [read.first + place for place in self._places(read)]

    def _places(self, read: Read) -> list[int]:
        """Which samples of a batch are kept as pictures."""
        return [place for place in range(read.count) if read.first + place in self._wanted]


class _Entry:
    """Adds up one value of the batches of a part."""

    def __init__(self, name: str, names: ValueNames, *, is_target: bool) -> None:
        self._columns = list(names.columns.get(name, ()))
        self._class_names, self._unknown = names.classes.get(name, ()), names.unknown.get(name)
        self._is_target = is_target
        # By width: a collate function of the user's own may pad each batch to another.
        self._moments: dict[tuple[str, ...], Moments] = {}
        self._counts: Counts | None = None
        self._is_scalar = True
        self._lengths = Lengths()
        self._kept: list[Tensor] = []
        self._rows: list[Tensor] = []
        self._room = 2 * ROWS  # each batch's share of ROWS is rounded up
        self._is_picture = False

    def add(self, value: object, sizes: Sequence[tuple[int, ...]] | None, *, places: Sequence[int], quota: int) -> None:
        """sizes: of each sample, where they differ. places: of samples that are kept. quota: rows that are kept."""
        if isinstance(value, list | tuple) and all(isinstance(one, str) for one in value):
            self._lengths.add([len(one) for one in value])
        if not isinstance(value, Tensor) or not value.dim():
            return
        if value.layout != torch.strided:
            value = value.to_dense()
        own = self._own(value, sizes)
        self._is_picture = sizes is None and not self._is_target and _is_picture(value, self._columns)
        if places and (self._is_picture or self._is_target):
            self._kept.append(value[list(places)])
        if is_whole(value) and not self._is_picture:
            self._is_scalar &= value.dim() == 1
            self._counts = self._counts or Counts()
            self._counts.add(own)
            return
        columns, names = self._by_column(own) if own is value else (own, ("",))
        self._moments.setdefault(names, Moments(len(names))).add(columns)
        if not self._is_picture and self._room > 0:
            kept = columns[_spread(min(quota, self._room, len(columns)), len(columns)), :COLUMNS]
            self._rows.append((kept.abs() if kept.is_complex() else kept).float())
            self._room -= len(kept)

    def close(self, name: str, found: PartSurvey) -> None:
        """Writes what there is to say into the part's survey."""
        if self._lengths.count:
            found.lengths[name] = self._lengths
        if self._counts is not None:
            counts = dict(sorted(self._counts.of.items()))
            if self._is_target or (self._is_scalar and len(counts) <= FEW):
                classes = {label: count for label, count in counts.items() if label >= 0}
                ignored = sum(counts.values()) - sum(classes.values())
                found.classes[name] = Classes(counts=classes, names=self._class_names, ignored=ignored)
            elif counts:
                found.whole[name] = Whole(
                    count=sum(counts.values()),
                    distinct=len(counts),
                    vocabulary=len(self._class_names) or None,
                    low=min(counts),
                    high=max(counts),
                    unknown=None if self._unknown is None else counts.get(self._unknown, 0),
                )
        if len(self._moments) > 1:
            found.numbers[name] = merged(self._moments.values()).numbers([""])
        elif self._moments:
            ((names, moments),) = self._moments.items()
            found.numbers[name] = moments.numbers(names)
            if self._rows:
                found.rows[name] = torch.cat(self._rows)
        if self._kept and len({one.shape[1:] for one in self._kept}) == 1:
            (found.pictures if self._is_picture else found.labels)[name] = torch.cat(self._kept)

    def _own(self, value: Tensor, sizes: Sequence[tuple[int, ...]] | None) -> Tensor:
        """The values without padding, `[K, 1]` where there is any; and notes the lengths of sequences."""
        if sizes is not None and len(sizes) == len(value) and value.dim() == len(sizes[0]) + 1:
            self._lengths.add([size[0] for size in sizes])
            rows = zip(value, sizes, strict=True)
            return torch.cat([row[tuple(map(slice, size))].reshape(-1) for row, size in rows])[:, None]
        if value.dim() == 2 and is_whole(value) and not self._columns:
            self._lengths.add([value.shape[1]] * len(value))
        return value

    def _by_column(self, value: Tensor) -> tuple[Tensor, tuple[str, ...]]:
        """`[N, C]`, and the names of the columns; one without a name where all belong together."""
        width = value.shape[-1]
        if value.dim() >= 2 and len(self._columns) == width:
            return value.reshape(-1, width), tuple(self._columns)
        if value.dim() == 2 and 1 < width <= MOST_COLUMNS:
            return value, tuple(map(str, range(width)))
        if value.dim() >= 4 and 1 < value.shape[1] <= max(CHANNELS) and value.shape[1] in CHANNELS:
            channels = value.shape[1]
            return value.movedim(1, -1).reshape(-1, channels), tuple(f"channel {place}" for place in range(channels))
        return value.reshape(-1, 1), ("",)


def telling_columns(table: Table, columns: Mapping[str, np.ndarray], *, count: int) -> Iterator[str]:
    """Yield what a person should know of the columns of the first `count` rows before a network trusts them."""
    for name, values in columns.items() if count >= LEAST_ROWS else ():
        cure = f"leave it out with data.dataset.ignore=[{name}] unless it is known before the answer is"
        known = values[~np.isnan(values)]
        only_grows = abs(np.sign(np.diff(values)).sum()) == count - 1
        if only_grows or ((known == np.round(known)).all() and len(np.unique(values)) == count):
            yield f"unique: {name} is different in each of {count:,} rows, as the number of a row is; {cure}"
        for target, answers in table.each_target():
            if tells(values, answers[:count], is_class=target in table.classes):
                yield f"order: {name} sorts the rows by {target} nearly alone; {cure}"


def tells(values: np.ndarray, answers: np.ndarray, *, is_class: bool) -> bool:
    """Return whether answers follow from the order of values: few changes of the class, or a rank correlation near 1.

    Equal values are in a random order.
    """
    tied = np.random.default_rng(0).random(len(values))
    order = np.lexsort((tied, values))
    if is_class:
        shares = np.bincount(answers) / len(answers)
        by_chance = (1 - np.square(shares).sum()) * (len(answers) - 1)
        changes = np.count_nonzero(np.diff(answers[order]))
        least = np.count_nonzero(shares) - 1
        return bool(by_chance >= 4 * least > 0 and changes <= max(least, FEW_CHANGES * by_chance))
    ranks = np.argsort(np.lexsort((tied[::-1], answers)))[order]
    return bool(np.abs(np.corrcoef(ranks, np.arange(len(ranks)))[0, 1]) > NEAR_ONE)


def _spread(count: int, length: int) -> Tensor:
    """So many places, from the first to the last of a length, int64."""
    return torch.arange(count) * (length - 1) // max(count - 1, 1)


def _is_picture(value: Tensor, columns: Sequence[str]) -> bool:
    """Whether a batch is one of pictures, `[B, C, H, W]` or `[B, H, W]`."""
    if value.dtype == torch.bool or value.is_complex() or (is_whole(value) and value.dim() == 3):
        return value.dtype == torch.uint8 and value.dim() == 3 and min(value.shape[1:]) >= LEAST_SIDE
    if value.dim() == 4:
        return value.shape[1] in CHANNELS and min(value.shape[2:]) > 1
    return value.dim() == 3 and not columns and min(value.shape[1:]) >= LEAST_SIDE


def _described(value: object) -> Value:
    if isinstance(value, Tensor):
        return Value(dtype=dtype_name(value.dtype), shape=tuple(value.shape))
    if isinstance(value, list | tuple):
        return Value(dtype=f"list of {type(value[0]).__name__}" if value else "list", shape=(len(value),))
    return Value(dtype=type(value).__name__, shape=None)
