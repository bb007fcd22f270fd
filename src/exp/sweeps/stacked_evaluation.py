"""The evaluation of all members of a stack in one stage: the loss of each member, its terms and its metrics.

The loss of a member is computed from the outputs of that member alone. Therefore it equals the loss of a single run to
the last bit, and both runs choose the same best checkpoint.
"""

from __future__ import annotations

from collections.abc import Sequence

from exp.engine.forward import Values
from exp.objectives.measures import Measure, entry_tag
from exp.objectives.objective import Objective
from exp.shared_types import Batch, Stage


class StackedEvaluation:
    """Sums losses and metrics of every member over the batches of a stage.

    Args:
        stage: Stage that is evaluated.
        objectives: Objective of each member.
        measures: Metrics of the stage. Each member updates copies of them.
    """

    def __init__(self, *, stage: Stage, objectives: Sequence[Objective], measures: Sequence[Measure]) -> None:
        self._members = [_MemberValues(stage, objective, measures) for objective in objectives]

    def add(self, each: Sequence[Values], batch: Batch) -> None:
        """Add a batch. each: the values of the network and the batch, per member."""
        for member, values in zip(self._members, each, strict=True):
            member.add(values, batch)

    def finish(self) -> list[dict[str, float]]:
        """Return the values of each member by tag."""
        return [member.finish() for member in self._members]


class _MemberValues:
    """Sums the terms of one member as floats, which are as wide as the sums of `exp.engine.buffer.EpochValues`."""

    def __init__(self, stage: Stage, objective: Objective, measures: Sequence[Measure]) -> None:
        self._stage, self._objective = stage, objective
        self._measures = [measure.clone() for measure in measures]
        self._sums = dict.fromkeys(objective.terms, 0.0)
        self._divisors = dict.fromkeys(objective.terms, 0.0)

    def add(self, values: Values, batch: Batch) -> None:
        objective = self._objective
        _, parts = objective(values, batch)
        means = objective.means(values, parts, size=batch.size)
        for name, (mean, divisor) in zip(objective.terms, means, strict=True):
            number = float(divisor)
            self._sums[name] += mean.item() * number if number > 0 else 0.0
            self._divisors[name] += number
        for measure in self._measures:
            measure.update(measure.read(values))

    def finish(self) -> dict[str, float]:
        terms, stage = self._objective.terms, self._stage
        means = {name: total / self._divisors[name] for name, total in self._sums.items() if self._divisors[name]}
        found: dict[str, float] = {}
        if means:
            found[f"loss/{stage}"] = sum(mean * terms[name].weight for name, mean in means.items())
        if len(terms) > 1:
            found |= {f"loss/{stage}/{name}": mean for name, mean in means.items()}
        for measure in self._measures:
            entries = measure.compute()
            found |= {entry_tag(measure.name, stage, entry): float(value) for entry, value in entries.items()}
        return found
