"""The targets of a batch, and labels that are none of the classes."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from exp.data.data_errors import SampleError
from exp.data.entries import target_in
from exp.errors import ErrorDetails

# The ignore_index of torch's losses.
IGNORED = -100


@dataclass(frozen=True, kw_only=True)
class Labels:
    """The labels that samples may have.

    classes: how many there are; None where targets are no classes. ignored: labels that no class has and a loss leaves
        out.
    """

    classes: int | None
    ignored: tuple[int, ...]

    def first_wrong(self, targets: object) -> tuple[int, int] | None:
        """The place of the first sample with a label outside, and the label; None where there is none.

        targets: whole numbers `[B, ...]`. On a GPU a loss would end with an assertion, and without a place.
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

    def refuse(self, batch: object, named: Callable[[int], str]) -> None:
        """Raises: SampleError where a sample of a batch has a label outside. named: it in words, by its place."""
        wrong = self.first_wrong(target_in(batch))
        if wrong is not None:
            place, label = wrong
            raise SampleError(self.error(label, of=named(place)))

    def error(self, label: int, *, of: str) -> ErrorDetails:
        """of: the sample, in words."""
        assert self.classes is not None
        fix = (
            f"Its classes are 0 to {self.classes - 1}; correct the label, or name it in ignore_index of the loss "
            "(of a loss of your own that leaves it out, in data.ignored_labels)"
        )
        if label < 0:
            got, expected = f"{self.classes}, and {of} has the label {label}", "0 for the first class"
        else:
            got, expected = str(self.classes), f"{label + 1} or more: the data holds the class {label}, in {of}"
        return ErrorDetails(key="data.num_classes", got=got, expected=expected, fix=fix)


def is_whole(targets: Tensor) -> bool:
    """Whether they are numbers of classes, and not numbers to predict."""
    return not (targets.is_floating_point() or targets.is_complex() or targets.dtype == torch.bool)


def classes_in(targets: object) -> int | None:
    """The number of classes that whole targets hold: one more than the largest. None where they are not whole."""
    if not isinstance(targets, Tensor) or not is_whole(targets):
        return None
    return int(targets.max()) + 1
