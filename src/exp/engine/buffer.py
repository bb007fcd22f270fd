"""Buffers that collect values on their device and copy them to the host together.

Recorded stores the values of an optimizer step until the values are written. EpochValues sums the losses and metrics of
a stage over an epoch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from typing import TYPE_CHECKING, Any, SupportsFloat, TypeVar

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from exp.errors import RunError
from exp.functions.at_least_float32 import summing_dtype
from exp.hooks.panels import Panel, on_host
from exp.objectives.loss_inputs import Values
from exp.objectives.measures import Measure, entry_tag
from exp.objectives.objective import Mean
from exp.objectives.term import AbstractTerm
from exp.shared_types import Stage

if TYPE_CHECKING:
    from exp.strategies.pipeline_stages import Stages

TRAIN_METRICS, TRAIN_LOSSES = "exp_train_metrics", "exp_train_losses"
Value = TypeVar("Value")
EXPECTED = "expected one number, or a panel such as exp.hooks.panels.Histogram"


@dataclass(slots=True)
class Recorded:
    """Values of one optimizer step.

    Attributes:
        index: Number of the step, counted from 1.
        size: Number of samples in the step's global batches.
        losses: 0-d tensors, computed from the samples of this rank. The first is the loss. If the objective has several
            terms, the terms follow.
        values: Values of hooks and of the optimizer by tag: 0-d tensors on the device, floats, or panels.
        terms: Names of the computed terms. None means all terms.
        panels: Panels on the host by tag. `take_to_host` moves them from `values` to this dict.
    """

    index: int
    size: int
    losses: Sequence[Tensor]
    values: dict[str, Any]
    terms: Sequence[str] | None = None
    panels: dict[str, Panel] = field(default_factory=dict)


def take_to_host(steps: Sequence[Recorded], strategy: Strategy) -> list[tuple[Recorded, list[float]]]:
    """Copy the values and losses of several steps to the host together. Every rank must call this function.

    Args:
        steps: One or more steps.
        strategy: Strategy of the run.

    Returns:
        Pairs of a step and the losses of the step. In each step, `values` now contains floats. The losses are means
        over ranks.
    """
    losses = torch.stack([loss for step in steps for loss in step.losses])
    losses = strategy.reduce(losses, reduce_op="mean")
    waiting = [
        (step.values, tag, _one_number(tag, value))
        for step in steps
        for tag, value in step.values.items()
        if type(value) is Tensor
    ]
    numbers = _on_host([losses, *(value for _, _, value in waiting)])
    end = len(losses)
    for (values, tag, _), number in zip(waiting, numbers[end:], strict=True):
        values[tag] = number
    _take_panels(steps)
    # The report does not accept NumPy numbers.
    for step in steps:
        for tag, value in step.values.items():
            if type(value) is not float:
                step.values[tag] = _float(tag, value)
    # Steps may have different terms, because some phases do not run in every step.
    ends = list(accumulate(len(step.losses) for step in steps))
    return [(step, numbers[end - len(step.losses) : end]) for step, end in zip(steps, ends, strict=True)]


def on_host_values(values: Mapping[str, Any]) -> tuple[dict[str, float], dict[str, Panel]]:
    """Copy values of hooks to the host, and return the numbers and the panels as two dicts by tag."""
    panels = {tag: value for tag, value in values.items() if isinstance(value, Panel)}
    numbers = {
        tag: _one_number(tag, value).item() if isinstance(value, Tensor) else _float(tag, value)
        for tag, value in values.items()
        if tag not in panels
    }
    return numbers, dict(zip(panels, on_host(list(panels.values())), strict=True)) if panels else {}


def _take_panels(steps: Sequence[Recorded]) -> None:
    """Move the panels of each step from `values` to `panels`, and copy them to the host."""
    found = [(step, tag, value) for step in steps for tag, value in step.values.items() if isinstance(value, Panel)]
    if found:
        for (step, tag, _), panel in zip(found, on_host([panel for _, _, panel in found]), strict=True):
            del step.values[tag]
            step.panels[tag] = panel


def _one_number(tag: str, value: Tensor) -> Tensor:
    if value.numel() != 1:
        raise RunError(f"the value logged as {tag} is a tensor of shape {list(value.shape)}; {EXPECTED}")
    return value.reshape(())


def _float(tag: str, value: SupportsFloat) -> float:
    try:
        return float(value)
    except (TypeError, ValueError) as error:
        raise RunError(f"the value logged as {tag} is {value!r}; {EXPECTED}") from error


def _on_host(tensors: Sequence[Tensor]) -> list[float]:
    """Return the numbers of all tensors as one list. The first tensor is a vector, and the others are 0-d."""
    if all(tensor.device.type == "cpu" for tensor in tensors):
        return tensors[0].tolist() + [tensor.item() for tensor in tensors[1:]]
    return gather_numbers(tensors)


def gather_numbers(tensors: Sequence[Tensor]) -> list[float]:
    """Return the numbers of all tensors as one list, with a single copy to the host.

    Tensors of the same device and dtype are stacked first.
    """
    losses, others = tensors[0], tensors[1:]
    # float64 represents counts and float32 values exactly. The mps device has no float64.
    dtype = torch.float32 if losses.device.type == "mps" else torch.float64
    kinds: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for place, tensor in enumerate(others):
        kinds.setdefault((tensor.device, tensor.dtype), []).append(place)
    stacks = [torch.stack([others[place].detach() for place in places]) for places in kinds.values()]
    joined = torch.cat([losses.to(dtype), *(stack.to(device=losses.device, dtype=dtype) for stack in stacks)])
    numbers = joined.tolist()
    result = numbers[: len(losses)] + [0.0] * len(others)
    places = [place for kind in kinds.values() for place in kind]
    for place, number in zip(places, numbers[len(losses) :], strict=True):
        result[len(losses) + place] = number
    return result


class EpochValues(nn.Module):
    """Losses and metrics of one epoch of a stage, collected on the device.

    Each batch adds the mean of each term, weighted by the divisor of the mean, such as the number of samples. The
    result for the epoch therefore equals the term computed from all samples of the stage. At the end, all values are
    copied to the host together.

    Args:
        stage: Stage of the values.
        terms: Terms of the objective by name. If there are several terms, each term is also logged under a separate
            tag.
        measures: Metrics of the stage.

    Attributes:
        summed: Pairs of name and term. The loss is the weighted sum of these terms. The means passed to `add` have the
            same order. With phases, a term occurs once per phase.
        source: Pipeline stages, if only one rank of a pipeline has the outputs. None if this rank has the outputs.
        leaves_out_lost: True if `add` ignores means that are nan or infinite.
    """

    def __init__(self, *, stage: Stage, terms: Mapping[str, AbstractTerm], measures: Sequence[Measure]) -> None:
        super().__init__()
        self.stage = stage
        self.terms = tuple(terms)
        self.summed: Sequence[tuple[str, AbstractTerm]] = tuple(terms.items())
        self.measures = tuple(measures)
        # A ModuleList, because a ModuleDict does not accept names such as `update`.
        self.metrics = nn.ModuleList(measure.metric for measure in measures)
        self.source: Stages | None = None
        self.leaves_out_lost = False
        self.clear_losses()

    def clear_losses(self) -> None:
        """Reset the sums of losses."""
        self._sums: Tensor | None = None
        # Divisors that are numbers of samples are floats on the host, because adding floats needs no operation on the
        # device.
        self._divisors: list[Tensor | float] = [0.0] * len(self.summed)

    def add(self, means: Sequence[Mean], *, first: int = 0) -> None:
        """Add the means of one batch, each weighted by its divisor. A mean with the divisor 0 is ignored.

        Args:
            means: Pairs of a mean and its divisor, for consecutive terms of `summed`.
            first: Index of the first of these terms in `summed`. Default: 0.
        """
        if self.leaves_out_lost:
            means = [(mean.where(mean.isfinite(), 0.0), divisor * mean.isfinite()) for mean, divisor in means]
        dtype = summing_dtype(means[0][0].device)
        totals = [mean.detach().to(dtype) * divisor for mean, divisor in means]
        for place, (_, divisor) in enumerate(means):
            if isinstance(divisor, Tensor):
                totals[place] = totals[place].where(divisor > 0, 0.0)
            self._divisors[first + place] = self._divisors[first + place] + divisor
        sums = torch.stack(totals)
        if len(means) < len(self.summed):
            sums = nn.functional.pad(sums, (first, len(self.summed) - first - len(means)))
        self._sums = sums if self._sums is None else self._sums + sums

    def read(self, values: Values) -> dict[str, Any]:
        """Return the values that the metrics need, by name. The tensors are detached from the graph.

        Args:
            values: All values of the forward by name.

        Raises:
            RunError: A value is missing.
        """
        found: dict[str, Any] = {}
        for measure in self.measures:
            found |= measure.read(values)
        return found

    def update_metrics(self, read: Mapping[str, Any]) -> None:
        for measure in self.measures:
            measure.update(read)

    def finish(self, strategy: Strategy) -> dict[str, float]:
        """Return the losses and metrics of the epoch over all ranks, by tag, and reset the sums and metrics.

        Every rank must call this method. A term with the divisor 0 is left out of the result and of the loss.

        Raises:
            RunError: A metric returned something other than numbers.
        """
        device = strategy.root_device
        totals = self.totals(strategy)
        metrics = self._compute()
        # Numbers are stacked and copied together, because each copy to the host waits for the device.
        found = [torch.stack(list(one.values())).to(device, totals.dtype) for one in metrics.values() if one]
        values = torch.cat([totals, *found])
        self.clear_losses()
        count = len(self.summed)
        numbers = values.tolist()
        sums, divisors, others = numbers[:count], numbers[count : 2 * count], numbers[2 * count :]
        terms = [
            (name, total / divisor, term.weight)
            for (name, term), total, divisor in zip(self.summed, sums, divisors, strict=True)
            if divisor
        ]
        result: dict[str, float] = {}
        if terms:
            result[f"loss/{self.stage}"] = sum(mean * weight for _, mean, weight in terms)
        if len(self.terms) > 1:
            means = {name: mean for name, mean, _ in terms}
            result.update({f"loss/{self.stage}/{name}": means[name] for name in self.terms if name in means})
        tags = [entry_tag(name, self.stage, entry) for name, entries in metrics.items() for entry in entries]
        return result | dict(zip(tags, others, strict=True))

    def totals(self, strategy: Strategy) -> Tensor:
        """Return the sum of each term over all ranks, followed by the divisor of each term, as one tensor.

        Every rank must call this method.
        """
        device = strategy.root_device
        dtype = summing_dtype(device)
        sums = torch.zeros(len(self.summed), dtype=dtype, device=device) if self._sums is None else self._sums
        divisors = [torch.as_tensor(divisor, dtype=dtype, device=device) for divisor in self._divisors]
        totals: Tensor = strategy.reduce(torch.cat([sums, torch.stack(divisors)]), reduce_op="sum")
        return totals

    def state(self, strategy: Strategy, *, with_losses: bool) -> dict[str, object]:
        """Return the checkpoint entries with the states of the metrics and the sums of the losses over all ranks.

        Every rank must call this method.

        Args:
            strategy: Strategy of the run.
            with_losses: Whether to include the sums of the losses.
        """
        state: dict[str, object] = {}
        if self.measures:
            state[TRAIN_METRICS] = self._from_source(lambda: {one.name: one.states() for one in self.measures})
        return state | ({TRAIN_LOSSES: self.totals(strategy)} if with_losses else {})

    def restore(self, state: Mapping[str, Any], *, device: torch.device, rank: int, ranks: int) -> None:
        """Load the entries that `state` returned.

        Args:
            state: Entries of a checkpoint.
            device: Device of the sums.
            rank: Index of this rank's part of each global batch.
            ranks: Number of parts of each global batch.

        Raises:
            RunError: A metric does not support a changed number of ranks.
        """
        metrics = state.get(TRAIN_METRICS, {})
        for measure in self.measures:
            if measure.name in metrics:
                measure.restore(metrics[measure.name], rank=rank, ranks=ranks)
        if TRAIN_LOSSES in state and rank == 0:  # rank 0 alone loads the sums, because they already cover all ranks
            self._sums, divisors = state[TRAIN_LOSSES].to(device).tensor_split([len(self.summed)])
            self._divisors = list(divisors.unbind())

    def _compute(self) -> Mapping[str, Mapping[str, Tensor]]:
        """Reset the metrics, and return the values of each metric as a dict by metric name."""
        values = self._from_source(lambda: {measure.name: measure.compute() for measure in self.measures})
        for measure in self.measures:
            measure.metric.reset()
        return values

    def _from_source(self, make: Callable[[], Mapping[str, Value]]) -> Mapping[str, Value]:
        """Call `make` only on the rank with the network's outputs, and return the result on every rank."""
        if self.source is None:
            return make()
        return self.source.broadcast_output(make() if self.source.has_output else {})
