"""Division of a data set into train, val and test splits."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import TypeVar

import torch
from torch import Tensor
from torch.utils.data import IterableDataset, Subset

from exp.data.data_errors import data_error, share_errors
from exp.data.in_memory import (
    AnyDataset,
    Fittable,
    Fitted,
    Indexed,
    Selectable,
    Selection,
    Splittable,
    Tensors,
    as_indexed,
    samples_in,
)
from exp.data.randomness import seed_for
from exp.errors import raise_errors
from exp.shared_types import STAGES, Stage

DEFAULT_SIZES: Mapping[str, float] = {"train": 0.7, "val": 0.15, "test": 0.15}
# The names of folders, and values in a column, that mean each split.
PART_NAMES: Mapping[Stage, tuple[str, ...]] = {
    "train": ("train", "training"),
    "val": ("val", "validation", "valid", "dev", "eval"),
    "test": ("test", "testing"),
}
Name = TypeVar("Name", bound=str)
Choose = Callable[[AnyDataset, Mapping[Stage, int | float]], Mapping[Stage, Tensor]]


def make_splits(
    dataset: AnyDataset | None,
    given: Mapping[Stage, AnyDataset | None],
    *,
    sizes: Mapping[str, float] | None,
    seed: int,
    choose: Choose | None = None,
) -> dict[Stage, AnyDataset]:
    """Return a mapping from the names of the splits to their data sets.

    Args:
        dataset: The value of data.dataset, which is divided into splits. None if every split is in `given`.
        given: The values of data.train, data.val and data.test.
        sizes: The size of each split of `dataset`. None means the default sizes.
        seed: The seed that divides `dataset`.
        choose: A function that returns the indices of the samples in each split of `dataset`. Default: None, which
            chooses random samples.

    Raises:
        ConfigError: There is no data set, a split has two data sets, or `choose` is set without `dataset`.
    """
    parts = {stage: as_indexed(part) for stage, part in given.items() if part is not None}
    if dataset is None and not parts:
        expected = "a data set, or a data set for each split in data.train, data.val and data.test"
        raise data_error("dataset", got="null", expected=expected)
    if dataset is None and choose is not None:
        got, expected = "rules, although each split has a data set", "null, because rules divide only data.dataset"
        raise data_error("split", got=got, expected=expected)
    if dataset is not None:
        # The default sizes contain only the splits that are not in `given`.
        sizes = sizes or {stage: size for stage, size in DEFAULT_SIZES.items() if stage not in parts}
        for name, part in divide(as_indexed(dataset), sizes, seed=seed, choose=choose).items():
            if name in parts:
                got = f"a data set, although data.parts.{name} makes the same split of data.dataset"
                raise data_error(name, got=got, expected="only one of the two", fix=f"Set data.parts.{name}=0")
            parts[name] = part
    return {stage: parts[stage] for stage in STAGES if stage in parts}


def fit(parts: Mapping[Stage, AnyDataset], *, earlier: Callable[[], Fitted | None]) -> Fitted:
    """Return the statistics of the training split. Return an empty mapping if no split needs statistics.

    Args:
        parts: The splits by name.
        earlier: A function that returns the statistics from the checkpoint of a resumed run. If it returns None, the
            statistics are computed.

    Raises:
        ConfigError: A split needs statistics, and there is no training split.
    """
    fitted = [stage for stage, part in parts.items() if isinstance(part, Fittable)]
    if not fitted:
        return {}
    if (found := earlier()) is not None:
        return found
    if "train" not in parts:
        expected = f"a training split, because its statistics scale or encode the {fitted[0]} split"
        raise data_error("train", got="no training split", expected=expected)
    train = parts["train"]
    return train.fit() if isinstance(train, Fittable) else {}


def prepare(parts: Mapping[Stage, AnyDataset], fitted: Fitted) -> dict[Stage, AnyDataset]:
    """Return the splits after their preparation, such as standardization, by name.

    Args:
        parts: The splits before their preparation, by name.
        fitted: The statistics of the training split.
    """
    ready = {stage: part.prepare(fitted) if isinstance(part, Fittable) else part for stage, part in parts.items()}
    for stage, part in parts.items():
        made = ready[stage]
        if isinstance(part, Tensors) and isinstance(made, Tensors) and len(made) == len(part):
            made.indices, made.whole_length = part.indices, part.whole_length
    return ready


def read_sizes(sizes: Mapping[str, int | float]) -> dict[Stage, int | float]:
    """Return the sizes of the splits in the order train, val, test. Splits of size 0 are left out.

    Args:
        sizes: The value of data.parts.

    Raises:
        ConfigError: A name is unknown, a size is negative, or fractions add up to more than 1.
    """
    raise_errors(share_errors(sizes))
    # A float above 1 is a number of samples, such as 1000.0 for data.parts.val=1e3 on the command line.
    wanted = {name: sizes[name] for name in STAGES if sizes.get(name)}
    return {name: int(size) if size > 1 else size for name, size in wanted.items()}


def contiguous_splits(
    sizes: Mapping[Name, int | float], length: int, *, block_size: int | None = None, unit: str = "samples"
) -> dict[Name, slice]:
    """Return the slice of each split in a sequence, such as a text or a time series. The splits are consecutive.

    Args:
        sizes: The size of each split: a fraction of the sequence, or a whole number of elements. If `block_size` is
            set, whole numbers are numbers of blocks.
        length: The number of elements in the sequence.
        block_size: The number of elements in a block of a text. A split then has one element more than its blocks,
            which is the target of the last position. Default: None, for a sequence without blocks.
        unit: The name of the elements in the plural, for messages. Default: "samples".

    Raises:
        ConfigError: A split is empty, or the splits have more elements in total than the sequence.
    """
    if block_size is not None:
        sizes = {name: size * block_size + 1 if isinstance(size, int) else size for name, size in sizes.items()}
    found, stop = dict[Name, slice](), 0
    for name, count in lengths(sizes, length, unit=unit).items():
        found[name] = slice(stop, stop + count)
        stop += count
    return found


def lengths(sizes: Mapping[Name, int | float], length: int, *, unit: str = "samples") -> dict[Name, int]:
    """Return the number of samples in each split.

    If the fractions add up to 1, the numbers add up to `length`, because cumulative sums of the fractions are rounded.

    Args:
        sizes: The size of each split: a fraction of the data set, or a whole number of samples.
        length: The number of samples in the data set.
        unit: The name of the samples in the plural, for messages. Default: "samples".

    Raises:
        ConfigError: A split is empty, or the splits have more samples in total than the data set.
    """
    counts: dict[Name, int] = {}
    along, reached = 0.0, 0
    for name, size in sizes.items():
        if isinstance(size, int):
            counts[name] = size
        else:
            along += size
            stop = round(along * length)
            counts[name], reached = stop - reached, stop
    if sum(counts.values()) > length:
        got = f"splits of {sum(counts.values())} {unit} in total"
        raise data_error("parts", got=got, expected=f"at most {length}, the size of the data set")
    for name, count in counts.items():
        if not count:
            got = f"{sizes[name]} of {length} {unit}, which is an empty split"
            fix = f"Enlarge the split, or leave it out with data.parts.{name}=0"
            raise data_error(f"parts.{name}", got=got, expected=f"at least one of the {unit}", fix=fix)
    return counts


def divide(
    dataset: AnyDataset, sizes: Mapping[str, int | float], *, seed: int, choose: Choose | None = None
) -> dict[Stage, AnyDataset]:
    """Return the disjoint splits of a data set by name.

    Args:
        dataset: The data set.
        sizes: The size of each split: a number of samples, or a fraction.
        seed: The seed that chooses random samples.
        choose: A function that returns the indices of the samples in each split. Default: None, which chooses random
            samples.

    Raises:
        ConfigError: The data set is an IterableDataset, a split is empty, or the splits have more samples in total than
            the data set. Also raised if `choose` is set for a data set that defines its splits.
    """
    wanted = read_sizes(sizes)
    own: Mapping[Stage, AnyDataset] = getattr(dataset, "own_parts", {})
    if choose is not None and (own or isinstance(dataset, Splittable | IterableDataset)):
        got = f"rules, although {type(dataset).__name__} is a stream or defines its own splits"
        raise data_error("split", got=got, expected="a data set that has an index and does not define its own splits")
    if isinstance(dataset, Splittable):
        return dict(dataset.divide(wanted))
    if own and list(wanted.values()) != [1.0]:  # A single split of size 1.0 is the whole data set.
        return _own_parts(own, wanted, seed=seed)
    if isinstance(dataset, IterableDataset):
        expected = "a data set with an index, which can be divided"
        fix = "Set data.train, data.val and data.test to a stream each"
        raise data_error("dataset", got=f"{type(dataset).__name__}, a stream of samples", expected=expected, fix=fix)
    draw = partial(random_splits, length=samples_in(dataset), seed=seed)
    chosen: Mapping[Stage, Tensor] = draw(wanted) if choose is None else choose(dataset, wanted)
    return {stage: _select(dataset, indices) for stage, indices in chosen.items()}


def _own_parts(
    own: Mapping[Stage, AnyDataset], wanted: Mapping[Stage, int | float], *, seed: int
) -> dict[Stage, AnyDataset]:
    """Return the splits of a data set that defines its splits, by name.

    Samples of a split that the data set does not define are chosen at random from its training split.

    Args:
        own: The splits that the data set defines.
        wanted: The size of each split.
        seed: The seed that chooses random samples.

    Raises:
        ConfigError: The config sets the size of a split that the data set defines, or a split is empty.
    """
    missing = {stage: size for stage, size in wanted.items() if stage not in own}
    known = {stage: size for stage, size in wanted.items() if stage not in missing and stage != "train"}
    for stage in (stage for stage, size in known.items() if size != DEFAULT_SIZES[stage]):
        got, fix = f"{known[stage]}, although the data set has a {stage} split", f"Set data.parts.{stage}=null"
        raise data_error(f"parts.{stage}", got=got, expected="null", fix=fix)
    whole = samples_in(own["train"])
    taken = lengths(missing, whole)
    chosen = random_splits({"train": whole - sum(taken.values()), **taken}, length=whole, seed=seed)
    return {**own, **{stage: _select(own["train"], indices) for stage, indices in chosen.items()}}


def random_splits(sizes: Mapping[Name, int | float], *, length: int, seed: int) -> dict[Name, Tensor]:
    """Return the sorted indices of random samples for each split, int64. The splits are disjoint.

    Args:
        sizes: The size of each split: a fraction, or a whole number of samples.
        length: The number of samples in the data set.
        seed: The seed that chooses the samples.
    """
    counts = lengths(sizes, length)
    generator = torch.Generator().manual_seed(seed_for(seed, "parts"))
    chosen = torch.randperm(length, generator=generator)[: sum(counts.values())]
    pieces = chosen.split(list(counts.values()))
    found = {}
    for name, piece in zip(counts, pieces, strict=True):
        # The indices are sorted with a mask, because torch.sort takes a second for ten million indices.
        marks = torch.zeros(length, dtype=torch.bool)
        marks[piece] = True
        found[name] = marks.nonzero().flatten()
    return found


def _select(dataset: AnyDataset, indices: Tensor) -> AnyDataset:
    if isinstance(dataset, Tensors | Fittable):
        if isinstance(dataset, Selectable):
            return dataset.select(indices)
        name = type(dataset).__name__
        got = f"{name} with fit() and prepare(), but neither select(indices) nor divide(sizes)"
        expected = "select(indices) or divide(sizes), which return the training split that is fitted"
        raise data_error("dataset", got=got, expected=expected)
    if isinstance(dataset, Indexed):
        return Selection(source=dataset, indices=indices)
    return Subset(dataset, indices.tolist())
