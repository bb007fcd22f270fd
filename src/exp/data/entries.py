"""Access to the entries of a sample or a batch by name, and the names of columns and classes for display.

An entry is a named value of a sample: an input of the network, or a target.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import Subset

from exp.data.data_errors import data_error
from exp.nested import map_tensors

TARGET = "target"
PAIR = ("input", TARGET)
# The key in the statistics of the training split that contains the mean and standard deviation of each target.
SCALES = "scales"
SINGLE = {torch.float64: torch.float32, torch.complex128: torch.complex64}


@dataclass(frozen=True, kw_only=True)
class BatchForm:
    """Function that converts a batch to the form that the network expects.

    The function gives names to the inputs, and converts float64 to float32 and complex128 to complex64.

    Args:
        names: The names of the inputs from data.inputs; see by_name. Default: no names.
        keeps_doubles: Whether float64 and complex128 keep their dtype. Default: False.
    """

    names: tuple[str, ...] = ()
    keeps_doubles: bool = False

    def __call__(self, data: object) -> object:
        """Return the converted batch.

        Raise ConfigError if the number of names does not match the number of values in a sample.
        """
        named = by_name(data, self.names)
        return named if self.keeps_doubles else map_tensors(named, _single)


def by_name(data: object, names: Sequence[str] = ()) -> object:
    """Return a sample or batch with named inputs as a mapping from names to values.

    The tuples (image, table, target), ((image, table), target) and ({image: .., table: ..}, target) become the same
    mapping. A sample or batch without named inputs is returned unchanged.

    Args:
        data: The sample or batch.
        names: The names of the inputs from data.inputs, in the order of the values in a tuple. Default: no names.
            Inputs in a mapping always have the names in the mapping.

    Raises:
        ConfigError: The number of names does not match the number of values in the tuple.
    """
    if isinstance(data, Mapping):
        return data
    values = list(data) if isinstance(data, tuple | list) else [data]
    if len(values) == 2:
        first, target = values
        if isinstance(first, Mapping):
            return {**first, TARGET: target}
        if names and isinstance(first, tuple | list):
            values = [*first, target]
    if not names:
        return data
    if len(values) not in (len(names), len(names) + 1):
        got = f"the names {', '.join(names)}, although samples have {len(values)} values"
        raise data_error("inputs", got=got, expected="a name for each value except the last value, the target")
    return dict(zip((*names, TARGET), values, strict=False))


def named_entries(data: object, names: Sequence[str] = ()) -> Mapping[str, Any]:
    """Return a mapping from the names of the entries in a sample or batch to their values.

    If inputs have no names, the two values of a pair get the names `input` and `target`.

    Args:
        data: The sample or batch.
        names: The names of the inputs from data.inputs; see by_name. Default: no names.
    """
    named = by_name(data, names)
    if isinstance(named, Mapping):
        return named
    return dict(zip(PAIR, named if isinstance(named, tuple | list) else [named], strict=False))


def _single(tensor: Tensor) -> Tensor:
    return tensor.to(SINGLE[tensor.dtype]) if tensor.dtype in SINGLE else tensor


def target_in(data: object) -> object:
    """Return the target of a sample or batch. Return None if there is no target."""
    if isinstance(data, Mapping):
        return data.get(TARGET)
    return data[1] if isinstance(data, tuple | list) and len(data) > 1 else None


def inputs_in(data: object) -> dict[str, Tensor]:
    """Return a mapping from the names of the inputs in a batch to their tensors.

    If the batch is a pair or a single tensor, its input has the name `input`.

    Raises:
        ConfigError: The batch has no input tensor, or is a tuple of more than two values.
    """
    if isinstance(data, tuple | list) and len(data) > 2:
        expected = "the names of all values except the last value, the target"
        fix = "For example, set data.inputs: {image: {shape: [3, 32, 32], dtype: float32}, table: {...}}"
        raise data_error("inputs", got=f"null, although samples have {len(data)} values", expected=expected, fix=fix)
    entries = {name: value for name, value in named_entries(data).items() if name != TARGET}
    found = {name: value for name, value in entries.items() if isinstance(value, Tensor) and value.dim()}
    if not found:
        kinds = [f"{name} is {type(value).__name__}" for name, value in entries.items()]
        got = f"samples whose {' and '.join(kinds)}" if kinds else "samples with only a target"
        raise data_error("transforms", got=got, expected="an input that is a tensor, an array or a number")
    return found


@dataclass(frozen=True, kw_only=True)
class ValueNames:
    """Names of the columns and classes of a data set's entries, for display.

    The keys of all mappings are names of entries, such as `input` and `target`.

    Args:
        columns: The names of the columns along the last axis of an entry. Default: no names.
        classes: The names of the classes of a target, in the order of the class numbers. Default: no names.
        unknown: The class number that means a word outside the classes of the training split. Default: no number.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def fitted_classes(fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return the class names in the statistics of the training split.

    Returns:
        A mapping from the names of the targets to the names of their classes, in the order of the class numbers.
    """
    found: dict[str, Sequence[str]] = {}
    for statistics in fitted.values():
        classes = statistics.get("classes") if isinstance(statistics, Mapping) else None
        if isinstance(classes, Mapping):
            found |= {str(target): list(names) for target, names in classes.items()}
        elif isinstance(classes, list | tuple) and classes:
            found[TARGET] = list(map(str, classes))
    return found


def class_names(part: object, fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return a mapping from the names of the targets to the names of their classes.

    Class names in the statistics take precedence over class names in the split.

    Args:
        part: A split of the data.
        fitted: The statistics of the training split.
    """
    return {**value_names(part).classes, **fitted_classes(fitted)}


def fitted_scales(fitted: Mapping[str, object]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the mean and the standard deviation with which each target was standardized.

    Args:
        fitted: The statistics of the training split.

    Returns:
        A mapping from the names of the targets to pairs (mean, standard deviation). Mean and deviation are float64,
        `[]` for a target that is a number, and `[K]` for a target of K numbers.
    """
    held = [entry[SCALES] for entry in fitted.values() if isinstance(entry, Mapping) and SCALES in entry]
    return {
        str(target): (np.asarray(mean), np.asarray(deviation))
        for scales in held
        for target, (mean, deviation) in scales.items()
    }


def value_names(part: object) -> ValueNames:
    """Return the names of the columns and classes of a split.

    The names are the attribute `value_names` of the split. If there is no such attribute, its attribute `classes`
    contains the names of the classes, as in torchvision's data sets.
    """
    if isinstance(part, Subset):
        return value_names(part.dataset)
    stated = getattr(part, "value_names", None)
    if isinstance(stated, ValueNames):
        return stated
    classes = getattr(part, "classes", None)
    if isinstance(classes, list | tuple) and classes and all(isinstance(one, str) for one in classes):
        return ValueNames(classes={TARGET: classes})
    return ValueNames()
