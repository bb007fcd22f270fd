"""The names that a data set has for the values of its samples: columns, classes, the number of what is unknown."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from torch.utils.data import Subset

from exp.data.entries import TARGET


@dataclass(frozen=True, kw_only=True)
class ValueNames:
    """For people: no network sees them. Each is by the name of the entry, `input` and `target` of a pair.

    columns: of an entry's last axis. classes: of a target, in the order of their numbers.
    unknown: of whole numbers the one that stands for whatever the training part has not seen.
    """

    columns: Mapping[str, Sequence[str]] = field(default_factory=dict)
    classes: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unknown: Mapping[str, int] = field(default_factory=dict)


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
