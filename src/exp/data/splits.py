"""Split a data set into its train, val and test parts."""

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
# What parts are called in folders and in data sets of others.
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
    """The data set of each stage: a part of `dataset`, or the one that is given for it.

    choose: Returns the samples of each split of a data set; None draws them by the seed.

    Raises: ConfigError where there is no data at all, or a stage has two data sets.
    """
    parts = {stage: as_indexed(part) for stage, part in given.items() if part is not None}
    if dataset is None and not parts:
        raise data_error(
            "dataset", got="null", expected="a data set here, or one each in data.train, data.val, data.test"
        )
    if dataset is None and choose is not None:
        got, expected = "rules, and a data set for each part", "data.dataset, which the rules divide"
        raise data_error("split", got=got, expected=expected)
    if dataset is not None:
        # Without sizes, a data set is divided among the stages that have none of their own.
        sizes = sizes or {stage: size for stage, size in DEFAULT_SIZES.items() if stage not in parts}
        for name, part in divide(as_indexed(dataset), sizes, seed=seed, choose=choose).items():
            if name in parts:
                raise data_error(
                    name,
                    got=f"a data set of its own, and a part of data.dataset in data.parts.{name}",
                    expected="one of the two",
                    fix=f"Leave it out of the parts with data.parts.{name}=0",
                )
            parts[name] = part
    return {stage: parts[stage] for stage in STAGES if stage in parts}


def fit(parts: Mapping[Stage, AnyDataset], *, earlier: Callable[[], Fitted | None]) -> Fitted:
    """What the training part tells the others; nothing where no part asks.

    earlier: what it told in the run that this one goes on from; None where there is none, and this one is asked.
    """
    asking = [stage for stage, part in parts.items() if isinstance(part, Fittable)]
    if not asking:
        return {}
    if (told := earlier()) is not None:
        return told
    if "train" not in parts:
        raise data_error(
            "train",
            got="no training part",
            expected=f"one: the {asking[0]} part is scaled or encoded with what training has seen",
        )
    train = parts["train"]
    return train.fit() if isinstance(train, Fittable) else {}


def prepare(parts: Mapping[Stage, AnyDataset], fitted: Fitted) -> dict[Stage, AnyDataset]:
    """The parts as a model sees them."""
    ready = {stage: part.prepare(fitted) if isinstance(part, Fittable) else part for stage, part in parts.items()}
    for stage, part in parts.items():
        made = ready[stage]
        if isinstance(part, Tensors) and isinstance(made, Tensors) and len(made) == len(part):
            made.indices, made.whole_length = part.indices, part.whole_length
    return ready


def read_sizes(sizes: Mapping[str, int | float]) -> dict[Stage, int | float]:
    """The sizes of the parts that are asked for, in the order train, val, test; parts of size 0 left out.

    Raises: ConfigError for another name, a negative size, fractions of more than 1 together.
    """
    raise_errors(share_errors(sizes))
    # A float above 1 comes from a command line such as parts.val=1e3.
    return {name: _plain(sizes[name]) for name in STAGES if sizes.get(name)}


def contiguous(
    sizes: Mapping[Name, int | float], length: int, *, block_size: int | None = None, unit: str = "samples"
) -> dict[Name, slice]:
    """Return the place of each split in a text or a series of `length`, one after another.

    Args:
        sizes: fractions of the length, or whole numbers.
        length: of the whole.
        block_size: of a text, the size of the blocks that whole numbers count. The target of a block's last place is
            the next one.
        unit: what is divided, in the plural.

    Raises:
        ConfigError: as lengths.
    """
    if block_size is not None:
        sizes = {name: size * block_size + 1 if isinstance(size, int) else size for name, size in sizes.items()}
    found, stop = dict[Name, slice](), 0
    for name, count in lengths(sizes, length, unit=unit).items():
        found[name] = slice(stop, stop + count)
        stop += count
    return found


def lengths(sizes: Mapping[Name, int | float], length: int, *, unit: str = "samples") -> dict[Name, int]:
    """Samples of each part of `length` samples. Fractions are rounded along the sum, so that 1 leaves none over.

    unit: what is divided, in the plural.

    Raises: ConfigError for a part without a sample, and for more samples than there are.
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
        got = f"{sum(counts.values())} {unit} asked for"
        raise data_error("parts", got=got, expected=f"{length} at most, the whole data set")
    for name, count in counts.items():
        if not count:
            raise data_error(
                f"parts.{name}",
                got=f"{sizes[name]} of {length} {unit}, an empty part",
                expected=f"at least one of the {unit}",
                fix=f"Ask for more, or for no such part with data.parts.{name}=0",
            )
    return counts


def divide(
    dataset: AnyDataset, sizes: Mapping[str, int | float], *, seed: int, choose: Choose | None = None
) -> dict[Stage, AnyDataset]:
    """The parts of a data set, disjoint, chosen by the seed alone. choose: see make_splits.

    Raises: ConfigError for a stream, which cannot be divided, and as `lengths`.
    """
    wanted = read_sizes(sizes)
    own: Mapping[Stage, AnyDataset] = getattr(dataset, "own_parts", {})
    if choose is not None and (own or isinstance(dataset, Splittable | IterableDataset)):
        got, expected = f"rules, and {type(dataset).__name__} with parts of its own", "samples by index, without parts"
        raise data_error("split", got=got, expected=expected)
    if isinstance(dataset, Splittable):
        return dict(dataset.divide(wanted))
    if own and list(wanted.values()) != [1.0]:  # else one part is all that there is
        return _own_parts(own, wanted, seed=seed)
    if isinstance(dataset, IterableDataset):
        raise data_error(
            "dataset",
            got=f"{type(dataset).__name__}, a stream of samples",
            expected="a data set with an index, to choose parts from",
            fix="Give data.train, data.val and data.test a stream each",
        )
    draw = partial(random_splits, length=samples_in(dataset), seed=seed)
    chosen: Mapping[Stage, Tensor] = draw(wanted) if choose is None else choose(dataset, wanted)
    return {stage: _select(dataset, indices) for stage, indices in chosen.items()}


def _own_parts(
    own: Mapping[Stage, AnyDataset], wanted: Mapping[Stage, int | float], *, seed: int
) -> dict[Stage, AnyDataset]:
    """Return the parts that a data set brings. A part that it lacks is taken out of its training part."""
    missing = {stage: size for stage, size in wanted.items() if stage not in own}
    known = {stage: size for stage, size in wanted.items() if stage not in missing and stage != "train"}
    for stage in (stage for stage, size in known.items() if size != DEFAULT_SIZES[stage]):
        raise data_error(f"parts.{stage}", got=f"{known[stage]}, and a data set with this part", expected="null")
    whole = samples_in(own["train"])
    taken = lengths(missing, whole)
    chosen = random_splits({"train": whole - sum(taken.values()), **taken}, length=whole, seed=seed)
    return {**own, **{stage: _select(own["train"], indices) for stage, indices in chosen.items()}}


def random_splits(sizes: Mapping[Name, int | float], *, length: int, seed: int) -> dict[Name, Tensor]:
    """Disjoint sorted indices of each part, int64."""
    counts = lengths(sizes, length)
    generator = torch.Generator().manual_seed(seed_for(seed, "parts"))
    chosen = torch.randperm(length, generator=generator)[: sum(counts.values())]
    pieces = chosen.split(list(counts.values()))
    found = {}
    for name, piece in zip(counts, pieces, strict=True):
        # A mark each, for sorting ten million numbers takes a second.
        marks = torch.zeros(length, dtype=torch.bool)
        marks[piece] = True
        found[name] = marks.nonzero().flatten()
    return found


def _select(dataset: AnyDataset, indices: Tensor) -> AnyDataset:
    if isinstance(dataset, Tensors | Fittable):
        if isinstance(dataset, Selectable):
            return dataset.select(indices)
        name = type(dataset).__name__
        raise data_error(
            "dataset",
            got=f"{name} with fit() and prepare(), and neither select(indices) nor divide(sizes)",
            expected="a data set whose part is of its kind, so that the training part can tell what it knows",
        )
    if isinstance(dataset, Indexed):
        return Selection(source=dataset, indices=indices)
    return Subset(dataset, indices.tolist())


def _plain(size: int | float) -> int | float:
    return int(size) if size > 1 else size
