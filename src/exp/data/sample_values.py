"""Functions that read one value of every sample of a split, such as the target, a weight or a length."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils.data import Subset

from exp.data.data_errors import data_error, name_error
from exp.data.entries import TARGET, named_entries
from exp.data.in_memory import AnyDataset, Indexed, Selection, Tensors, gather_samples, sample_name, samples_in
from exp.data.randomness import preserve_generators, reseed_sample
from exp.errors import UserCodeError
from exp.shared_types import Stage

Value = TypeVar("Value")
# The attribute in which torchvision's data sets store the targets of all samples.
TARGETS = "targets"
CHUNK = 4096


def sample_numbers(part: AnyDataset, given: Sequence[float] | str, *, key: str, inputs: Sequence[str]) -> Tensor:
    """Return one number for each sample of a split, `[N]`, such as a weight.

    Args:
        part: The split.
        given: The numbers, or the name under which the data set has the numbers. Numbers are one for each sample of
            the split, or one for each sample of the data set that was divided. A name is that of an attribute of the
            data set, or of a value of each sample.
        key: The config key below `data.`, for messages.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.

    Raises:
        ConfigError: The number of values matches neither the split nor the whole data set, or samples do not have a
            value with the name.
    """
    if not isinstance(given, str):
        found = _own_share(torch.as_tensor(given, dtype=torch.float64), part)
        if found is None:
            expected = f"{samples_in(part)}, one for each sample of the split, or one for each sample of data.dataset"
            raise data_error(key, got=f"{len(given)} numbers", expected=expected)
        return found
    if (found := attribute_values(part, given)) is not None:
        return found
    read = values_of(part, lambda sample: float(torch.as_tensor(entry_of(sample, given, inputs=inputs, key=key))))
    return torch.tensor(read, dtype=torch.float64)


def _own_share(values: Tensor, part: AnyDataset) -> Tensor | None:
    """Return one value for each sample of a split, `[n, ...]`.

    Return None if the number of values matches neither the split nor the whole data set.

    Args:
        values: One value for each sample of the split, or for each sample of the whole data set, `[N, ...]`.
        part: The split.
    """
    if len(values) == samples_in(part):
        return values
    whole = part.source if isinstance(part, Selection) else part.dataset if isinstance(part, Subset) else None
    length = part.whole_length if isinstance(part, Tensors) else None if whole is None else samples_in(whole)
    indices = part.indices if isinstance(part, Tensors | Selection | Subset) else None
    if indices is None or len(values) != length:
        return None
    return values[torch.as_tensor(indices, dtype=torch.int64)]


def attribute_values(part: AnyDataset, name: str) -> Tensor | None:
    """Return the values, such as class numbers, that an attribute of the data set has for a split, `[n, ...]`.

    Return None if the data set does not have the attribute, or if its length matches neither the split nor the whole
    data set.

    Args:
        part: The split.
        name: The name of the attribute.
    """
    whole = part.source if isinstance(part, Selection) else part.dataset if isinstance(part, Subset) else part
    held = getattr(whole, name, None)
    if not isinstance(held, Tensor | Sequence) and not hasattr(held, "__array__"):
        return None
    return _own_share(torch.as_tensor(held), part)


def targets_of(part: AnyDataset, *, stage: Stage, inputs: Sequence[str], key: str) -> list[Any]:
    """Return the target of every sample of a split.

    The targets are read from the attribute `targets` of the data set. If there is no such attribute, each sample is
    read once.

    Args:
        part: The split.
        stage: The name of the split, for messages.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.
        key: The config key below `data.` that needs the targets, for messages.
    """
    found = None if isinstance(part, Tensors) else attribute_values(part, TARGETS)
    if found is not None:
        return list(found)
    return values_of(part, lambda sample: entry_of(sample, TARGET, inputs=inputs, key=key), stage=stage)


def values_of(part: AnyDataset, pick: Callable[[object], Value], *, stage: Stage = "train") -> list[Value]:
    """Return the results of a function that is called with each sample of a split, in order.

    Args:
        part: The split. Its samples are read without transforms.
        pick: The function.
        stage: The name of the split, for messages. Default: `train`.

    Raises:
        UserCodeError: A sample cannot be read.
    """
    with preserve_generators():
        return [pick(sample) for sample in _samples(part, stage)]


def entry_of(sample: object, name: str, *, inputs: Sequence[str], key: str) -> object:
    """Return a value of a sample by its name. The values of a pair have the names `input` and `target`.

    Args:
        sample: The sample.
        name: The name of the value.
        inputs: The names of a sample's values, as in data.inputs. Empty if the values have no names.
        key: The config key below `data.` that contains the name, for messages.

    Raises:
        ConfigError: The sample does not have a value with this name.
    """
    named = named_entries(sample, inputs)
    if name not in named:
        raise name_error(key, name, named, expected="an entry of the samples")
    return named[name]


def _samples(part: AnyDataset, stage: Stage) -> Iterator[object]:
    count = samples_in(part)
    if isinstance(part, Indexed):
        for first in range(0, count, CHUNK):
            entries = gather_samples(part, torch.arange(first, min(first + CHUNK, count)), stage=stage)
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
