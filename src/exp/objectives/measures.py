"""Metrics of a run, with the names of the values that they read and of the numbers that they return.

This module uses the private names `_update_count`, `_reductions` and `_defaults` of torchmetrics 1.9. Tests cover these
names.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchmetrics import Metric, MetricCollection, classification

from exp.errors import LIBRARIES, REFUSALS, ExpError, RunError, UserCodeError, message_of, shorten
from exp.functions.at_least_float32 import summing_dtype
from exp.nested import map_tensors
from exp.objectives.loss_inputs import Values, full, names_of_values, unknown_value
from exp.objectives.metrics import AUROC
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, CrossEntropy

# Metrics of torchmetrics that compute with probabilities. They convert scores to probabilities by a softmax
# (OF_CLASSES) or a sigmoid (OF_ANSWERS). SCORES pairs these metrics with the losses that apply the same function.
OF_CLASSES = (
    classification.MulticlassPrecisionRecallCurve,
    classification.MulticlassCalibrationError,
    classification.MulticlassHingeLoss,
)
OF_ANSWERS = (
    *(classification.BinaryStatScores, classification.MultilabelStatScores, classification.MultilabelExactMatch),
    *(classification.BinaryConfusionMatrix, classification.MultilabelConfusionMatrix),
    *(classification.BinaryPrecisionRecallCurve, classification.MultilabelPrecisionRecallCurve),
    *(classification.BinaryCalibrationError, classification.BinaryHingeLoss, classification.MultilabelCoverageError),
    *(classification.MultilabelRankingAveragePrecision, classification.MultilabelRankingLoss),
)
SCORES = (
    *((OF_CLASSES, loss) for loss in (CrossEntropy, NLL, nn.CrossEntropyLoss, nn.NLLLoss)),
    *((OF_ANSWERS, loss) for loss in (nn.BCEWithLogitsLoss, nn.MultiLabelSoftMarginLoss)),
)
# A state of a metric: a tensor, or a list with one tensor per batch.
State = Tensor | list[Tensor]
DEFAULTS = ("output", "target")
ENTRIES = "a number, or a vector, mapping or tuple of numbers with the same length for each result"


class EntryError(RunError):
    """Error of a metric that returns neither a number nor a collection of numbers."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric, with the names of the values that the metric reads.

    Args:
        name: The name of the metric in the config.
        metric: A metric of torchmetrics.
        output: The name of the output: `output` (default), or a name in the mapping that the network or the data set
            returns.
        target: The name of the target: `target` (default), or a name in the mapping that the network or the data set
            returns.
        inputs: Names of values by parameter of `update`, for a metric that does not take an output and a target. For
            torchmetrics' MeanMetric, an example is {value: error, weight: size}. Default: None.
        are_scores: Whether exp converts outputs from scores to probabilities. Default: false. If false, torchmetrics
            decides for each batch, and takes scores for probabilities if all of them are between 0 and 1.

    Raises:
        ValueError: `inputs` is set together with `output` or `target`.
    """

    name: str
    metric: Metric | MetricCollection
    output: str = "output"
    target: str = "target"
    inputs: Mapping[str, str] | None = None
    are_scores: bool = False

    def __post_init__(self) -> None:
        if self.inputs is not None and (self.output, self.target) != DEFAULTS:
            raise ValueError(f"inputs is {dict(self.inputs)}, next to output or target; expected only one of the two")

    @property
    def key(self) -> str:
        """The config key of the metric, such as `metrics.accuracy`."""
        return f"metrics.{self.name}"

    @property
    def is_known(self) -> bool:
        """True if the classes of the metric and of all metrics inside it are from a library, not from the user."""
        return all(
            isinstance(part, Metric | MetricCollection) and type(part).__module__.partition(".")[0] in LIBRARIES
            for part in self.metric.modules()
        )

    @property
    def names(self) -> Mapping[str, str]:
        """The names of the values that the metric reads, by config key relative to the metric, such as `output`."""
        return names_of_values(self.inputs, output=self.output, target=self.target)

    @property
    def parts(self) -> Iterator[tuple[str, Metric]]:
        """The metrics that have states, each with its path inside this metric.

        A collection contains several metrics. The path of the metric itself is empty.
        """
        yield from ((path, part) for path, part in self.metric.named_modules() if isinstance(part, Metric))

    def clone(self) -> Measure:
        """Return a copy of the metric with empty states."""
        return replace(self, metric=self.metric.clone())

    def read(self, values: Values) -> dict[str, object]:
        """Return the values that the metric reads, by name. Tensors are detached from the graph.

        Raises:
            RunError: A name has no value. The message proposes the closest name.
        """
        for key, name in self.names.items():
            if name not in values:
                fix = f"Set {self.key}.{key} to another name, or remove the metric with ~{self.key}"
                raise RunError(unknown_value(f"{self.key}.{key}", name, values, fix=fix))
        return {name: map_tensors(values[name], Tensor.detach) for name in self.names.values()}

    def update(self, read: Mapping[str, object]) -> None:
        """Add a batch to the metric.

        The sums in metrics of torchmetrics are float64, independent of the precision of the network.

        Args:
            read: The result of the method `read` for the batch.

        Raises:
            RunError: The metric rejects the values.
            UserCodeError: A user's metric fails.
        """
        given = {name: map_tensors(read[name], _double if self.is_doubled else full) for name in self.names.values()}
        device = next((value.device.type for value in given.values() if isinstance(value, Tensor)), "cpu")
        self._double_states(torch.device(device))
        is_autocast = torch.is_autocast_enabled(device)
        with _named_errors(self, "update"), torch.autocast(device, enabled=False) if is_autocast else nullcontext():
            self._call(given)

    def _double_states(self, device: torch.device) -> None:
        dtype = summing_dtype(device)
        if self.is_doubled and any(part.dtype != dtype for _, part in self.parts):
            self.metric.to(dtype)

    def _call(self, given: Mapping[str, Any]) -> None:
        metric = self.metric
        if self.inputs is not None:
            metric.update(**{parameter: given[name] for parameter, name in self.inputs.items()})
            return
        output, target = given[self.output], given[self.target]
        ignored: Any = metric.ignore_index if isinstance(metric, classification.MulticlassHingeLoss) else None
        if ignored is not None and bool((target == ignored).all()):
            return  # torchmetrics' hinge loss fails if all targets of a batch are ignored (seen in 1.9)
        if self.are_scores:
            has_answers = any(isinstance(part, OF_ANSWERS) for _, part in self.parts)
            axis = -1 if isinstance(metric, AUROC) else 1
            # In float32, probabilities of scores above 17 would be 1, and AUROC would lose their order.
            scores = _double(output)
            output = scores.sigmoid() if has_answers else scores.softmax(axis)
        metric.update(output, target)

    @cached_property
    def is_doubled(self) -> bool:
        """True if the metric receives float64 values.

        This is the case for metrics of torchmetrics that sum or sort values. It is not the case for metrics that only
        count classes.
        """
        held = [state for _, part in self.parts for state in part.metric_state.values()]
        sums = any(isinstance(state, list) or state.is_floating_point() for state in held)
        is_theirs = all(type(part).__module__.startswith("torchmetrics") for _, part in self.parts)
        return self.is_known and is_theirs and (sums or any(isinstance(part, OF_ANSWERS) for _, part in self.parts))

    def compute(self) -> dict[str, Tensor]:
        """Return the numbers of the metric over all ranks. Every rank must call this method.

        Returns:
            0-d tensors by the names that `entries_of` gives them. The name of a single number is empty.

        Raises:
            EntryError: The metric returns something other than numbers.
            RunError: The metric cannot compute its value.
            UserCodeError: A user's metric fails.
        """
        with _named_errors(self, "compute"):
            fill_empty_states(self)
            value = self.metric.compute()
        try:
            return dict(entries_of(value))
        except EntryError as error:
            got = f"{self.key}: {type(self.metric).__name__} returns {error}"
            raise EntryError(f"{got}; expected {ENTRIES}") from error

    def states(self) -> dict[str, State]:
        """Return copies of the states, combined over all ranks. Every rank must call this method.

        Returns:
            States by `path.name`. If torchmetrics neither adds nor concatenates a state, the copy has one element for
            each rank, `[ranks, ...]`.
        """
        fill_empty_states(self)
        found = {}
        for path, part in self.parts:
            with part.sync_context():
                # The states are copied, because torchmetrics resets synced states, and other states change with the
                # next batch.
                found.update({_join(path, name): _copy(state) for name, state in part.metric_state.items()})
        return found

    def restore(self, states: Mapping[str, State], *, rank: int, ranks: int) -> None:
        """Restore saved states.

        Rank 0 receives the combined states, and the other ranks start with empty states. If torchmetrics does not
        combine a state, each rank receives the state that this rank saved.

        Args:
            states: The result of the method `states`.
            rank: The rank of this process.
            ranks: The number of ranks of the run.

        Raises:
            RunError: The number of ranks has changed, and torchmetrics does not combine a state over ranks.
        """
        for path, part in self.parts:
            # Convert the metric before its states are set, so that the states have the same dtypes on all ranks.
            self._double_states(part.device)
            own: dict[str, State] = {
                name: states[_join(path, name)] for name in part.metric_state if _join(path, name) in states
            }
            apart = {
                name: state
                for name, state in own.items()
                if part._reductions[name] is None and isinstance(state, Tensor)
            }
            own |= {name: self._own_share(part, name, state, rank=rank, ranks=ranks) for name, state in apart.items()}
            for name, state in own.items():
                if rank == 0 or name in apart:
                    is_list = isinstance(part.metric_state[name], list)
                    setattr(part, name, [state] if is_list and isinstance(state, Tensor) else state)
                    # Without this count, compute warns that update was never called. torchmetrics 1.9 has no public way
                    # to set the count.
                    part._update_count = 1

    def _own_share(self, part: Metric, name: str, state: Tensor, *, rank: int, ranks: int) -> Tensor:
        alone = part._defaults[name]
        assert isinstance(alone, Tensor)
        before = len(state) if state.dim() > alone.dim() else 1
        if before != ranks:
            raise RunError(
                f"{self.key}: got {ranks} ranks; expected {before} ranks, because the checkpoint is within an epoch "
                f"and {type(part).__name__} has separate states for each rank. Resume on {before} ranks, resume from "
                "a checkpoint of the end of an epoch, or remove train from metric_stages"
            )
        return state[rank] if state.dim() > alone.dim() else state


def as_measure(name: str, metric: Measure | Metric | MetricCollection) -> Measure:
    """Return a metric as a Measure. A metric of torchmetrics reads the values `output` and `target`."""
    return metric if isinstance(metric, Measure) else Measure(name=name, metric=metric)


def as_scored(measure: Measure, objective: Objective) -> Measure:
    """Return the measure with are_scores=True if a loss applies a softmax or sigmoid to the same output.

    Otherwise, the measure is returned unchanged.
    """
    parts = [part for _, part in measure.parts]
    losses = tuple(loss for kinds, loss in SCORES if any(isinstance(part, kinds) for part in parts))
    is_one = any(
        isinstance(term, Term) and term.output == measure.output and isinstance(term.loss, losses)
        for term in objective.terms.values()
    )
    return replace(measure, are_scores=True) if is_one and measure.inputs is None else measure


def entries_of(value: object) -> Iterator[tuple[str, Tensor]]:
    """Yield the name and the value of each number in the result of a metric.

    The name of a single number is empty. In a vector or a tuple, the names are 0, 1, 2 and so on. In a mapping, the
    names are the keys. For a vector in a mapping or a tuple, both names are joined, as in `recall/3`.

    Args:
        value: The result of a metric's `compute`.

    Yields:
        The name, and the number as a 0-d tensor.

    Raises:
        EntryError: The result contains a matrix, or a value that is not a number.
    """
    if isinstance(value, bool | int | float):
        value = torch.tensor(value)
    if isinstance(value, Tensor):
        if value.numel() == 1:
            yield "", value.detach().reshape(())
            return
        if value.dim() != 1 or not len(value):
            raise EntryError(f"a tensor of shape {list(value.shape)}")
        yield from ((str(place), number) for place, number in enumerate(value.detach().unbind()))
        return
    if not isinstance(value, Mapping | Sequence) or isinstance(value, str):
        raise EntryError(f"a {type(value).__name__}")
    if isinstance(value, tuple) and hasattr(value, "_fields"):
        value = dict(zip(value._fields, value, strict=True))
    for name, part in value.items() if isinstance(value, Mapping) else enumerate(value):
        yield from ((f"{name}/{entry}" if entry else str(name), number) for entry, number in entries_of(part))


def entry_tag(name: str, stage: str, entry: str) -> str:
    """Return the TensorBoard tag of a number that a metric returns.

    Args:
        name: The name of the metric.
        stage: The stage: train, val or test.
        entry: The name of the number. Empty if the metric returns a single number.
    """
    return f"{name}/{stage}/{entry}" if entry else f"{name}/{stage}"


def fill_empty_states(measure: Measure) -> None:
    """Set the states of a rank without samples to empty states with the shapes and dtypes of the other ranks.

    Every rank must call this function. torchmetrics 1.9 gathers states without a comparison of their shapes. A rank
    without samples has initial states and placeholders for empty lists, with other shapes and dtypes than the states
    after a batch. The ranks would hang, read wrong memory or abort.
    """
    if not dist.is_available() or not dist.is_initialized():
        return
    for _, part in measure.parts:
        states, group = part.metric_state, part.process_group
        if not states or dist.get_world_size(group) == 1:
            continue
        mine = {name: _form(state) for name, state in states.items()} if part.update_called else {}
        found: list[Any] = [None] * dist.get_world_size(group)
        dist.all_gather_object(found, mine, group=group)
        for name, state in states.items():
            known = next((one[name] for one in found if one.get(name) is not None), None)
            if known is None or mine.get(name) is not None:
                continue
            shape, dtype = known
            if isinstance(state, list):
                setattr(part, name, [torch.empty((0, *shape[1:]), dtype=dtype, device=part.device)])
            else:
                setattr(part, name, state.to(dtype).expand(shape).clone())


def _form(state: State) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return the shape and dtype of a state, or of the first tensor in a list. Return None for an empty list."""
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype
    return _form(state[0]) if state else None


@contextmanager
def _named_errors(measure: Measure, doing: str) -> Iterator[None]:
    """Convert exceptions of a metric to errors that name the metric.

    An exception of a library's metric becomes a RunError. A StopIteration of any metric becomes a UserCodeError.

    Args:
        measure: The metric.
        doing: The called method, for the message: update or compute.
    """
    try:
        yield
    except ExpError:
        raise
    except (*REFUSALS, AttributeError) as error:  # AttributeError: a value that is not a tensor
        if not measure.is_known:
            raise
        name = type(measure.metric).__name__
        raise RunError(f"{measure.key}: {name}.{doing} rejects its values: {shorten(message_of(error))}") from error
    except StopIteration as error:  # Lightning would end the epoch
        name = type(measure.metric).__name__
        raise UserCodeError.of(error, what=f"metric {name}, in {doing},") from error


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(summing_dtype(tensor.device)) if tensor.is_floating_point() else tensor


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _copy(value: State) -> State:
    return value.detach().clone() if isinstance(value, Tensor) else [item.detach().clone() for item in value]
