"""Read one value of every sample of a split: its target, a weight, a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset

from exp.data.data_errors import data_error
from exp.data.entries import TARGET, named_entries
from exp.data.in_memory import AnyDataset, Indexed, Selection, Tensors, gathered, sample_name, samples_in
from exp.data.randomness import preserve_generators, reseed_sample
from exp.errors import UserCodeError
from exp.shared_types import Stage
from exp.spelling import among, did_you_mean

Value = TypeVar("Value")
# The attribute of torchvision's data sets with the targets of all samples.
TARGETS = "targets"
CHUNK = 4096


def given_values(part: AnyDataset, given: Sequence[float] | str, *, key: str, inputs: Sequence[str]) -> Tensor:
    """Return a number for each sample, `[N]`.

    Args:
        part: the split.
        given: numbers, one for each sample of the split or of the whole data set; or the name of an attribute of the
            data set that holds them, or of an entry of the samples.
        key: of the config, below `data.`.
        inputs: the names of a sample's values.

    Raises:
        ConfigError: for another number of them, and for an entry that samples do not have.
    """
    if not isinstance(given, str):
        found = _own_share(torch.as_tensor(given, dtype=torch.float64), part)
        if found is None:
            expected = f"{samples_in(part)}, one for each sample, or one for each of data.dataset"
            raise data_error(key, got=f"{len(given)} numbers", expected=expected)
        return found
    stated = stated_values(part, given)
    if stated is not None:
        return stated
    read = values_of(part, lambda sample: float(torch.as_tensor(entry_of(sample, given, inputs=inputs, key=key))))
    return torch.tensor(read, dtype=torch.float64)


def _own_share(values: Tensor, part: AnyDataset) -> Tensor | None:
    """Return the values of a split's samples, of one each, or of one for each sample of the whole; None otherwise.

    values: `[N, ...]`.
    """
    if len(values) == samples_in(part):
        return values
    whole = part.source if isinstance(part, Selection) else part.dataset if isinstance(part, Subset) else None
    length = part.whole_length if isinstance(part, Tensors) else None if whole is None else samples_in(whole)
    indices = part.indices if isinstance(part, Tensors | Selection | Subset) else None
    if indices is None or len(values) != length:
        return None
    return values[torch.as_tensor(indices, dtype=torch.int64)]


def stated_values(part: AnyDataset, name: str) -> Tensor | None:
    """Return an attribute of a data set, or of the whole data set, with a number for each sample; None without one."""
    whole = part.source if isinstance(part, Selection) else part.dataset if isinstance(part, Subset) else part
    held = getattr(whole, name, None)
    if not isinstance(held, Tensor | Sequence) and not hasattr(held, "__array__"):
        return None
    return _own_share(torch.as_tensor(held), part)


def targets_of(part: AnyDataset, *, stage: Stage, inputs: Sequence[str], key: str) -> list[Any]:
    """Return the target of every sample, from the data set's `targets` if it has them; else each sample is read once.

    key: of the config, below `data.`, that asks for them.
    """
    stated = None if isinstance(part, Tensors) else stated_values(part, TARGETS)
    if stated is not None:
        return list(stated)
    return values_of(part, lambda sample: entry_of(sample, TARGET, inputs=inputs, key=key), stage=stage)


def values_of(part: AnyDataset, pick: Callable[[object], Value], *, stage: Stage = "train") -> list[Value]:
    """Return the result of `pick` for each sample, in order, before transforms.

    Raises: UserCodeError for a sample that cannot be read.
    """
    with preserve_generators():
        return [pick(sample) for sample in _samples(part, stage)]


def entry_of(sample: object, name: str, *, inputs: Sequence[str], key: str) -> object:
    """Return one value of a sample by its name, `input` or `target` of a pair.

    key: of the config, below `data.`, that names it.
    Raises: ConfigError for an unknown name.
    """
    named = named_entries(sample, inputs)
    if name not in named:
        got = f"{name}, and samples with {among(named)}"
        raise data_error(key, got=got, expected="one of these", fix=did_you_mean(name, named))
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
