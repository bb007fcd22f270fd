"""Measures: a metric, the values that it compares, and the numbers that it gives, each under a name of its own.

Private of torchmetrics (1.9), and tested: `_update_count`, `_reductions` and `_defaults`.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
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
from exp.objectives.loss_inputs import Values, full, names_of_values
from exp.objectives.metrics import AUROC, in_order
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL, CrossEntropy
from exp.spelling import find_nearest

# Metrics of torchmetrics that take probabilities, or make them of scores, and the losses that do so, too.
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
# Of these, what depends on the order of the probabilities alone.
OF_CLASSES_BY_ORDER = (
    *(classification.MulticlassAUROC, classification.MulticlassAveragePrecision, classification.MulticlassLogAUC),
    classification.MulticlassEER,
)
OF_ANSWERS_BY_ORDER = (
    *(classification.BinaryAUROC, classification.BinaryAveragePrecision, classification.BinaryLogAUC),
    *(classification.MultilabelAUROC, classification.MultilabelAveragePrecision, classification.MultilabelLogAUC),
    *(classification.BinaryEER, classification.MultilabelEER, classification.MultilabelCoverageError),
    *(classification.MultilabelRankingAveragePrecision, classification.MultilabelRankingLoss),
)
# A state of a metric: a tensor, or one of each batch.
State = Tensor | list[Tensor]
DEFAULTS = ("output", "target")


ENTRIES = "one number, or as many each time: a vector, a mapping or a tuple of them"


class EntryError(RunError):
    """A metric gives what is neither a number nor entries that are numbers."""


@dataclass(frozen=True, kw_only=True)
class Measure:
    """A metric, and which values it looks at.

    name: in the config. metric: what torchmetrics' classes are.
    output, target: which of the values it compares: `output` and `target`, or a name that the network's or the data
        set's mapping has.
    inputs: in their place, for a metric of other values: a parameter of its update to the name of a value, such as
        {value: error, weight: size} of torchmetrics' MeanMetric.
    are_scores: whether the outputs are no probabilities, and become that before torchmetrics looks at them: it guesses,
        of each batch anew, and a small one of scores that all lie between 0 and 1 would count by itself.
    Raises: ValueError for inputs beside output or target.
    """

    name: str
    metric: Metric | MetricCollection
    output: str = "output"
    target: str = "target"
    inputs: Mapping[str, str] | None = None
    are_scores: bool = False

    def __post_init__(self) -> None:
        if self.inputs is not None and (self.output, self.target) != DEFAULTS:
            raise ValueError(f"inputs is {dict(self.inputs)}, beside output or target; expected one of the two")

    @property
    def key(self) -> str:
        """Of its node in the config."""
        return f"metrics.{self.name}"

    @property
    def is_known(self) -> bool:
        """Whether all of it is of a library, and nothing of it a network."""
        return all(
            isinstance(part, Metric | MetricCollection) and type(part).__module__.partition(".")[0] in LIBRARIES
            for part in self.metric.modules()
        )

    @property
    def names(self) -> Mapping[str, str]:
        """Which values it reads: a key of its node to the name there. The check asks whether somebody gives them."""
        return names_of_values(self.inputs, output=self.output, target=self.target)

    @property
    def parts(self) -> Iterator[tuple[str, Metric]]:
        """The metrics in it that hold states, by their path; itself by an empty one."""
        yield from ((path, part) for path, part in self.metric.named_modules() if isinstance(part, Metric))

    def clone(self) -> Measure:
        """The same with states of its own, as of no batch."""
        return replace(self, metric=self.metric.clone())

    def read(self, values: Values) -> dict[str, Any]:
        """What it looks at, by name, without the graph that led to it.

        Raises: RunError where there is none of a name, with what is there and the nearest one.
        """
        return {name: map_tensors(self._pick(values, place, name), Tensor.detach) for place, name in self.names.items()}

    def _pick(self, values: Values, place: str, name: str) -> Any:
        if name in values:
            return values[name]
        found = find_nearest(name, values)
        hint = f" Did you mean {found[0]}?" if found else ""
        raise RunError(
            f"{self.key}.{place} is {name!r}, which neither network nor batch gives; there are "
            f"{', '.join(sorted(values))}.{hint} Name another value there, or leave the metric out with ~{self.key}"
        )

    def update(self, read: Mapping[str, Any]) -> None:
        """Add a batch, whatever the precision of the network: torchmetrics' sums are float64.

        read: by name, as `read` gives it.

        Raises: RunError where the metric refuses the values; UserCodeError where a metric of one's own fails.
        """
        given = {name: map_tensors(read[name], _double if self.is_doubled else full) for name in self.names.values()}
        device = _device_type(given)
        self._double_states(torch.device(device))
        with _blame(self, "update"):
            if torch.is_autocast_enabled(device):
                with torch.autocast(device, enabled=False):
                    self._call(given)
            else:
                self._call(given)

    def _double_states(self, device: torch.device) -> None:
        dtype = summing_dtype(device)
        if self.is_doubled and any(part.dtype != dtype for _, part in self.parts):
            self.metric.to(dtype)

    def _call(self, given: Mapping[str, Any]) -> None:
        if self.inputs is None:
            output, target = given[self.output], given[self.target]
            if isinstance(self.metric, classification.MulticlassHingeLoss) and self._counts_none(target):
                return
            if isinstance(self.metric, AUROC):
                self.metric.update(output, target, are_scores=self.are_scores)
            elif self._ranks is not None:
                axis = 1 if self._ranks is OF_CLASSES_BY_ORDER else None
                self.metric.update(in_order(output, axis=axis, are_scores=self.are_scores), target)
            else:
                self.metric.update(self._probabilities(output) if self.are_scores else output, target)
        else:
            self.metric.update(**{parameter: given[name] for parameter, name in self.inputs.items()})

    def _counts_none(self, target: Tensor) -> bool:
        """Whether all targets of a batch are ignored, on which torchmetrics' hinge loss fails (seen in 1.9)."""
        ignored: Any = self.metric.ignore_index
        return ignored is not None and bool((target == ignored).all())

    def _probabilities(self, output: Tensor) -> Tensor:
        if any(isinstance(part, OF_ANSWERS) for _, part in self.parts):
            return output.sigmoid()
        return output.softmax(1)

    @cached_property
    def is_doubled(self) -> bool:
        """Whether it is given float64: metrics of torchmetrics that sum or sort, and do not only count classes."""
        held = [state for _, part in self.parts for state in part.metric_state.values()]
        sums = any(isinstance(state, list) or state.is_floating_point() for state in held)
        is_theirs = all(type(part).__module__.startswith("torchmetrics") for _, part in self.parts)
        return self.is_known and is_theirs and (sums or any(isinstance(part, OF_ANSWERS) for _, part in self.parts))

    @cached_property
    def _ranks(self) -> tuple[type[Metric], ...] | None:
        """The kinds of which all of it is, if it looks at the order of the outputs alone."""
        kinds = [part for _, part in self.parts if isinstance(part, (*OF_CLASSES, *OF_ANSWERS))]
        for ranked in (OF_CLASSES_BY_ORDER, OF_ANSWERS_BY_ORDER):
            if kinds and all(isinstance(part, ranked) and getattr(part, "thresholds", None) is None for part in kinds):
                return ranked
        return None

    def compute(self) -> dict[str, Tensor]:
        """The numbers over all ranks, 0-d, each by the name of its entry; of one number alone that is empty.

        Every rank must call it.

        Raises: EntryError where it gives something else than numbers; RunError, UserCodeError as `update`.
        """
        with _blame(self, "compute"):
            fill_empty_states(self)
            value = self.metric.compute()
        try:
            return dict(entries_of(value))
        except EntryError as error:
            got = f"{self.key}: {type(self.metric).__name__} gives {error}"
            raise EntryError(f"{got}; expected {ENTRIES}") from error

    def states(self) -> dict[str, State]:
        """Copies of what it holds over all ranks, by path and name. Every rank must call it.

        A state that torchmetrics neither adds nor joins has that of each rank, `[ranks, ...]`.
        """
        fill_empty_states(self)
        found = {}
        for path, part in self.parts:
            with part.sync_context():
                # What is synced is undone, and what is not goes on changing: a copy of either.
                found.update({_joined(path, name): _copied(state) for name, state in part.metric_state.items()})
        return found

    def restore(self, states: Mapping[str, State], *, rank: int, ranks: int) -> None:
        """Go on from `states`: rank 0 from those of all ranks, and the others from nothing.

        Of states that torchmetrics keeps apart each rank takes its own.

        Raises: RunError where there were more ranks, or fewer.
        """
        for path, part in self.parts:
            # Before the states are set, which keep the dtypes that the other ranks give theirs.
            self._double_states(part.device)
            own: dict[str, Any] = {
                name: states[_joined(path, name)] for name in part.metric_state if _joined(path, name) in states
            }
            apart = {name for name in own if part._reductions[name] is None and isinstance(own[name], Tensor)}
            for name in apart:
                own[name] = self._own_share(part, name, own[name], rank=rank, ranks=ranks)
            for name, state in own.items():
                if rank == 0 or name in apart:
                    is_list = isinstance(part.metric_state[name], list)
                    setattr(part, name, [state] if is_list and isinstance(state, Tensor) else state)
                    # Else compute warns that nothing was added. torchmetrics has no public way (seen in 1.9).
                    part._update_count = 1

    def _own_share(self, part: Metric, name: str, state: Tensor, *, rank: int, ranks: int) -> Tensor:
        alone = part._defaults[name]
        assert isinstance(alone, Tensor)
        before = len(state) if state.dim() > alone.dim() else 1
        if before != ranks:
            raise RunError(
                f"{self.key}: {type(part).__name__} was saved in the middle of an epoch of {before} shares of the "
                f"data, and cannot go on in {ranks}: torchmetrics does not add up its states. Resume with as many, or "
                "from a checkpoint of an epoch's end, or without train in metric_stages"
            )
        return state[rank] if state.dim() > alone.dim() else state


def as_measure(name: str, metric: Measure | Metric | MetricCollection) -> Measure:
    """A bare metric looks at the output and the target."""
    return metric if isinstance(metric, Measure) else Measure(name=name, metric=metric)


def as_scored(measure: Measure, objective: Objective) -> Measure:
    """The same with outputs that are scores, where a loss of that very output has a softmax or sigmoid of its own.

    Of other outputs torchmetrics decides, batch by batch.
    """
    parts = [part for _, part in measure.parts]
    losses = tuple(loss for kinds, loss in SCORES if any(isinstance(part, kinds) for part in parts))
    is_one = any(
        isinstance(term, Term) and term.output == measure.output and isinstance(term.loss, losses)
        for term in objective.terms.values()
    )
    return replace(measure, are_scores=True) if is_one and measure.inputs is None else measure


def entries_of(value: object) -> Iterator[tuple[str, Tensor]]:
    """The numbers of a metric's value, each by the name of its entry.

    One number has no name; those of a vector are called 0, 1, 2 and so on, those of a mapping by its keys, those of a
    tuple by their places; vectors in a mapping or a tuple by both, `recall/3`.

    Raises: EntryError for a matrix, and for what is no number.
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
    """Gives the tag of one number of a metric. entry: empty where it gives one alone."""
    return f"{name}/{stage}/{entry}" if entry else f"{name}/{stage}"


def fill_empty_states(measure: Measure) -> None:
    """Give a rank that saw no sample states of the others' shapes and dtypes. Every rank must call it.

    torchmetrics gathers states over ranks as they are: those of nothing have other axes and dtypes than those of a
    batch, and so has its own stand-in for an empty list (seen in 1.9). The ranks would wait for each other, read
    garbage or abort.
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
    """Shape and dtype of a state, or of the first of a list; None of an empty one."""
    if isinstance(state, Tensor):
        return tuple(state.shape), state.dtype
    return _form(state[0]) if state else None


@contextmanager
def _blame(measure: Measure, doing: str) -> Iterator[None]:
    """Tells what a metric of a library refuses with its key, and a StopIteration of any."""
    try:
        yield
    except ExpError:
        raise
    except (*REFUSALS, AttributeError) as error:  # the last of what is no tensor
        if not measure.is_known:
            raise
        name = type(measure.metric).__name__
        raise RunError(f"{measure.key}: {name} refuses, in {doing}: {shorten(message_of(error))}") from error
    except StopIteration as error:  # which Lightning would take for the end of the data
        name = type(measure.metric).__name__
        raise UserCodeError.of(error, what=f"metric {name}, in {doing},") from error


def _double(tensor: Tensor) -> Tensor:
    return tensor.to(summing_dtype(tensor.device)) if tensor.is_floating_point() else tensor


def _device_type(given: Mapping[str, Any]) -> str:
    return next((value.device.type for value in given.values() if isinstance(value, Tensor)), "cpu")


def _joined(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name


def _copied(value: Any) -> Any:
    return value.detach().clone() if isinstance(value, Tensor) else [item.detach().clone() for item in value]
