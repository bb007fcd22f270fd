"""Read one value of every sample of a part: its target, a weight, a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset

from exp.data.entries import TARGET, by_name
from exp.data.faults import data_fault
from exp.data.in_memory import AnyDataset, Indexed, Selection, Tensors, gathered, sample_name, samples_in
from exp.data.randomness import preserve_generators, reseed_sample
from exp.errors import UserCodeError
from exp.shared_types import Stage
from exp.spelling import among, did_you_mean

Value = TypeVar("Value")
# What torchvision's data sets call the targets of all samples.
TARGETS = "targets"
CHUNK = 4096


def whole_length(part: AnyDataset) -> int | None:
    """The samples of the data set of which this is a part; None where it is no part of one."""
    if isinstance(part, Tensors):
        return part.whole_length
    if isinstance(part, Selection):
        return samples_in(part.source)
    return samples_in(part.dataset) if isinstance(part, Subset) else None


def own_share(values: Tensor, part: AnyDataset) -> Tensor | None:
    """The values of a part's samples, of one each, or of one for each sample of the whole; None for any other number.

    values: `[N, ...]`.
    """
    if len(values) == samples_in(part):
        return values
    if not isinstance(part, Tensors | Selection | Subset) or len(values) != whole_length(part):
        return None
    return None if part.indices is None else values[torch.as_tensor(part.indices, dtype=torch.int64)]


def stated_values(part: AnyDataset, name: str) -> Tensor | None:
    """An attribute of a data set, or of the one of which it is a part, that holds a number for each sample."""
    whole = part.source if isinstance(part, Selection) else part.dataset if isinstance(part, Subset) else part
    held = getattr(whole, name, None)
    if not isinstance(held, Tensor | Sequence) and not hasattr(held, "__array__"):
        return None
    return own_share(torch.as_tensor(held), part)


def targets_of(part: AnyDataset, *, stage: Stage, inputs: Sequence[str], key: str) -> list[Any]:
    """The target of every sample, from the data set's `targets` where it has them; else each sample is read once.

    key: of the config, below `data.`, that asks for them.
    """
    stated = None if isinstance(part, Tensors) else stated_values(part, TARGETS)
    if stated is not None:
        return list(stated)
    return values_of(part, lambda sample: entry_of(sample, TARGET, inputs=inputs, key=key), stage=stage)


def values_of(part: AnyDataset, pick: Callable[[object], Value], *, stage: Stage) -> list[Value]:
    """What `pick` gives for each sample, in order, before transforms.

    Raises: UserCodeError where a sample cannot be read.
    """
    with preserve_generators():
        return [pick(sample) for sample in _samples(part, stage)]


def entry_of(sample: object, name: str, *, inputs: Sequence[str], key: str) -> object:
    """One value of a sample by its name; that of a pair is `input` or `target`.

    key: of the config, below `data.`, that names it.
    Raises: ConfigError where it has no such entry.
    """
    named = by_name(sample, inputs)
    if not isinstance(named, Mapping):
        values = named if isinstance(named, tuple | list) else [named]
        named = dict(zip(("input", TARGET), values, strict=False))
    if name not in named:
        raise data_fault(
            key, got=f"{name}, and samples with {among(named)}", expected="one of these", cure=did_you_mean(name, named)
        )
    return named[name]


def _samples(part: AnyDataset, stage: Stage) -> Iterator[object]:
    count = samples_in(part)
    if isinstance(part, Indexed):
        for first in range(0, count, CHUNK):
            entries = gathered(part, torch.arange(first, min(first + CHUNK, count)), stage=stage)
            if isinstance(entries, Mapping):
                yield from (dict(zip(entries, row, strict=True)) for row in zip(*entries.values(), strict=True))
            else:
                yield from zip(*entries, strict=True)
        return
    for index in range(count):
        reseed_sample(seed=0, epoch=0, index=index)
        try:
            sample = part[index]
        except Exception as error:
            raise UserCodeError.of(error, what=f"reading {sample_name(part, index, stage=stage)}") from error
        yield sample
