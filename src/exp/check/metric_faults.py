"""Hold the metrics against the first samples and the network's output: what they refuse, and what they give.

As the losses are, the metrics of torchmetrics and of exp are called with real targets and stand-in outputs of the shape
that the network gives; those of one's own, and those that hold a network, are not.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor
from torchmetrics import Metric, MetricCollection
from torchmetrics import classification as classes
from torchmetrics.wrappers import ClasswiseWrapper
from torchmetrics.wrappers.abstract import WrapperMetric

from exp.check.input_faults import described
from exp.data.randomness import preserve_generators
from exp.errors import REFUSALS, Fault, RunError, one_line
from exp.nested import named_parts
from exp.objectives.loss_inputs import Values, elementwise_cure
from exp.objectives.measures import ENTRIES, EntryError, Measure, entries_of, entry_tag
from exp.shared_types import Stage
from exp.spelling import among, did_you_mean, show

CURVES = (classes.BinaryROC, classes.MulticlassROC, classes.MultilabelROC)
PRECISION_RECALL = (
    classes.BinaryPrecisionRecallCurve,
    classes.MulticlassPrecisionRecallCurve,
    classes.MultilabelPrecisionRecallCurve,
)
OF_TENSORS = ("torchmetrics.classification.", "torchmetrics.regression.", "exp.objectives.metrics")
BY_GROUP = (classes.BinaryFairness, classes.BinaryGroupStatRates)
NONE = (None, "none")


def call_faults(measures: Iterable[Measure]) -> Iterator[Fault]:
    """Of metrics that cannot be called as a stage calls them: with an output and a target, or by names."""
    for measure in measures:
        for part in _called(measure.metric):
            if (fault := _call_fault(measure, part)) is not None:
                yield fault
                break


def _called(metric: Metric | MetricCollection) -> Iterator[Metric]:
    if isinstance(metric, MetricCollection):
        yield from metric.values(copy_state=False)
    else:
        yield metric


def _call_fault(measure: Measure, part: Metric) -> Fault | None:
    signature, name = inspect.signature(part.update), type(part).__name__
    known = list(signature.parameters)
    is_open = any(one.kind is one.VAR_KEYWORD for one in signature.parameters.values())
    if measure.inputs is None:
        try:
            signature.bind("output", "target")
        except TypeError:
            needed = [one.name for one in signature.parameters.values() if one.default is one.empty]
            named = ", ".join(f"{one}: ..." for one in needed)
            return Fault(
                key=measure.key,
                got=f"{name}, whose update takes ({', '.join(known)})",
                expected="a metric whose update takes (output, target)",
                cure=f"Name a value for each: {measure.key}.inputs={{{named}}}",
            )
        return None
    for parameter in measure.inputs:
        if parameter not in known and not is_open:
            key, cure = f"{measure.key}.inputs.{parameter}", did_you_mean(parameter, known)
            expected = f"one of {', '.join(known)}"
            return Fault(key=key, got=f"no parameter of {name}'s update", expected=expected, cure=cure)
    try:
        signature.bind(**dict.fromkeys(measure.inputs))
    except TypeError as error:
        expected = f"a value for each of {', '.join(known)}"
        return Fault(key=f"{measure.key}.inputs", got=f"{among(measure.inputs)}: {error}", expected=expected)
    return None


def fit_faults(
    measures: Iterable[Measure], draw: Callable[[int], Values], stage: Stage, entries: dict[str, tuple[str, ...]]
) -> Iterator[Fault]:
    """Of metrics that refuse the targets of a stage, or give what no tag can hold.

    draw: values of its first samples by name, with outputs drawn from this seed between 0 and 1: scores, probabilities
        and positive numbers. entries: takes those of each metric that was called.
    """
    for measure in measures:
        if not measure.is_known:
            continue
        if any(isinstance(part, BY_GROUP) for _, part in measure.parts):
            kind = type(measure.metric).__name__
            got = f"{kind}, in which a batch without a group is counted under other groups (torchmetrics 1.9)"
            cure = "Write a metric of your own that adds up by the group's number"
            yield Fault(key=measure.key, got=got, expected="values that no batch size changes", cure=cure)
            continue
        if (fault := _whole_fault(measure, draw(0))) is not None:
            yield fault
            continue
        with warnings.catch_warnings(), preserve_generators(), torch.no_grad():
            warnings.simplefilter("ignore")  # of few samples, and of outputs that no network gave
            called = measure.clone()
            try:
                found = _computed(called, draw)
            except RunError as error:
                yield _refusal(measure, draw(0), stage, error)
                continue
            fault = _label_fault(called) or _entry_fault(measure, found)
        if fault is not None:
            yield fault
        elif found:
            entries[measure.name] = tuple(name for name, _ in entries_of(found[-1]))


def _whole_fault(measure: Measure, values: Values) -> Fault | None:
    """Of a metric that compares two tensors, and is given all that the network returns."""
    of_tensors = all(
        type(part).__module__.startswith(OF_TENSORS) for _, part in measure.parts if not isinstance(part, WrapperMetric)
    )
    value = measure.read(values).get("output")
    if not of_tensors or "output" not in measure.names.values() or isinstance(value, Tensor):
        return None
    parts = named_parts(value)
    return Fault(
        key=f"{measure.key}.{next(place for place, name in measure.names.items() if name == 'output')}",
        got=f"the network returns {described(value)}",
        expected="one tensor to compare",
        cure=f"Write one of {among(parts)}" if parts else None,
    )


def _computed(measure: Measure, draw: Callable[[int], Values]) -> list[object]:
    """What it gives behind these samples, and behind twice as many with other outputs; of too few it may give nothing.

    Raises: RunError where its update does, and where it gives nothing either time.
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


def _label_fault(called: Measure) -> Fault | None:
    """The fault of labels of which there are more or fewer than numbers: torchmetrics leaves the rest out in silence.

    called: with states of a batch.
    """
    for path, part in called.parts:
        if not isinstance(part, ClasswiseWrapper) or part.labels is None:
            continue
        count = len(part.metric.compute())
        if len(part.labels) != count:
            key = ".".join(filter(None, [called.key, *(["metrics", path] if path else []), "labels"]))
            return Fault(key=key, got=f"{len(part.labels)} labels", expected=f"{count}, one for each number")
    return None


def _entry_fault(measure: Measure, found: Sequence[object]) -> Fault | None:
    """The fault of values that are no numbers, or other ones each time."""
    kind = type(measure.metric).__name__
    names: list[list[str]] = []
    for value in found:
        try:
            names.append([name for name, _ in entries_of(value)])
        except EntryError as error:
            return Fault(key=measure.key, got=f"{kind}, which gives {error}", expected=ENTRIES, cure=_cure(measure))
    if all(one == names[0] for one in names):
        return None
    first, second = map(len, names)
    got = f"{kind}, which gives {first} numbers, and {second} of twice as many samples"
    return Fault(key=measure.key, got=got, expected=ENTRIES, cure=_cure(measure))


def _cure(measure: Measure) -> str | None:
    metric, kind = measure.metric, type(measure.metric).__name__
    is_multilabel = kind.startswith("Multilabel")
    if getattr(metric, "multidim_average", "global") == "samplewise":
        return "Write multidim_average: global"
    if isinstance(metric, CURVES):
        return f"The area below it is one number: {kind.replace('ROC', 'AUROC')}"
    if isinstance(metric, PRECISION_RECALL):
        area = f"the area below it is one number: {kind.replace('PrecisionRecallCurve', 'AveragePrecision')}"
        return f"{area[0].upper()}{area[1:]}" if is_multilabel else f"+hooks=pr_curve draws it, and {area}"
    if isinstance(metric, classes.BinaryConfusionMatrix | classes.MultilabelConfusionMatrix):
        return f"{kind.replace('ConfusionMatrix', 'StatScores')} gives the counts as a vector"
    if isinstance(metric, classes.MulticlassConfusionMatrix):
        return "+hooks=confusion draws it"
    if getattr(metric, "average", "macro") in NONE:
        return "Write average: macro"
    return "Write reduction: mean" if getattr(metric, "reduction", "mean") in NONE else None


def _refusal(measure: Measure, values: Values, stage: Stage, error: RunError) -> Fault:
    """error: of its update; what a library raised is the cause."""
    expected = "outputs and targets that it takes"
    if error.__cause__ is None:
        return Fault(key=measure.key, got=f"in the first samples of {stage}: {error}", expected=expected)
    metric, kind = measure.metric, type(measure.metric).__name__
    read = measure.read(values)
    shown = ", ".join(f"{name} {described(value)}" for name, value in read.items())
    got = f"{kind} refuses the first samples of {stage}, {shown}: {one_line(error.__cause__)}"
    output, target = (read[name] for name in (measure.output, measure.target)) if not measure.inputs else (None, None)
    if not isinstance(output, Tensor) or not isinstance(target, Tensor):
        return Fault(key=measure.key, got=got, expected=expected)
    width = output.shape[1] if output.dim() == target.dim() + 1 else None
    for size in ("num_classes", "num_labels"):
        held = getattr(metric, size, None)
        if width is not None and isinstance(held, int) and held != width and output.shape[:1] == target.shape[:1]:
            wrong = f"{held}, and the network gives {width} for each sample"
            return Fault(key=f"{measure.key}.{size}", got=wrong, expected=f"{width}", cure=f"Write {size}: {width}")
    return Fault(key=measure.key, got=got, expected=expected, cure=_cure_of_shapes(metric, output, target))


def _cure_of_shapes(metric: Metric | MetricCollection, output: Tensor, target: Tensor) -> str | None:
    is_of_classes = type(metric).__module__.startswith("torchmetrics.classification.")
    if is_of_classes and target.is_floating_point():
        are_answers = bool(((target == 0) | (target == 1)).all())
        answers = "Give answers as int64, which torch.nn.BCEWithLogitsLoss takes here, too"
        return answers if are_answers else "Of numbers choose metrics=[mae]; class numbers are int64"
    if is_of_classes and output.dim() > 2 and output.shape[:-1] == target.shape:
        return "Of classes on the last axis choose exp.objectives.metrics.Accuracy, F1 or AUROC"
    if output.shape == (*target.shape, 1) or target.shape == (*output.shape, 1):
        return elementwise_cure(output, target)
    return None


def mode_faults(monitor: str, mode: str, measures: Mapping[str, Measure]) -> Iterator[Fault]:
    """Of a best checkpoint that would be the worst, by what the metric itself says of its entries, or one in it."""
    name, _, rest = monitor.partition("/")
    if name not in measures or not (entry := rest.partition("/")[2]):
        return  # of one number its class says it
    part: Any = measures[name].metric
    if isinstance(part, MetricCollection):
        parts = dict(part.items(keep_base=False, copy_state=False))
        part = parts.get(entry.partition("/")[0])
    is_higher = None if part is None else part.higher_is_better
    if isinstance(is_higher, bool) and is_higher != (mode == "max"):
        better, side = ("max", "higher") if is_higher else ("min", "lower")
        expected = f"{better}: a {side} {monitor} is better"
        yield Fault(key="mode", got=repr(mode), expected=expected, cure=f"Add mode={better}")


def monitor_faults(
    monitors: Mapping[str, str], entries: Mapping[str, tuple[str, ...]], stages: Collection[str]
) -> Iterator[Fault]:
    """Of monitors that name an entry which a metric does not have, or a metric that gives several numbers.

    monitors: tags by the key where they stand. entries: of the metrics that are known. stages: of the metrics.
    """
    for key, monitor in monitors.items():
        name, _, rest = monitor.partition("/")
        stage = rest.partition("/")[0]
        if name not in entries or stage not in stages:
            continue
        tags = [entry_tag(name, stage, entry) for entry in entries[name]]
        if monitor not in tags:
            several = f", which gives {len(tags)} numbers" if monitor == entry_tag(name, stage, "") else ""
            yield Fault(
                key=key,
                got=f"{show(monitor)}{several}",
                expected=f"a tag of this run: {among(tags, word=monitor)}",
                cure=did_you_mean(monitor, tags) if not several else None,
            )
