"""The comparison of metrics with the first samples and the output of the network.

Metrics of torchmetrics and exp are called with the targets of these samples and with stand-in outputs. A stand-in
output has the shape of a real output of the network. Metrics of users, and metrics that contain a network, are not
called.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any

import torch
from torch import Tensor
from torchmetrics import MetricCollection
from torchmetrics import classification as classes
from torchmetrics.wrappers import ClasswiseWrapper
from torchmetrics.wrappers.abstract import WrapperMetric

from exp.check.calls import call_error
from exp.check.input_errors import describe_value
from exp.config.settings import Settings
from exp.data.randomness import preserve_generators
from exp.errors import REFUSALS, ErrorDetails, RunError, one_line, unsuitable
from exp.nested import named_parts
from exp.objectives.loss_inputs import Values
from exp.objectives.measures import ENTRIES, EntryError, Measure, entries_of, entry_tag
from exp.shared_types import Mode, Stage, searched_tags
from exp.spelling import among, did_you_mean, show

OF_TENSORS = ("torchmetrics.classification.", "torchmetrics.regression.", "exp.objectives.metrics")
BY_GROUP = (classes.BinaryFairness, classes.BinaryGroupStatRates)


def call_errors(measures: Iterable[Measure]) -> Iterator[ErrorDetails]:
    """Yield an error for each metric that a step cannot call.

    A step calls a metric with an output and a target, or with the values in the `inputs` of the metric.
    """
    for measure in measures:
        metric = measure.metric
        parts = metric.values(copy_state=False) if isinstance(metric, MetricCollection) else [metric]
        given = ("output", "target") if measure.inputs is None else ()
        for part in parts:
            key, name, inputs = measure.key, type(part).__name__, measure.inputs
            error = call_error(part.update, name=name, given=given, key=key, node=key, inputs=inputs, what="metric")
            if error is not None:
                yield error
                break


def fit_errors(
    measures: Iterable[Measure], draw: Callable[[int], Values], stage: Stage, entries: dict[str, tuple[str, ...]]
) -> Iterator[ErrorDetails]:
    """Yield the errors of metrics that reject the targets of a stage, or return values that cannot be logged.

    Args:
        measures: Metrics with empty states.
        draw: Function of a seed that returns the values of the first samples by name, with stand-in outputs. These
            outputs are random numbers between 0 and 1, which are valid scores, probabilities and positive numbers.
        stage: Stage of the samples: train, val or test.
        entries: Dict by metric name, to which this function adds the names of the values that each metric returns.
    """
    for measure in measures:
        if not measure.is_known:
            continue
        detail = _whole_error(measure, draw(0))
        if detail is None:
            with warnings.catch_warnings(), preserve_generators(), torch.no_grad():
                warnings.simplefilter("ignore")  # hide warnings about few samples and about unrealistic outputs
                called = measure.clone()
                try:
                    found = _compute_twice(called, draw)
                    detail = _label_error(called) or _entry_error(measure, found)
                    if detail is None and found:
                        entries[measure.name] = tuple(name for name, _ in entries_of(found[-1]))
                except RunError as error:
                    detail = _refusal(measure, draw(0), stage, error)
        if detail is not None:
            yield detail


def _whole_error(measure: Measure, values: Values) -> ErrorDetails | None:
    """Return the error of a metric that exp does not support, or that reads a container instead of a tensor.

    Otherwise return None.

    Args:
        measure: The metric.
        values: Values of the first samples by name.
    """
    kind = type(measure.metric).__name__
    if any(isinstance(part, BY_GROUP) for _, part in measure.parts):
        because = "which counts samples under wrong groups if a batch lacks a group (torchmetrics 1.9)"
        return unsuitable(measure.key, kind, because, "a metric of your own that sums by group number")
    parts = [type(part).__module__ for _, part in measure.parts if not isinstance(part, WrapperMetric)]
    place = next((place for place, name in measure.names.items() if name == "output"), None)
    value = measure.read(values).get("output")
    if place is None or isinstance(value, Tensor) or not all(module.startswith(OF_TENSORS) for module in parts):
        return None
    names = named_parts(value)
    fix = f"Set {measure.key}.{place} to one of {among(names)}" if names else None
    got = f"the network returns {describe_value(value)}"
    return ErrorDetails(f"{measure.key}.{place}", got, "one tensor for the metric", fix)


def _compute_twice(measure: Measure, draw: Callable[[int], Values]) -> list[object]:
    """Return the values of a metric for the first samples, and for twice as many samples.

    The first value is missing if the metric cannot compute a value from few samples.

    Raises:
        RunError: The update fails, or the metric cannot compute a value from all samples.
    """
    found: list[object] = []
    for seed in range(2):
        measure.update(measure.read(draw(seed)))
        try:
            found.append(measure.metric.compute())
        except REFUSALS as error:
            if seed and not found:
                raise RunError(f"{measure.key}: {one_line(error)}") from error
    return found


def _label_error(called: Measure) -> ErrorDetails | None:
    """Return an error if a metric has a wrong number of labels. Otherwise return None.

    torchmetrics raises no error, and silently drops values without a label.
    """
    for path, part in called.parts:
        if isinstance(part, ClasswiseWrapper) and part.labels is not None:
            count = len(part.metric.compute())
            if len(part.labels) != count:
                key = ".".join([called.key, *(["metrics", path] if path else []), "labels"])
                return ErrorDetails(
                    key=key, got=f"{len(part.labels)} labels", expected=f"{count} labels, one for each value"
                )
    return None


def _entry_error(measure: Measure, found: Iterable[object]) -> ErrorDetails | None:
    """Return an error if a metric returns other values than numbers, or a varying number of values.

    Args:
        measure: The metric.
        found: Values of the metric for the first samples, and for twice as many samples.
    """
    kind = type(measure.metric).__name__
    try:
        names = [[name for name, _ in entries_of(value)] for value in found]
        if all(one == names[0] for one in names):
            return None
        got = f"{kind}, which returns {len(names[0])} values, and {len(names[1])} values for twice as many samples"
    except EntryError as error:
        got = f"{kind}, which returns {error}"
    fix = "If the metric has such a parameter, set average=macro, reduction=mean or multidim_average=global"
    return ErrorDetails(measure.key, got, ENTRIES, fix)


def _refusal(measure: Measure, values: Values, stage: Stage, error: RunError) -> ErrorDetails:
    """Return the error of a metric that rejected the values of the first samples.

    Args:
        measure: The metric.
        values: Values of the first samples by name.
        stage: Stage of the samples.
        error: Error of the metric's update. If a library raised an exception, `__cause__` contains this exception.
    """
    expected = "outputs and targets that the metric accepts"
    if error.__cause__ is None:
        return ErrorDetails(measure.key, f"in the first samples of {stage}: {error}", expected)
    kind, read = type(measure.metric).__name__, measure.read(values)
    output, target = read.get(measure.output), read.get(measure.target)
    if isinstance(output, Tensor) and isinstance(target, Tensor) and output.shape[:1] == target.shape[:1]:
        for size in ("num_classes", "num_labels"):
            held = getattr(measure.metric, size, None)
            if isinstance(held, int) and output.dim() == target.dim() + 1 and held != output.shape[1]:
                width = output.shape[1]
                because = f"and the network returns {width} values for each sample"
                return unsuitable(f"{measure.key}.{size}", held, because, str(width), f"Write {size}: {width}")
    shown = ", ".join(f"{name} {describe_value(value)}" for name, value in read.items())
    got = f"{kind} rejects the first samples of {stage} ({shown}): {one_line(error.__cause__)}"
    return ErrorDetails(measure.key, got, expected)


def mode_errors(settings: Settings, measures: Mapping[str, Measure]) -> Iterator[ErrorDetails]:
    """Yield an error for each mode (min or max) that contradicts the direction in which the monitored value improves.

    Args:
        settings: Config as typed objects.
        measures: Metrics of the run by name.
    """
    wanted: dict[str, Mapping[Any, Any]] = {
        "mode": {settings.monitor: settings.mode},
        "sweep.monitor": searched_tags(settings.sweep.monitor, mode=settings.mode),
    }
    nodes: dict[str, Any] = {"scheduler": settings.scheduler}
    nodes |= {f"callbacks.{name}": node for name, node in settings.callbacks.items()}
    wanted |= {f"{key}.mode": {node.get("monitor"): node["mode"]} for key, node in nodes.items() if "mode" in node}
    for key, tags in wanted.items():
        for tag, direction in tags.items():
            better = _better_mode(str(tag), measures)
            if direction in ("min", "max") and better not in (None, direction):
                got, fix = repr(direction), f"Add {key}={better}"
                if key == "sweep.monitor":
                    got, fix = f"{tag}: {direction}", f"Write 'sweep.monitor={{{tag}: {better}}}'"
                side = "higher" if better == "max" else "lower"
                yield ErrorDetails(key, got, f"{better}: a {side} {tag} is better", fix)


def _better_mode(tag: str, measures: Mapping[str, Measure]) -> Mode | None:
    """Return `min` if lower values at a tag are better, and `max` if higher values are better.

    Return None if the metric at the tag does not declare a direction.
    """
    if tag.startswith("loss/"):
        return "min"
    name, *rest = tag.split("/")
    part: Any = measures[name].metric if name in measures else None
    if isinstance(part, MetricCollection):
        parts = dict(part.items(keep_base=False, copy_state=False))
        part = parts.get("".join(rest[1:2]))
    is_higher = None if part is None else part.higher_is_better
    return None if not isinstance(is_higher, bool) else "max" if is_higher else "min"


def monitor_errors(
    monitors: Mapping[str, str], entries: Mapping[str, tuple[str, ...]], stages: Collection[str]
) -> Iterator[ErrorDetails]:
    """Yield an error for each monitored tag that belongs to a metric, but to no single value of the metric.

    For example, a metric with several values logs a tag for each value, but no tag for the whole metric.

    Args:
        monitors: Monitored tags, by the config key that sets the tag.
        entries: Names of the values that each metric returns, by metric name.
        stages: Stages in which metrics are computed.
    """
    for key, monitor in monitors.items():
        name, _, rest = monitor.partition("/")
        stage = rest.partition("/")[0]
        if name not in entries or stage not in stages:
            continue
        tags = [entry_tag(name, stage, entry) for entry in entries[name]]
        if monitor not in tags:
            is_whole = monitor == entry_tag(name, stage, "")
            got = show(monitor) + (f", a metric with {len(tags)} values" if is_whole else "")
            fix = None if is_whole else did_you_mean(monitor, tags)
            yield ErrorDetails(key, got, f"a tag of this run: {among(tags, word=monitor)}", fix)
