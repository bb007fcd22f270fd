"""Check that the labels of samples are valid class numbers."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exp.data.data_errors import SampleError, data_detail
from exp.data.entries import target_in
from exp.errors import ErrorDetails

# The label that torch's losses ignore: the default of their parameter ignore_index.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Labels:
    """Rules for the valid labels of samples.

    Args:
        classes: The number of classes. Labels from 0 to `classes` - 1 are valid. None if targets are not classes.
        ignored: Other labels that are valid, because a loss ignores them.
    """

    classes: int | None
    ignored: tuple[int, ...]

    def first_wrong(self, targets: object) -> tuple[int, int] | None:
        """Return the first invalid label of a batch. Return None if all labels are valid.

        Labels are checked because a loss on a GPU stops the program with an assertion that does not name the sample.

        Args:
            targets: The targets of B samples, integers `[B, ...]`. Targets of other dtypes are not labels, so they are
                valid.

        Returns:
            The position of the sample in the batch, and the label.
        """
        if self.classes is None or not isinstance(targets, Tensor) or not is_whole(targets) or not targets.numel():
            return None
        least, largest = (int(value) for value in targets.aminmax())
        if least >= 0 and largest < self.classes:
            return None
        outside = (targets < 0) | (targets >= self.classes)
        for label in self.ignored:
            outside &= targets != label
        places = outside.nonzero()
        if not len(places):
            return None
        return int(places[0][0]) if outside.dim() else 0, int(targets[tuple(places[0])])

    def refuse(self, batch: object, name_of: Callable[[int], str]) -> None:
        """Raise SampleError for the first invalid label in a batch.

        Args:
            batch: The batch.
            name_of: A function that returns the name of a sample, given the position of the sample in the batch.
        """
        wrong = self.first_wrong(target_in(batch))
        if wrong is not None:
            place, label = wrong
            raise SampleError(self.error(label, of=name_of(place)))

    def error(self, label: int, *, of: str) -> ErrorDetails:
        """Return the details of the error for an invalid label.

        Args:
            label: The invalid label.
            of: The name of the sample that has the label.
        """
        assert self.classes is not None
        fix = (
            f"The classes are 0 to {self.classes - 1}. Correct the label, or set ignore_index of the loss to the "
            "label. If your own loss ignores the label, add the label to data.ignored_labels"
        )
        if label < 0:
            got, expected = f"{self.classes}, although {of} has the label {label}", "labels of 0 or more"
        else:
            got, expected = str(self.classes), f"{label + 1} or more, because {of} has the class {label}"
        return data_detail("num_classes", got=got, expected=expected, fix=fix)


def is_whole(targets: Tensor) -> bool:
    """Return whether targets are class numbers, which have an integer dtype."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def classes_in(targets: object) -> int | None:
    """Return the largest class number plus 1. Return None if the targets are not class numbers."""
    if not isinstance(targets, Tensor) or not is_whole(targets):
        return None
    return int(targets.max()) + 1
