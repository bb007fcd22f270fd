"""The names that a data set has for the values of its samples: columns, classes, the number of what is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
from torch.utils.data import Subset

from exp.data.entries import TARGET

# In what a training part tells: by target, mean and deviation.
SCALES = "scales"


@dataclass(frozen=True, kw_only=True)
class ValueNames:
    """For people: no network sees them. Each is by the name of the entry, `input` and `target` of a pair.

    columns: of an entry's last axis. classes: of a target, in the order of their numbers.
    unknown: of whole numbers the one that stands for whatever the training part has not seen.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


def told_classes(fitted: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """The names of classes by target, out of what a training part told and a checkpoint kept."""
    found: dict[str, Sequence[str]] = {}
    for told in fitted.values():
        classes = told.get("classes") if isinstance(told, Mapping) else None
        if isinstance(classes, Mapping):
            found |= {str(target): list(names) for target, names in classes.items()}
        elif isinstance(classes, list | tuple) and classes:
            found[TARGET] = list(map(str, classes))
    return found


def class_names(part: object, fitted: Mapping[str, Any]) -> dict[str, Sequence[str]]:
    """Return the names of classes by target. part: of the data. fitted: what the training part told."""
    return {**value_names(part).classes, **told_classes(fitted)}


def told_scales(fitted: Mapping[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Mean and deviation, float64 `[]` or `[K]`, by which training standardised the numbers of each target."""
    held = [told[SCALES] for told in fitted.values() if isinstance(told, Mapping) and SCALES in told]
    return {
        str(target): (np.asarray(mean), np.asarray(deviation))
        for scales in held
        for target, (mean, deviation) in scales.items()
    }


def value_names(part: object) -> ValueNames:
    """Those that a part states in `value_names`, or as torchvision's data sets do, in `classes`; else none."""
    if isinstance(part, Subset):
        return value_names(part.dataset)
    stated = getattr(part, "value_names", None)
    if isinstance(stated, ValueNames):
        return stated
    classes = getattr(part, "classes", None)
    if isinstance(classes, list | tuple) and classes and all(isinstance(one, str) for one in classes):
        return ValueNames(classes={TARGET: classes})
    return ValueNames()
