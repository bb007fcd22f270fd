"""Names of the values of samples: columns, classes, and the number of an unknown word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.utils.data import Subset

from exp.data.entries import TARGET

# The key of a split's statistics with the mean and the deviation of each target.
SCALES = "scales"


@dataclass(frozen=True, kw_only=True)
class ValueNames:
    """Names for people, by the name of an entry: `input` and `target` of a pair.

    Args:
        columns: The names along an entry's last axis.
        classes: The names of a target's classes, in the order of their numbers.
        unknown: The number that means an unknown word.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def fitted_classes(fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return the names of classes by target, from the statistics of the training split."""
    found: dict[str, Sequence[str]] = {}
    for statistics in fitted.values():
        classes = statistics.get("classes") if isinstance(statistics, Mapping) else None
        if isinstance(classes, Mapping):
            found |= {str(target): list(names) for target, names in classes.items()}
        elif isinstance(classes, list | tuple) and classes:
            found[TARGET] = list(map(str, classes))
    return found


def class_names(part: object, fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return the names of classes by target.

    Args:
        part: A split of the data.
        fitted: The statistics of the training split.
    """
    return {**value_names(part).classes, **fitted_classes(fitted)}


def fitted_scales(fitted: Mapping[str, object]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the mean and the deviation that standardize each target, float64 `[]` or `[K]`."""
    held = [entry[SCALES] for entry in fitted.values() if isinstance(entry, Mapping) and SCALES in entry]
    return {
        str(target): (np.asarray(mean), np.asarray(deviation))
        for scales in held
        for target, (mean, deviation) in scales.items()
    }


def value_names(part: object) -> ValueNames:
    """Return the `value_names` of a split; otherwise the names in `classes`, as torchvision's data sets have them."""
    if isinstance(part, Subset):
        return value_names(part.dataset)
    stated = getattr(part, "value_names", None)
    if isinstance(stated, ValueNames):
        return stated
    classes = getattr(part, "classes", None)
    if isinstance(classes, list | tuple) and classes and all(isinstance(one, str) for one in classes):
        return ValueNames(classes={TARGET: classes})
    return ValueNames()
