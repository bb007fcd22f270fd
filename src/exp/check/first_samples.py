"""The comparison of the first samples of the data with the objective and the metrics.

Losses of torch and exp are called with the targets of these samples and with stand-in outputs. A stand-in output has
the shape of a real output of the network, but other numbers. Later samples are checked when the run reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import replace
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from exp.check.input_errors import describe_value
from exp.check.metric_errors import fit_errors, monitor_errors
from exp.check.rules import monitored_tags
from exp.check.shapes import CLASSES_LAST, CLASSES_ON_AXIS_1, objectives_by_forward
from exp.check.stages import locate_errors, unique_errors
from exp.data.data_errors import SampleError
from exp.data.entries import inputs_in
from exp.engine.forward import forward_by_name, named_values
from exp.errors import LIBRARIES, REFUSALS, ConfigError, ErrorDetails, RunError, one_line, unsuitable
from exp.models.forward_trace import ForwardTrace
from exp.nested import map_tensors, named_parts, tensors_in
from exp.objectives.loss_inputs import Values, classes_fix, pick
from exp.objectives.objective import Objective, Term
from exp.shared_types import DataSpec, Stage
from exp.spelling import among, did_you_mean, show

if TYPE_CHECKING:
    from exp.check.plan import Plan

# Time limit for reading the first samples of a split.
SECONDS = 5.0
# Largest number of samples in the call of a loss. Data in memory may provide more first samples. In that case, the
# values of all of them are checked without a call.
CALLED = 64
# Largest number of values in a stand-in output, 64 MiB in float32. Fewer samples are used for larger outputs, such as
# scores of all tokens of a text over a large vocabulary.
MOST_NUMBERS = 2**24
# Losses that need targets from 0 to 1.
ANSWERS = (nn.BCELoss, nn.BCEWithLogitsLoss)
# Prefixes of the keys of data sets. Errors at these keys are ignored, because the data may be on another machine.
DATA_SETS = ("data.dataset.", "data.train.", "data.val.", "data.test.")
# Function of a seed that returns the values of the first samples by name, with stand-in outputs of the network. The
# numbers in the outputs are random, from 0.05 to 0.95. For the seed None, all numbers are 0.5, because 0.5 is both a
# valid score and a valid probability.
StandIns = Callable[[int | None], Values]


def compare_with_data(decided: Plan) -> tuple[list[ErrorDetails], tuple[str, ...]]:
    """Return the errors and the notes from a comparison of the config with the first samples of the data.

    If the data is not on this machine, there is no comparison, and a note states the reason.
    """
    try:
        return [], refuse_other_data(decided)
    except ConfigError as error:
        errors = [one for one in error.errors if not f"{one.key}.".startswith(DATA_SETS)]
        if errors:
            return errors, ()
        return [], (f"the data was not compared with the config: {error.errors[0]}",)


def refuse_other_data(decided: Plan) -> tuple[str, ...]:
    """Raise ConfigError if the data cannot be built, differs from the config, or is not valid for a loss or metric.

    Returns:
        Remarks on the first samples that are not errors.
    """
    settings, config = decided.settings, decided.resolved.config
    errors: list[ErrorDetails] = []
    notes: list[str] = []
    entries: dict[str, tuple[str, ...]] = {}
    try:
        if decided.own is not None and decided.data_module is not None:
            return ()
        data = decided.data
        # Data for predictions has no targets, and the inputs of a user's module are unknown before the first step.
        if decided.own is not None or settings.predict:
            return data.notes
        at_work = {"train": settings.train, "val": settings.train or settings.validate, "test": settings.test}
        for stage in (stage for stage in data.stages if at_work[stage]):
            errors += _stage_errors(decided, stage, notes, entries)
    except ConfigError as error:
        raise ConfigError(locate_errors(config, error.errors)) from error
    except SampleError as error:
        raise ConfigError(locate_errors(config, [error.error])) from error
    except RunError:
        return ()  # an exception in user code, which the run reports with its location
    tags = monitored_tags(dict(decided.plain)) if settings.train else {}
    errors += monitor_errors(tags, entries, settings.metric_stages)
    if errors:
        raise ConfigError(locate_errors(config, unique_errors([*_once_per_name(errors)])))
    return (*data.notes, *notes)


def _once_per_name(errors: Iterable[ErrorDetails]) -> Iterator[ErrorDetails]:
    """Yield the errors. If several keys read the same unknown name, their errors are merged into one error."""
    groups: dict[object, list[ErrorDetails]] = {}
    for error in errors:
        groups.setdefault((error.subject, error.got) if error.subject else error, []).append(error)
    for first, *others in groups.values():
        keys = dict.fromkeys(error.key for error in (first, *others))
        yield first if len(keys) == 1 else replace(first, got=f"{first.got}, read by {among(keys)}")


def _stage_errors(
    decided: Plan, stage: Stage, notes: list[str], entries: dict[str, tuple[str, ...]]
) -> Iterator[ErrorDetails]:
    """Yield the errors of the first samples of a stage.

    Args:
        decided: Plan of the run.
        stage: Stage of the samples: train, val or test.
        notes: List to which this function adds remarks.
        entries: Dict by metric name, to which this function adds the names of the values that each metric returns.
    """
    try:
        batch = decided.data.first_samples(stage, seconds=SECONDS)
        if batch is not None:
            yield from _batch_errors(decided, batch, stage, notes, entries)
    except SampleError as error:
        yield error.error
    except ConfigError as error:
        yield from error.errors
    except RunError:
        return


def _batch_errors(
    decided: Plan, batch: object, stage: Stage, notes: list[str], entries: dict[str, tuple[str, ...]]
) -> Iterator[ErrorDetails]:
    spec, settings = decided.spec, decided.settings
    for name, value in inputs_in(batch).items():
        if (place := _not_finite(value)) is not None:
            notes.append(
                f"sample {place} of {stage} has a value that is not finite in {name}, so that the loss may be nan. "
                "Replace this value in the data set or in data.transforms"
            )
    for forward, part in objectives_by_forward(decided.phases, decided.objective).items():
        trace = decided.shapes.traces.get(forward)
        if trace is None:
            continue
        unknown = list(name_errors(term_names(part), trace, batch, spec))
        yield from unknown or _term_errors(part, trace, batch, spec, stage)
        if not unknown and settings.trainer.accumulate_grad_batches > 1:
            part.known_divisors(named_values(batch))
    trace = decided.shapes.traces.get(None)  # metrics read only outputs of the network's own forward
    if trace is None or stage not in settings.metric_stages:
        return
    for measure in decided.metrics.values():
        names = {f"{measure.key}.{place}": name for place, name in measure.names.items()}
        unknown = list(name_errors(names, trace, batch, spec))
        yield from unknown
        draw = _stand_ins(trace, batch, spec) if not unknown and _is_batched(trace, names.values()) else None
        if draw is not None:
            yield from fit_errors([measure], draw, stage, entries)


def term_names(objective: Objective) -> dict[str, str]:
    """Return the names of the values that the terms of the objective read, by the config key that sets the name."""
    return {
        f"objective.{name}.{place}": wanted
        for name, term in objective.terms.items()
        for place, wanted in term.names.items()
    }


def name_errors(names: Mapping[str, str], trace: ForwardTrace, batch: object, spec: DataSpec) -> Iterator[ErrorDetails]:
    """Yield an error for each name of a value that does not exist or is ambiguous.

    The network and the batch provide named values. A name is ambiguous if both provide a value with this name.

    Args:
        names: Names of values, by the config key that sets the name.
        trace: Trace of the forward, with the values that the network returns.
        batch: A batch of the data.
        spec: Names and shapes of the network's inputs.
    """
    values = forward_by_name(trace.network, tuple(spec.inputs))(lambda *_, **__: trace.output, batch)
    parts = named_parts(trace.output)
    known, held = {**values, **parts}, batch if isinstance(batch, Mapping) else {}
    for key, wanted in names.items():
        is_twofold = wanted in parts and wanted in held
        if wanted in known and not is_twofold:
            continue
        got = f"{show(wanted)}, a name that neither network nor batch returns"
        expected, fix = f"one of {among(sorted(known), word=wanted)}", did_you_mean(wanted, known)
        if is_twofold:
            got = f"{show(wanted)}, a name that both network and batch return"
            expected, fix = "a name that only one of them uses", "Rename the network's output or the data set's entry"
        yield ErrorDetails(key, got, expected, fix, subject=wanted)


def _stand_ins(trace: ForwardTrace, batch: object, spec: DataSpec) -> StandIns | None:
    """Return a function that makes stand-in outputs, as described at StandIns.

    Returns:
        The function. None if the shapes of the inputs differ from the config, such as for texts of several lengths.
    """
    each = max(1, sum(one[0].numel() for one in tensors_in(trace.output) if one.dim() and len(one)))
    count = max(2, min(CALLED, MOST_NUMBERS // each))
    few = map_tensors(batch, lambda tensor: tensor[:count] if tensor.dim() else tensor)
    found, names = inputs_in(few), tuple(spec.inputs)
    if not all(name in found and tuple(found[name].shape[1:]) == one.shape for name, one in spec.inputs.items()):
        return None
    run, samples = forward_by_name(trace.network, names), len(found[names[0]])

    def values(seed: int | None) -> Values:
        draw = torch.Generator().manual_seed(seed or 0)

        def make(tensor: Tensor) -> Tensor:
            if not tensor.dim():
                return tensor
            shape = (samples, *tensor.shape[1:])
            share = torch.full(shape, 0.5) if seed is None else 0.05 + 0.9 * torch.rand(shape, generator=draw)
            return share.to(tensor.dtype)

        given = map_tensors(trace.output, make)
        return run(lambda *_, **__: given, few)

    return values


def _term_errors(
    objective: Objective, trace: ForwardTrace, batch: object, spec: DataSpec, stage: Stage
) -> Iterator[ErrorDetails]:
    """Yield the errors of losses that reject the first samples of a stage.

    Only losses of libraries are called. Losses of users and losses with `needs` are not called.
    """
    draw = _stand_ins(trace, batch, spec)
    if draw is None:
        return
    values = draw(None)
    whole = {**values, **named_values(batch)}
    if any(tensor.dtype == torch.float64 for tensor in tensors_in(trace.output)):
        objective = copy.deepcopy(objective).double()  # because precision=fp64 also converts the class weights
    for name, term in objective.terms.items():
        is_known = isinstance(term, Term) and type(term.loss).__module__.partition(".")[0] in LIBRARIES
        if not isinstance(term, Term) or not is_known or objective.needs_of(name):
            continue
        if not _is_batched(trace, term.names.values()):
            continue
        key, expected = objective.loss_keys[name], "targets that the loss accepts"
        try:
            with torch.no_grad():
                term(values)
            if term.inputs is None:
                target, output = pick(whole, term.target, "target"), pick(values, term.output, "output")
                yield from _value_errors(term, key, target, output, stage)
        except RunError as error:
            yield ErrorDetails(key=key, got=f"in the first samples of {stage}: {error}", expected=expected)
        except REFUSALS as error:
            shown, fix = _describe_values(values, term)
            got = f"{type(term.loss).__name__} rejects the targets of {stage} ({shown}): {one_line(error)}"
            yield ErrorDetails(key=key, got=got, expected=expected, fix=fix)


def _value_errors(term: Term, key: str, target: Tensor, output: Tensor, stage: Stage) -> Iterator[ErrorDetails]:
    loss = type(term.loss).__name__
    if target.is_floating_point() and (place := _not_finite(target)) is not None:
        got = f"sample {place} of {stage} has a target that is not finite"
        expected = f"finite targets for {loss}"
        fix = "Correct the target, or remove the sample from the data set"
        yield ErrorDetails(key=key, got=got, expected=expected, fix=fix)
    elif isinstance(term.loss, ANSWERS) and (place := _first((target < 0) | (target > 1))) is not None:
        sample = target[place]
        fix = "Use targets of 0, 1 or a probability. For class numbers write objective=[cross_entropy]"
        because = f"and sample {place} of {stage} has the target {float(sample[(sample < 0) | (sample > 1)][0]):g}"
        yield unsuitable(key, loss, because, "targets from 0 to 1", fix)


def _first(where: Tensor) -> int | None:
    """Return the index of the first sample with a true value. Return None if all values are false."""
    places = where.nonzero()
    return int(places[0, 0]) if len(places) else None


def _not_finite(value: object) -> int | None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
        return None
    return _first(~torch.isfinite(value))


def _is_batched(trace: ForwardTrace, names: Iterable[str]) -> bool:
    """Return whether axis 0 of all outputs with these names is the batch axis."""
    size = len(next(iter(trace.inputs.values())))
    given = {"output": trace.output, **named_parts(trace.output)}
    read = tensors_in([given[name] for name in names if name in given])
    return all(one.dim() > 0 and len(one) == size for one in read)


def _describe_values(values: Mapping[str, object], term: Term) -> tuple[str, str | None]:
    """Return a description of the values that a loss rejected, and a fix. The fix is None if no fix is known."""
    if term.inputs is not None:
        return ", ".join(f"{one} {describe_value(pick(values, name, one))}" for one, name in term.inputs.items()), None
    target, output = pick(values, term.target, "target"), pick(values, term.output, "output")
    fix = None
    if isinstance(term.loss, CLASSES_LAST + CLASSES_ON_AXIS_1):
        fix = "Give class numbers as int64" if target.dim() < output.dim() else classes_fix(output, target)
    return f"{describe_value(target)} for outputs {describe_value(output)}", fix
