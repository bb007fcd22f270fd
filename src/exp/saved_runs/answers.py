"""Predictions from the outputs of a network: classes with probabilities, or numbers in the units of the data."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from torch import nn

from exp.data.entries import fitted_classes, fitted_scales
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, BCEWithLogits, CrossEntropy

Kind = Literal["classes", "log_classes", "yes_or_no", "numbers"]
# A mean or deviation: one number for all entries of a target, or one number per entry.
Numbers = float | Sequence[float]
# Loss classes for classification. Each has the kind of output that the loss expects, and the axis of the classes.
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
    """A description of a network output, from which predictions are computed.

    Args:
        target: Name of the target that a loss compares with the output.
        kind: Kind of the output: `classes` for scores of classes, `log_classes` for log probabilities of classes,
            `yes_or_no` for scores of a binary classification, and `numbers` for a regression.
        axis: Axis of the classes. Default: -1.
        names: Class names in order. Default: None, for classes without names.
        mean: Mean of the target in the training data, if training standardized the target. Default: None.
        deviation: Standard deviation of the target in the training data, if training standardized the target. Default:
            None.
    """

    target: str
    kind: Kind
    axis: int = -1
    names: Sequence[str] | None = None
    mean: Numbers | None = None
    deviation: Numbers | None = None

    def answers(self, output: np.ndarray) -> dict[str, np.ndarray]:
        """Return the predictions for an output.

        Args:
            output: Output `[N, ...]` of the network.

        Returns:
            Arrays by name:

            - for classes: `class`, int64 `[N, ...]`, which is -1 if a score is nan; `probability`, the probability of
              this class; and `probabilities` of all classes, which are the last axis
            - for a binary classification: `probability`
            - for a regression: `prediction`
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
    """Return a description of each output that a loss compares with a target, by output name.

    Args:
        objective: Objective with the losses.
        fitted: Statistics of the training split, as saved in a checkpoint.
        classes: Class names in the config. None: the config has no class names.
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
