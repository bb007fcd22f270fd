"""Hold the first samples of the data against objective and metrics.

The losses of torch and exp are called with real targets and stand-in outputs of the network's shapes. Later samples are
checked when the run reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol

import torch
from torch import Tensor, nn

from exp.check.input_faults import described
from exp.check.metric_faults import fit_faults
from exp.check.shapes import objectives_by_forward
from exp.data.data import Data
from exp.data.entries import inputs_in
from exp.data.faults import SampleError
from exp.engine.forward import forward_by_name, named_values
from exp.errors import LIBRARIES, REFUSALS, ConfigError, Fault, RunError, one_line
from exp.models.forward_trace import ForwardTrace
from exp.nested import mapped, named_parts, tensors_in
from exp.objectives.loss_inputs import Values, pick
from exp.objectives.measures import Measure
from exp.objectives.objective import Objective, Term
from exp.optim.phase import Phase
from exp.shared_types import DataSpec, Stage
from exp.spelling import among, did_you_mean, show

# Of reading, for each split.
SECONDS = 5.0
# Samples of data in memory with which a loss is called. The values of all samples are checked.
CALLED = 64
# Numbers of a stand-in output, such as of a text's tokens over a vocabulary: 64 MiB.
MOST_NUMBERS = 2**24
ANSWERS = (nn.BCELoss, nn.BCEWithLogitsLoss)
BOTH = "which both network and batch give"


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The parts of a run that the samples are held against.

    traces: of the network's forwards, as in ShapeExamination. metric_stages: the stages of the measures.
    """

    data: Data
    traces: Mapping[str | None, ForwardTrace]
    phases: Sequence[Phase]
    objective: Objective
    measures: Mapping[str, Measure]
    metric_stages: Sequence[str]
    accumulates: bool = False


@dataclass(kw_only=True)
class Findings:
    """The result of a look at samples. notes: remarks that are not errors. entries: of each metric, see fit_faults."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: dict[str, tuple[str, ...]] = field(default_factory=dict)


def look_at_samples(subject: Subject, stages: Sequence[Stage]) -> Findings:
    """Return what the first samples of these stages show.

    An exception of the user's code is left to the run, which names its place and writes the report.
    """
    data, found = subject.data, Findings()
    if data.rounded:
        found.notes.append(
            f"{' and '.join(data.rounded)} of the samples come in float64 and are given to the network in float32; "
            "precision=fp64 keeps them, with a network in float64"
        )
    for stage in stages:
        try:
            batch = data.first_samples(stage, seconds=SECONDS)
            if batch is not None:
                _look_at_batch(subject, batch, stage, found)
        except SampleError as error:
            found.faults.append(error.fault)
        except ConfigError as error:
            found.faults += error.faults
        except RunError:
            continue
    found.faults = _by_cause(found.faults)
    return found


def _look_at_batch(subject: Subject, batch: object, stage: Stage, found: Findings) -> None:
    spec = subject.data.spec
    for name, value in inputs_in(batch).items():
        if (place := _not_finite(value)) is not None:
            found.notes.append(
                f"sample {place} of {stage} has an {name} that is not finite: unless the network removes it, the loss "
                "is nan. Replace it in the data set or in data.transforms"
            )
    for forward, part in objectives_by_forward(subject.phases, subject.objective).items():
        trace = subject.traces.get(forward)
        if trace is None:
            continue
        unnamed = list(name_faults(term_names(part), trace, batch, spec))
        found.faults += unnamed or _term_faults(part, trace, batch, spec, stage)
        if not unnamed and subject.accumulates:
            part.known_divisors(named_values(batch))
    trace = subject.traces.get(None)  # metrics read the output of the network's own forward
    if trace is None or stage not in subject.metric_stages:
        return
    for measure in subject.measures.values():
        names = {f"{measure.key}.{place}": name for place, name in measure.names.items()}
        unnamed = list(name_faults(names, trace, batch, spec))
        found.faults += unnamed
        draw = _stand_ins(trace, batch, spec) if not unnamed and _is_batched(trace, measure.names.values()) else None
        if draw is not None:
            found.faults += fit_faults([measure], draw, stage, found.entries)


def term_names(objective: Objective) -> dict[str, str]:
    """Return the names of the values that the terms read, by the key of each name."""
    return {
        f"objective.{name}.{place}": wanted
        for name, term in objective.terms.items()
        for place, wanted in term.names.items()
    }


def name_faults(names: Mapping[str, str], trace: ForwardTrace, batch: object, spec: DataSpec) -> Iterator[Fault]:
    """Return the errors of names that neither the network nor the batch gives, or both. names: by their keys."""
    values = forward_by_name(trace.network, tuple(spec.inputs))(lambda *_, **__: trace.output, batch)
    parts = named_parts(trace.output)
    known, held = {**values, **parts}, batch if isinstance(batch, Mapping) else {}
    for key, wanted in names.items():
        if wanted in parts and wanted in held:
            yield Fault(
                key=key,
                got=f"{show(wanted)}, {BOTH}",
                expected="a name that one of them gives",
                cure="Give it another name in what the network returns, or in the data set",
                subject=wanted,
            )
        if wanted not in known:
            yield Fault(
                key=key,
                got=f"{show(wanted)}, which neither network nor batch gives",
                expected=f"one of {among(sorted(known), word=wanted)}",
                cure=did_you_mean(wanted, known),
                subject=wanted,
            )


def _by_cause(faults: Sequence[Fault]) -> list[Fault]:
    """Return the errors, with one for all keys that read the same unknown name, or names that two parts give."""
    groups: dict[object, list[Fault]] = {}
    for fault in faults:
        cause = fault.subject and (BOTH if fault.got.endswith(BOTH) else fault.got)
        groups.setdefault(cause or fault, []).append(fault)
    found = []
    for first, *others in groups.values():
        keys, names = ({getattr(one, name): None for one in (first, *others)} for name in ("key", "subject"))
        if len(keys) > 1:
            got = " and ".join(map(show, names)) + first.got.removeprefix(show(first.subject))
            first = replace(first, got=f"{got}, read by {among(list(keys))}", subject="")
        found.append(first)
    return found


class StandIns(Protocol):
    """Returns the values of the first samples by name, with outputs of the network's shapes.

    seed: The outputs are drawn from 0.05 to 0.95 by it. None gives 0.5, which is a score and a probability.
    batch: The batch whose entries are given instead of the first samples.
    """

    def __call__(self, seed: int | None = None, *, batch: object = None) -> Values: ...


def _stand_ins(trace: ForwardTrace, batch: object, spec: DataSpec) -> StandIns | None:
    """Return the stand-ins; None for texts of several lengths, whose outputs have other shapes each time."""
    each = max(1, sum(one[0].numel() for one in tensors_in(trace.output) if one.dim() and len(one)))
    count = max(2, min(CALLED, MOST_NUMBERS // each))
    few = mapped(batch, lambda tensor: tensor[:count] if tensor.dim() else tensor)
    found, names = inputs_in(few), tuple(spec.inputs)
    if not all(name in found and tuple(found[name].shape[1:]) == one.shape for name, one in spec.inputs.items()):
        return None
    run, samples = forward_by_name(trace.network, names), len(found[names[0]])

    def values(seed: int | None = None, *, batch: object = None) -> Values:
        draw = torch.Generator().manual_seed(seed or 0)

        def made(tensor: Tensor) -> Tensor:
            if not tensor.dim():
                return tensor
            shape = (samples, *tensor.shape[1:])
            share = torch.full(shape, 0.5) if seed is None else 0.05 + 0.9 * torch.rand(shape, generator=draw)
            return share.to(tensor.dtype)

        given = mapped(trace.output, made)
        return run(lambda *_, **__: given, few if batch is None else batch)

    return values


def _term_faults(
    objective: Objective, trace: ForwardTrace, batch: object, spec: DataSpec, stage: Stage
) -> Iterator[Fault]:
    """Return the errors of terms that compare an output with a target by a loss of a library."""
    draw = _stand_ins(trace, batch, spec)
    if draw is None:
        return
    values, whole = draw(), draw(batch=batch)
    if any(tensor.dtype == torch.float64 for tensor in tensors_in(trace.output)):
        objective = copy.deepcopy(objective).double()  # as precision=fp64 does, with the class weights
    for name, term in objective.terms.items():
        is_known = isinstance(term, Term) and type(term.loss).__module__.partition(".")[0] in LIBRARIES
        if not isinstance(term, Term) or not is_known or objective.needs_of(name):
            continue
        if not _is_batched(trace, term.names.values()):
            continue
        key, expected = objective.loss_keys[name], "targets that it takes"
        try:
            with torch.no_grad():
                term(values)
            if term.inputs is None:
                target, output = pick(whole, term.target, "target"), pick(values, term.output, "output")
                yield from _value_faults(term, key, target, output, stage)
        except RunError as error:
            yield Fault(key=key, got=f"in the first samples of {stage}: {error}", expected=expected)
        except REFUSALS as error:
            shown, cure = _described(values, term)
            got = f"{type(term.loss).__name__} refuses the targets of {stage}, {shown}: {one_line(error)}"
            yield Fault(key=key, got=got, expected=expected, cure=cure)


def _value_faults(term: Term, key: str, target: Tensor, output: Tensor, stage: Stage) -> Iterator[Fault]:
    loss = type(term.loss).__name__
    if target.is_floating_point() and (place := _not_finite(target)) is not None:
        got = f"sample {place} of {stage} has a target that is not finite"
        yield Fault(key=key, got=got, expected=f"finite targets for {loss}", cure="Correct it, or leave the sample out")
    elif isinstance(term.loss, ANSWERS) and (place := _first((target < 0) | (target > 1))) is not None:
        sample = target[place]
        got = f"{loss}, and sample {place} of {stage} has the target {float(sample[(sample < 0) | (sample > 1)][0]):g}"
        cure = "Answers are 0 for no and 1 for yes, or a probability; for class numbers write objective=[cross_entropy]"
        yield Fault(key=key, got=got, expected="targets from 0 to 1", cure=cure)


def _first(where: Tensor) -> int | None:
    """Return the place of the first sample for which a condition holds."""
    places = where.nonzero()
    return int(places[0, 0]) if len(places) else None


def _not_finite(value: object) -> int | None:
    if not isinstance(value, Tensor) or not value.is_floating_point() or not value.dim():
        return None
    return _first(~torch.isfinite(value))


def _is_batched(trace: ForwardTrace, names: Iterable[str]) -> bool:
    """Return whether the first axis of all outputs under these names is the batch axis."""
    size = len(next(iter(trace.inputs.values())))
    given = {"output": trace.output, **named_parts(trace.output)}
    read = tensors_in([given[name] for name in names if name in given])
    return all(one.dim() > 0 and len(one) == size for one in read)


def _described(values: Mapping[str, object], term: Term) -> tuple[str, str | None]:
    """Return the values that a loss refused in words, and the fix."""
    if term.inputs is not None:
        return ", ".join(f"{one} {described(pick(values, name, one))}" for one, name in term.inputs.items()), None
    target, output = pick(values, term.target, "target"), pick(values, term.output, "output")
    cure = "Give class numbers as int64" if target.dim() < output.dim() else None
    if target.dim() > 1 and target.shape[-1] == 1 and target.shape[:-1] == output.shape[:1]:
        cure = "Drop the target's last axis of 1"
    elif target.shape == output.shape and not target.is_floating_point():
        cure = "The targets seem to be one-hot: give class numbers, target.argmax(-1)"
    return f"{described(target)} for outputs {described(output)}", cure
