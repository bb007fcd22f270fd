"""Hold the first samples of the data against objective and metrics: what these refuse, or train wrongly by.

The losses of torch and of exp are called with real targets and stand-in outputs of the shape that the network gives.
What lies beyond the first samples the run tells, as it reads them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor, nn

from exp.check.input_faults import described
from exp.check.metric_faults import fit_faults
from exp.check.shapes import objectives_by_forward
from exp.config.slots import nodes_in
from exp.data.data import Data
from exp.data.entries import inputs_in
from exp.data.faults import SampleError
from exp.engine.forward import Forward, forward_by_name, named_values
from exp.errors import LIBRARIES, REFUSALS, ConfigError, Fault, RunError, one_line
from exp.models.forward_trace import ForwardTrace
from exp.nested import mapped, named_parts, tensors_in
from exp.objectives.loss_inputs import Values, pick
from exp.objectives.measures import Measure
from exp.objectives.objective import Objective, Term
from exp.optim.phase import Phase
from exp.shared_types import DataSpec, Stage
from exp.spelling import among, did_you_mean, show

SECONDS = 5.0  # of reading, for each part
# Whose samples are right by themselves: no file of the user's, no class, no transform.
SHIPPED = tuple(f"exp.data.{module}." for module in ("data", "digits", "tables", "text"))
# Samples of in-memory data with which a loss is called; their values are looked at whole.
CALLED = 64
# Numbers of an output that are made for that, such as of a text's tokens over a vocabulary: 64 MiB.
MOST_NUMBERS = 2**24
ANSWERS = (nn.BCELoss, nn.BCEWithLogitsLoss)
BOTH = "which both network and batch give"


def is_shipped(data: Mapping[str, object]) -> bool:
    """Whether a data node holds nothing of the user's own."""
    return all(str(node["_target_"]).startswith(SHIPPED) for _, node in nodes_in(data))


@dataclass(frozen=True, kw_only=True)
class Subject:
    """What the samples are held against.

    traces: of the network's forwards, as ShapeExamination has them. metric_stages: those of the measures.
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
    """What was found. notes: what to say that is no fault. entries: of each metric, as fit_faults gives them."""

    faults: list[Fault] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)
    entries: dict[str, tuple[str, ...]] = field(default_factory=dict)


def look_at_samples(subject: Subject, stages: Sequence[Stage]) -> Findings:
    """What the first samples of these stages show.

    An exception of the user's own code is left for the run, which tells its place and writes the report.
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
            if batch is None:
                continue
            for name, value in inputs_in(batch).items():
                if (place := _not_finite(value)) is not None:
                    found.notes.append(
                        f"sample {place} of {stage} has an {name} that is not finite: unless the network takes it out, "
                        "the loss is nan. Replace it in the data set or in data.transforms"
                    )
            for forward, part in objectives_by_forward(subject.phases, subject.objective).items():
                if forward in subject.traces:
                    trace = subject.traces[forward]
                    unnamed = list(name_faults(term_names(part), trace, batch, data.spec))
                    found.faults += unnamed or _term_faults(part, trace, batch, data.spec, stage)
                    if subject.accumulates and not unnamed:
                        part.known_divisors(named_values(batch))
            _look_at_metrics(subject, batch, stage, found)
        except SampleError as error:
            found.faults.append(error.fault)
        except ConfigError as error:
            found.faults += error.faults
        except RunError:
            continue
    found.faults = _by_cause(found.faults)
    return found


def look_at_names(subject: Subject) -> Findings:
    """The same of exp's own data, whose samples are right: whether somebody gives what is read; and the metrics."""
    data, found = subject.data, Findings()
    stages = [stage for stage in data.stages if stage in subject.metric_stages] if subject.measures else []
    stage = stages[0] if stages else data.stages[0]
    batch = data.first_samples(stage, seconds=SECONDS)
    if batch is None:
        return found
    for forward, part in objectives_by_forward(subject.phases, subject.objective).items():
        if forward in subject.traces:
            unnamed = list(name_faults(term_names(part), subject.traces[forward], batch, data.spec))
            found.faults += unnamed
            if subject.accumulates and not unnamed:
                part.known_divisors(named_values(batch))
    _look_at_metrics(subject, batch, stage, found)
    found.faults = _by_cause(found.faults)
    return found


def _look_at_metrics(subject: Subject, batch: object, stage: Stage, found: Findings) -> None:
    """Metrics look at what the network's own forward gives."""
    trace, spec = subject.traces.get(None), subject.data.spec
    if trace is None or stage not in subject.metric_stages:
        return
    for measure in subject.measures.values():
        names = {f"{measure.key}.{place}": name for place, name in measure.names.items()}
        unnamed = list(name_faults(names, trace, batch, spec))
        found.faults += unnamed
        if unnamed or not _is_batched(trace, measure.names.values()):
            continue
        if (drawn := _stand_ins(trace, batch, spec)) is not None:
            found.faults += fit_faults([measure], drawn.values, stage, found.entries)


def term_names(objective: Objective) -> dict[str, str]:
    """Which values the terms read: the key where each stands, to its name."""
    return {
        f"objective.{name}.{place}": wanted
        for name, term in objective.terms.items()
        for place, wanted in term.names.items()
    }


def name_faults(names: Mapping[str, str], trace: ForwardTrace, batch: object, spec: DataSpec) -> Iterator[Fault]:
    """Of values that are read, and that neither network nor batch gives, or both. names: by the keys of these."""
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
    """Return the errors, and one for all keys that read the same wrong name, or names that two give."""
    groups: dict[object, list[Fault]] = {}
    for fault in faults:
        cause = fault.subject and (BOTH if fault.got.endswith(BOTH) else fault.got)
        groups.setdefault(cause or fault, []).append(fault)
    found = []
    for first, *others in groups.values():
        keys, names = ({getattr(one, name): None for one in (first, *others)} for name in ("key", "subject"))
        if len(keys) > 1:
            told = " and ".join(map(show, names)) + first.got.removeprefix(show(first.subject))
            first = replace(first, got=f"{told}, read by {among(list(keys))}", subject="")
        found.append(first)
    return found


@dataclass(frozen=True, kw_only=True)
class StandIns:
    """The first samples with outputs that no network gave, of the shapes that it gives.

    few: those samples. run: one forward by name. output: on the meta device. samples: how many there are.
    """

    few: object
    run: Forward
    output: object
    samples: int

    def values(self, seed: int | None = None, *, batch: object = None) -> Values:
        """The values by name, with outputs drawn from 0.05 to 0.95; without a seed a half, which is a score, too.

        batch: whose entries are given in the place of the few samples'.
        """
        draw = torch.Generator().manual_seed(seed or 0)

        def made(tensor: Tensor) -> Tensor:
            shape = (self.samples, *tensor.shape[1:])
            share = torch.full(shape, 0.5) if seed is None else 0.05 + 0.9 * torch.rand(shape, generator=draw)
            return share.to(tensor.dtype)

        given = mapped(self.output, lambda tensor: made(tensor) if tensor.dim() else tensor)
        return self.run(lambda *_, **__: given, self.few if batch is None else batch)


def _stand_ins(trace: ForwardTrace, batch: object, spec: DataSpec) -> StandIns | None:
    """None of networks that take texts of several lengths, and give outputs of another shape for each."""
    each = max(1, sum(one[0].numel() for one in tensors_in(trace.output) if one.dim() and len(one)))
    count = max(2, min(CALLED, MOST_NUMBERS // each))
    few = mapped(batch, lambda tensor: tensor[:count] if tensor.dim() else tensor)
    found, names = inputs_in(few), tuple(spec.inputs)
    if not all(name in found and tuple(found[name].shape[1:]) == one.shape for name, one in spec.inputs.items()):
        return None
    run = forward_by_name(trace.network, names)
    return StandIns(few=few, run=run, output=trace.output, samples=len(found[names[0]]))


def _term_faults(
    objective: Objective, trace: ForwardTrace, batch: object, spec: DataSpec, stage: Stage
) -> Iterator[Fault]:
    """Of the terms that compare an output with a target by a loss of a library."""
    drawn = _stand_ins(trace, batch, spec)
    if drawn is None:
        return
    values, whole = drawn.values(), drawn.values(batch=batch)
    if any(tensor.dtype == torch.float64 for tensor in tensors_in(drawn.output)):
        objective = copy.deepcopy(objective).double()  # as precision=fp64 has it, with its class weights
    for name, term in objective.terms.items():
        is_known = isinstance(term, Term) and type(term.loss).__module__.partition(".")[0] in LIBRARIES
        if not isinstance(term, Term) or not is_known or objective.needs_of(name):
            continue
        if not _is_batched(trace, term.names.values()):
            continue
        key, loss = objective.loss_keys[name], type(term.loss).__name__
        try:
            with torch.no_grad():
                term(values)
                if term.inputs is not None:
                    continue
                target, output = pick(whole, term.target, "target"), pick(values, term.output, "output")
        except RunError as error:
            yield Fault(key=key, got=f"in the first samples of {stage}: {error}", expected="targets that it takes")
            continue
        except REFUSALS as error:
            got = f"{loss} refuses the targets of {stage}, {_described(values, term)}: {one_line(error)}"
            yield Fault(key=key, got=got, expected="targets that it takes", cure=_cure(values, term))
            continue
        yield from _value_faults(term, key, target, output, stage)


def _value_faults(term: Term, key: str, target: Tensor, output: Tensor, stage: Stage) -> Iterator[Fault]:
    loss = type(term.loss).__name__
    if target.is_floating_point() and (place := _not_finite(target)) is not None:
        got = f"sample {place} of {stage} has a target that is not finite"
        yield Fault(key=key, got=got, expected=f"finite targets for {loss}", cure="Correct it, or leave the sample out")
    elif isinstance(term.loss, ANSWERS) and (place := _first((target < 0) | (target > 1))) is not None:
        got = f"{loss}, and sample {place} of {stage} has the target {_extreme(target[place])}"
        cure = "Answers are 0 for no and 1 for yes, or a probability; for class numbers write objective=[cross_entropy]"
        yield Fault(key=key, got=got, expected="targets from 0 to 1", cure=cure)


def _extreme(target: Tensor) -> str:
    return f"{float(target.flatten()[((target < 0) | (target > 1)).flatten().nonzero()[0, 0]]):g}"


def _first(where: Tensor) -> int | None:
    """The place of the first sample for which something holds."""
    places = where.nonzero()
    return int(places[0, 0]) if len(places) else None


def _not_finite(value: object) -> int | None:
    is_number = isinstance(value, Tensor) and value.is_floating_point() and value.dim() > 0
    return _first(~torch.isfinite(value)) if isinstance(value, Tensor) and is_number else None


def _is_batched(trace: ForwardTrace, names: Iterable[str]) -> bool:
    """Whether samples lie on the first axis of all that the network returns under these names."""
    size = len(next(iter(trace.inputs.values())))
    given = {"output": trace.output, **named_parts(trace.output)}
    read = tensors_in([given[name] for name in names if name in given])
    return all(one.dim() > 0 and len(one) == size for one in read)


def _described(values: Mapping[str, object], term: Term) -> str:
    if term.inputs is not None:
        return ", ".join(f"{one} {described(pick(values, name, one))}" for one, name in term.inputs.items())
    target, output = pick(values, term.target, "target"), pick(values, term.output, "output")
    return f"{described(target)} for outputs {described(output)}"


def _cure(values: Mapping[str, object], term: Term) -> str | None:
    if term.inputs is not None:
        return None
    target, output = pick(values, term.target, "target"), pick(values, term.output, "output")
    if target.dim() > 1 and target.shape[-1] == 1 and target.shape[:-1] == output.shape[:1]:
        return "Drop the target's last axis of 1"
    if target.shape == output.shape and not target.is_floating_point():
        return "The targets seem to be one-hot: give class numbers, target.argmax(-1)"
    return "Give class numbers as int64" if target.dim() < output.dim() else None
