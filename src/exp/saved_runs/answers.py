"""Answers from the outputs of a network: classes with probabilities, and numbers in the units of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from exp.data.value_names import fitted_classes, fitted_scales
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, BCEWithLogits, CrossEntropy

Kind = Literal["classes", "log_classes", "yes_or_no", "numbers"]
# One number, or one for each output.
Numbers = float | Sequence[float]
# The losses of classes, the kind of their outputs, and the axis of the classes.
CLASSES: Sequence[tuple[type[nn.Module], Kind, int]] = (
    (CrossEntropy, "classes", -1),
    (NLL, "log_classes", -1),
    (nn.CrossEntropyLoss, "classes", 1),
    (nn.NLLLoss, "log_classes", 1),
)
YES_OR_NO = (BCEWithLogits, nn.BCEWithLogitsLoss)
NUMBERS = (nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss)


@dataclass(frozen=True, kw_only=True)
class Reading:
    """A description of an output, which turns it into answers.

    Args:
        target: The target that a loss compares with the output.
        kind: Scores of classes, their log probabilities, scores of yes, or numbers.
        axis: The axis of the classes.
        names: The names of the classes in order; None without names.
        mean: The mean with which training standardized the numbers; None for no standardization.
        deviation: The deviation; see `mean`.
    """

    target: str
    kind: Kind
    axis: int = -1
    names: Sequence[str] | None = None
    mean: Numbers | None = None
    deviation: Numbers | None = None

    def answers(self, output: np.ndarray) -> dict[str, np.ndarray]:
        """Return the answers of an output `[N, ...]`.

        Returns:
            For classes: `class`, int64 `[N, ...]`, -1 if a score is nan; `probability` of that class; and
            `probabilities` with the classes in the last axis. For yes or no: `probability`. For numbers: `prediction`.
        """
        scores = torch.from_numpy(output).double()
        if self.kind == "numbers":
            numbers = output.astype(np.float64)
            if self.mean is not None and self.deviation is not None:
                numbers = numbers * np.asarray(self.deviation) + np.asarray(self.mean)
            return {"prediction": numbers}
        if self.kind == "yes_or_no":
            return {"probability": scores.sigmoid().numpy()}
        scores = scores.movedim(self.axis, -1)
        probabilities = scores.softmax(-1) if self.kind == "classes" else scores.exp()
        best = probabilities.max(-1)
        return {
            "class": torch.where(best.values.isnan(), -1, best.indices).numpy(),
            "probability": best.values.numpy(),
            "probabilities": probabilities.numpy(),
        }


def readings_of(
    objective: Objective, fitted: Mapping[str, object], *, classes: Sequence[str] | None
) -> dict[str, Reading]:
    """Return the description of each output that a loss compares with a target, by the output's name.

    Args:
        objective: The losses.
        fitted: The statistics of the training split.
        classes: The names of the classes in the config.
    """
    named, scales = fitted_classes(fitted), fitted_scales(fitted)
    found: dict[str, Reading] = {}
    for term in objective.terms.values():
        if not isinstance(term, Term) or term.inputs is not None or term.output in found:
            continue
        reading = _reading(term, names=named.get(term.target, classes), scale=scales.get(term.target))
        if reading is not None:
            found[term.output] = reading
    return found


def _reading(term: Term, *, names: Sequence[str] | None, scale: tuple[np.ndarray, np.ndarray] | None) -> Reading | None:
    loss, target = term.loss, term.target
    for kind, word, axis in CLASSES:
        if isinstance(loss, kind):
            return Reading(target=target, kind=word, axis=axis, names=names)
    if isinstance(loss, YES_OR_NO):
        return Reading(target=target, kind="yes_or_no", names=names)
    if isinstance(loss, NUMBERS):
        mean, deviation = (None, None) if scale is None else (one.tolist() for one in scale)
        return Reading(target=target, kind="numbers", mean=mean, deviation=deviation)
    return None
