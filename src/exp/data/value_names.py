"""Names of the values in samples, for display: columns, classes, and the number of an unknown word."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from torch.utils.data import Subset

from exp.data.entries import TARGET

# The key of the mean and standard deviation of each target, in the statistics of the training split.
SCALES = "scales"


@dataclass(frozen=True, kw_only=True)
class ValueNames:
    """Names for display, by the name of an entry. The entries of a pair are named `input` and `target`.

    Args:
        columns: The names along an entry's last axis.
        classes: The names of a target's classes, in the order of their numbers.
        unknown: The number that means an unknown word.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def fitted_classes(fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return the names of the classes of each target, from the statistics of the training split."""
    found: dict[str, Sequence[str]] = {}
    for statistics in fitted.values():
        classes = statistics.get("classes") if isinstance(statistics, Mapping) else None
        if isinstance(classes, Mapping):
            found |= {str(target): list(names) for target, names in classes.items()}
        elif isinstance(classes, list | tuple) and classes:
            found[TARGET] = list(map(str, classes))
    return found


def class_names(part: object, fitted: Mapping[str, object]) -> dict[str, Sequence[str]]:
    """Return the names of the classes of each target.

    Names in the statistics take precedence over those of the split.

    Args:
        part: A split of the data.
        fitted: The statistics of the training split.
    """
    return {**value_names(part).classes, **fitted_classes(fitted)}


def fitted_scales(fitted: Mapping[str, object]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return the mean and the standard deviation that standardize each target, float64 `[]` or `[K]`."""
    held = [entry[SCALES] for entry in fitted.values() if isinstance(entry, Mapping) and SCALES in entry]
    return {
        str(target): (np.asarray(mean), np.asarray(deviation))
        for scales in held
        for target, (mean, deviation) in scales.items()
    }


def value_names(part: object) -> ValueNames:
    """Return the names of a split's values: its attribute `value_names`, or the class names in its attribute `classes`.

    torchvision's data sets have the attribute `classes`.
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
