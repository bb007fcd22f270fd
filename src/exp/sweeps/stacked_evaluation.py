"""One stage's evaluation of all members of a stack: each one's loss, its terms and its metrics.

A member's loss is computed from its own outputs, so that it is to the last bit that of a run alone, and so is which of
its checkpoints is the best. Counts of classes, which accuracy and F1 are made of, are taken for all members at once;
any other metric is updated by each member's outputs in turn.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exp.engine.forward import Values
from exp.objectives.loss_inputs import full, require_classes_last
from exp.objectives.measures import Measure, entry_tag
from exp.objectives.metrics import F1, Accuracy
from exp.objectives.objective import Objective
from exp.shared_types import Batch, Stage

COUNTS = ("tp", "fp", "tn", "fn")


class StackedEvaluation:
    """Sums over the batches of a stage.

    objectives: of each member. measures: with states that are left alone.
    """

    def __init__(self, *, stage: Stage, objectives: Sequence[Objective], measures: Sequence[Measure]) -> None:
        self.stage = stage
        self._objectives, self._measures = objectives, measures
        terms = objectives[0].terms
        self._sums = [dict.fromkeys(terms, 0.0) for _ in objectives]
        self._divisors = [dict.fromkeys(terms, 0.0) for _ in objectives]
        self._counted = {measure.name: Counts(measure) for measure in measures if is_counted(measure)}
        others = [measure for measure in measures if measure.name not in self._counted]
        self._each = [[measure.clone() for measure in others] for _ in objectives]

    def add(self, each: Sequence[Values], batch: Batch) -> None:
        """Add a batch; in floats of the width in which exp.engine.buffer.EpochValues sums. each: of each member."""
        for values, objective, sums, divisors in zip(each, self._objectives, self._sums, self._divisors, strict=True):
            _, parts = objective(values, batch)
            for name, (mean, divisor) in zip(
                objective.terms, objective.means(values, parts, size=batch.size), strict=True
            ):
                number = float(divisor)
                sums[name] += mean.item() * number if number > 0 else 0.0
                divisors[name] += number
        for counts in self._counted.values():
            counts.add(each)
        for values, measures in zip(each, self._each, strict=True):
            for measure in measures:
                measure.update(measure.read(values))

    def finish(self) -> list[dict[str, float]]:
        """The values of each member by tag."""
        found = []
        for place, (objective, sums, divisors) in enumerate(
            zip(self._objectives, self._sums, self._divisors, strict=True)
        ):
            own = {name: total / divisors[name] for name, total in sums.items() if divisors[name]}
            values: dict[str, float] = {}
            if own:
                values[f"loss/{self.stage}"] = sum(mean * objective.terms[name].weight for name, mean in own.items())
            if len(objective.terms) > 1:
                values |= {f"loss/{self.stage}/{name}": mean for name, mean in own.items()}
            found.append(values | self._metrics(place))
        return found

    def _metrics(self, place: int) -> dict[str, float]:
        each = {measure.name: measure for measure in self._each[place]}
        values: dict[str, float] = {}
        for measure in self._measures:
            counts = self._counted.get(measure.name)
            entries = each[measure.name].compute() if counts is None else counts.compute(place)
            values |= {entry_tag(measure.name, self.stage, entry): float(value) for entry, value in entries.items()}
        return values


def is_counted(measure: Measure) -> bool:
    """Whether a metric is made of counts of classes alone, of each sample's highest score."""
    metric: Any = measure.metric
    return (
        type(metric) in (Accuracy, F1)
        and measure.inputs is None
        and metric.top_k == 1
        and metric.multidim_average == "global"
        and metric.ignore_index is None
    )


class Counts:
    """True and false positives and negatives of each member, whole numbers: the states of one metric."""

    def __init__(self, measure: Measure) -> None:
        self._measure = measure.clone()
        self._states: dict[str, Tensor] = {}

    def add(self, each: Sequence[Values]) -> None:
        """Add a batch, of each member: scores `[..., V]` against class numbers `[...]`."""
        metric: Any = self._measure.metric
        read = [self._measure.read(values) for values in each]
        scores = torch.stack([full(one[self._measure.output]) for one in read])
        first = read[0][self._measure.target]
        require_classes_last(metric, scores[0], first)
        classes, members = metric.num_classes, len(each)
        answers = scores.argmax(-1).reshape(members, -1)
        right = torch.stack([one[self._measure.target] for one in read]).reshape(members, -1)
        if metric.average == "micro":
            positives = (answers == right).sum(1, keepdim=True)
            missed = answers.shape[1] - positives
            found = {"tp": positives, "fp": missed, "fn": missed}
            found["tn"] = classes * answers.shape[1] - (positives + 2 * missed)
        else:
            offsets = torch.arange(members)[:, None] * classes**2
            table = torch.bincount((offsets + right * classes + answers).flatten(), minlength=members * classes**2)
            table = table.view(members, classes, classes)
            positives = table.diagonal(dim1=1, dim2=2)
            found = {"tp": positives, "fp": table.sum(1) - positives, "fn": table.sum(2) - positives}
            found["tn"] = answers.shape[1] - (found["tp"] + found["fp"] + found["fn"])
        for name in COUNTS:
            self._states[name] = self._states[name] + found[name] if name in self._states else found[name]

    def compute(self, place: int) -> Mapping[str, Tensor]:
        """The metric's entries of one member."""
        metric: Any = self._measure.metric
        metric.reset()
        # In fp64 torchmetrics counts in that, too.
        states = {name: self._states[name][place].to(getattr(metric, name).dtype) for name in COUNTS}
        self._measure.restore(states, rank=0, ranks=1)
        return self._measure.compute()
