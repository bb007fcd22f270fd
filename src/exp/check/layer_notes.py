"""Note layers that have no effect or work against each other, from the traced forward."""

# ruff: noqa: SIM905  (a list of words is easier to read as words)

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exp.models.containers import ProgramModel, config_key, path_of
from exp.models.forward_trace import ForwardTrace, Operation
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import named_parts, tensors_in
from exp.objectives.objective import Objective, Term
from exp.spelling import among

BIASED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Without softplus, because Mish applies tanh to it, and without softmax, which has its own note.
ACTIVATIONS = frozenset(
    (
        "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish prelu relu relu6 rrelu selu sigmoid silu tanh"
    ).split()
)


@dataclass(frozen=True, kw_only=True)
class Note:
    """A remark on a config that trains badly without an error.

    key: the config key, whose line is shown. at: line and column of a program at that key.
    """

    key: str
    text: str
    at: tuple[int, int] | None = None


def layer_notes(
    network: nn.Module,
    *,
    traces: Mapping[str | None, ForwardTrace],
    objectives: Mapping[str | None, Objective],
    is_adapted: bool,
) -> Iterator[Note]:
    """Note the layers that the forward shows to have no effect.

    Args:
        network: The network on the meta device.
        traces: By name of the forward, as in ShapeExamination.
        objectives: The terms that read the output of each forward.
        is_adapted: Whether LoRA adds parameters that the traced forward lacks.
    """
    notes = (note for trace in traces.values() for note in (*_before_norms(trace), *_activations(trace)))
    yield from {(note.key, note.text): note for note in notes}.values()
    for path, module in network.named_modules():
        if isinstance(module, ProgramModel):
            yield from _unread_values(module, config_key(network, path))
    if not is_adapted:
        yield from _without_gradient(network, traces, objectives)


def _key(trace: ForwardTrace, module: nn.Module) -> str:
    return config_key(trace.network, path_of(trace.network, module))


def _before_norms(trace: ForwardTrace) -> Iterator[Note]:
    """Note a bias that a norm subtracts again, and dropout that changes the variance of a batch norm."""
    held = set(trace.network.modules())
    readers: dict[int, list[nn.Module | None]] = {}
    for operation in trace.operations:
        for source in operation.sources:
            readers.setdefault(id(source), []).append(operation.module)
    for one in tensors_in(trace.output):
        readers.setdefault(id(one), []).append(None)
    for path, calls in trace.by_path().items():
        layer, outputs = calls[0].module, [call.output for call in calls if isinstance(call.output, Tensor)]
        key = config_key(trace.network, path)
        read_by = [module for one in outputs for module in readers.get(id(one), ())]
        norms = [module for module in read_by if module in held and isinstance(module, ANY_BATCH_NORM)]
        batch_norms = [norm for norm in norms if norm.training and not isinstance(norm, INSTANCE_NORMS)]
        if isinstance(layer, DROPOUTS) and layer.p > 0 and batch_norms:
            norm = batch_norms[0]
            yield Note(
                key=key,
                text=f"drops values right before {_key(trace, norm)}, a {type(norm).__name__}: the variance of "
                "training differs from that of evaluation (Li et al. 2019). Put it after the norm",
            )
        bias = getattr(layer, "bias", None)
        if not isinstance(layer, BIASED) or not isinstance(bias, Tensor) or not bias.requires_grad:
            continue
        subtracting = [norm for norm in norms if norm in batch_norms or isinstance(norm, INSTANCE_NORMS)]
        is_channel = not isinstance(layer, nn.Linear) or all(one.dim() == 2 for one in outputs)
        if is_channel and subtracting and len(subtracting) == len(read_by):
            norm = subtracting[0]
            yield Note(
                key=key,
                text=f"has a bias, and {_key(trace, norm)}, a {type(norm).__name__}, subtracts it again with the mean: "
                "it learns nothing. Write bias: false",
            )


def _activations(trace: ForwardTrace) -> Iterator[Note]:
    """Note an activation of an activation, without a layer between them."""
    made: dict[int, Operation] = {}
    held = set(trace.network.modules())
    for operation in trace.operations:
        name = _name(operation)
        if name not in ACTIVATIONS:
            continue
        before = made.get(id(operation.sources[0]))
        made.update({id(result): operation for result in operation.results})
        if before is None or operation.module is None or not {before.module, operation.module} <= held:
            continue
        is_one = before.module is operation.module
        # The activations inside one class of the user's own are not judged.
        if before is operation or (is_one and not isinstance(operation.module, ProgramModel)):
            continue
        where = "" if is_one or before.module is None else f" of {_key(trace, before.module)}"
        yield Note(
            key=_key(trace, operation.module),
            text=f"has a {name} of a {_name(before)}{where}, and nothing that learns is between them. Remove one",
        )


def _name(operation: Operation) -> str:
    return getattr(operation.function, "__name__", "").strip("_")


def _unread_values(module: ProgramModel, key: str) -> Iterator[Note]:
    """Note names in a model's programs that a statement sets and no expression reads, except unpacked tuples."""
    programs = {"forward": module.program, **{f"programs.{name}": one for name, one in module.programs.items()}}
    for place, program in programs.items():
        for node in ast.walk(program.tree):
            target = node.targets[0] if isinstance(node, ast.Assign) and len(node.targets) == 1 else None
            if isinstance(target, ast.Name) and target.id not in program.names and not target.id.startswith("_"):
                yield Note(
                    key=f"{key}.{place}",
                    text=f"sets `{target.id}`, which nothing reads. Remove the line, or return the value",
                    at=(target.lineno, program.source.margin + target.col_offset + 1),
                )


def _without_gradient(
    network: nn.Module, traces: Mapping[str | None, ForwardTrace], objectives: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Note layers whose parameters influence no output that the objective reads."""
    parts = {part for objective in objectives.values() for term in objective.terms.values() for part in term.parts}
    learning = {id(one): one for one in network.parameters() if one.requires_grad}
    if "" in parts or not objectives or not objectives.keys() <= traces.keys():
        return
    reached: set[int] = set()
    for forward, objective in objectives.items():
        found = _with_gradient(_read_by(objective, traces[forward]), list(learning.values()))
        if found is None:
            return
        reached |= found
    if not reached:
        return  # a network that learns in another way, or not at all
    used = {id(one) for trace in traces.values() for step in trace.operations for one in step.sources}
    dead: dict[tuple[str, str], list[str]] = {}
    for name, layer in network.named_modules():
        own = [(path, one) for path, one in layer.named_parameters(recurse=False) if id(one) in learning]
        lost = {path: one for path, one in own if id(one) not in reached}
        if not lost or any(f"{name}.".startswith(f"{part}.") for part in parts):
            continue
        is_used = any(id(one) in used for one in lost.values())
        why = "its output reaches no output that the objective reads" if is_used else "the forward never uses it"
        # A module may have a parameter that its forward uses and another that it does not.
        names = [".".join(filter(None, [name, path])) for path in lost] if len(lost) < len(own) else [name]
        dead.setdefault((config_key(network, name), why), []).extend(names)
    for (key, why), names in dead.items():
        yield Note(
            key=key,
            text=f"({among(names, count=4)}) gets no gradient, because {why}: it keeps its initial values. Use it, "
            "remove it from the model, or name it in freeze.parameters",
        )


def _read_by(objective: Objective, trace: ForwardTrace) -> list[Tensor]:
    """Return the outputs that an objective reads; all outputs if a term may read any."""
    outputs = {"output": trace.output, **named_parts(trace.output)}
    if not all(isinstance(term, Term) and not term.needs for term in objective.terms.values()):
        return list(tensors_in(trace.output))
    names = {name for term in objective.terms.values() for name in term.names.values()}
    return list(tensors_in([outputs[name] for name in names if name in outputs]))


def _with_gradient(ends: Sequence[Tensor], learning: Sequence[nn.Parameter]) -> set[int] | None:
    """Return the ids of the parameters that outputs depend on; None if the meta device has no backward for them."""
    ends = [one for one in ends if one.requires_grad and (one.is_floating_point() or one.is_complex())]
    if not ends:
        return set()
    try:
        found = torch.autograd.grad(
            ends, learning, [torch.ones_like(one) for one in ends], retain_graph=True, allow_unused=True
        )
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None
    return {id(one) for one, gradient in zip(learning, found, strict=True) if gradient is not None}
