"""Note layers that work against each other or to no end, by the traced forward and not by the order of declaration.

A note names the layer, why in one clause, and the cure.
"""

# ruff: noqa: SIM905  (a list of words is read more easily as words)

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from exp.models.containers import ProgramModel, config_key, path_of
from exp.models.forward_trace import Call, ForwardTrace, Operation
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS, NORMS
from exp.models.program import Program
from exp.nested import named_parts, tensors_in
from exp.objectives.objective import Objective, Term
from exp.optim.parameter_groups import parameter_groups
from exp.spelling import among
from exp.strategies.placement import Placement

BIASED = (
    nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d,
)  # fmt: skip
DROPOUTS = (nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Without softplus, which Mish puts a tanh behind, and softmax, which is a note of its own before a loss.
ACTIVATIONS = frozenset(
    (
        "celu elu gelu hardsigmoid hardswish hardtanh leaky_relu mish prelu relu relu6 rrelu selu sigmoid silu tanh"
    ).split()
)
# Samples of a rank below which batch norm loses accuracy: by 1.1 points of ImageNet at 8, Wu and He 2018, figure 5.
FEW_SAMPLES = 16


@dataclass(frozen=True, kw_only=True)
class LayerNote:
    """key: of the layer, whose line is shown. at: line and column of a program at that key."""

    key: str
    text: str
    at: tuple[int, int] | None = None


def layer_notes(
    network: nn.Module,
    *,
    traces: Mapping[str | None, ForwardTrace],
    objectives: Mapping[str | None, Objective],
    is_adapted: bool,
) -> Iterator[LayerNote]:
    """Note what of the network the forward shows to be in vain.

    traces: by the name of the forward, as ShapeExamination has them. objectives: the terms that look at each.
    is_adapted: whether LoRA puts parameters into the network that the traced forward has not.
    """
    found: dict[tuple[str, str], LayerNote] = {}
    for trace in traces.values():
        for note in (*_biases(trace), *_dropouts(trace), *_activations(trace)):
            found.setdefault((note.key, note.text), note)
    yield from found.values()
    yield from _unread_values(network)
    if not is_adapted:
        yield from _without_gradient(network, traces, objectives)


def _key(trace: ForwardTrace, module: nn.Module) -> str:
    return config_key(trace.network, path_of(trace.network, module))


def _makers(trace: ForwardTrace) -> dict[int, Call]:
    """The innermost call that gave each tensor, by the tensor's id; a trace keeps them alive."""
    makers: dict[int, Call] = {}
    for call in trace.calls:
        if isinstance(call.output, Tensor):
            makers.setdefault(id(call.output), call)
    return makers


def _uses(trace: ForwardTrace) -> dict[int, list[Operation]]:
    uses: dict[int, list[Operation]] = {}
    for operation in trace.operations:
        for one in {id(source) for source in operation.sources}:
            uses.setdefault(one, []).append(operation)
    return uses


def _normalises(module: nn.Module) -> bool:
    """Whether a layer takes the mean of each channel off, by the batch or the sample at hand."""
    if isinstance(module, ANY_BATCH_NORM) and not isinstance(module, INSTANCE_NORMS):
        return bool(module.training)
    return isinstance(module, INSTANCE_NORMS)


def _biases(trace: ForwardTrace) -> Iterator[LayerNote]:
    """A bias that the norm behind it takes off again, wherever the layer is called."""
    makers, uses, held = _makers(trace), _uses(trace), set(trace.network.modules())
    returned = {id(one) for one in tensors_in(trace.output)}
    followed: dict[nn.Module, nn.Module] = {}
    alone: dict[nn.Module, int] = {}
    for norm in trace.calls:
        value = norm.inputs[0] if norm.inputs else None
        maker = makers.get(id(value)) if _normalises(norm.module) else None
        if maker is None or not isinstance(value, Tensor) or not isinstance(maker.module, BIASED):
            continue
        is_channel = not isinstance(maker.module, nn.Linear) or value.dim() == 2
        if is_channel and all(one.module is norm.module for one in uses.get(id(value), ())):
            followed[maker.module] = norm.module
            alone[maker.module] = alone.get(maker.module, 0) + (id(value) not in returned)
    for layer, by in followed.items():
        calls = sum(call.module is layer for call in trace.calls)
        bias = getattr(layer, "bias", None)
        if isinstance(bias, Tensor) and bias.requires_grad and alone[layer] == calls and {layer, by} <= held:
            yield LayerNote(
                key=f"{_key(trace, layer)}",
                text=f"has a bias, and {_key(trace, by)}, a {type(by).__name__}, takes it off again with the mean: it "
                "learns nothing. Write bias: false",
            )


def _dropouts(trace: ForwardTrace) -> Iterator[LayerNote]:
    """Dropout whose zeros a batch norm counts in its variance, which in evaluation is another."""
    makers, held = _makers(trace), set(trace.network.modules())
    for norm in trace.calls:
        if not isinstance(norm.module, ANY_BATCH_NORM) or isinstance(norm.module, INSTANCE_NORMS) or not norm.inputs:
            continue
        maker = makers.get(id(norm.inputs[0]))
        if maker is None or not isinstance(maker.module, DROPOUTS) or not {maker.module, norm.module} <= held:
            continue
        if maker.module.p > 0 and norm.module.training:
            yield LayerNote(
                key=_key(trace, maker.module),
                text=f"drops values right before {_key(trace, norm.module)}, a {type(norm.module).__name__}: the "
                "variance that it learns in training is not that of evaluation (Li et al. 2019). Put it behind that",
            )


def _activations(trace: ForwardTrace) -> Iterator[LayerNote]:
    """An activation of what an activation gave, with nothing that learns between them."""
    made: dict[int, Operation] = {}
    held = set(trace.network.modules())
    for operation in trace.operations:
        name = getattr(operation.function, "__name__", "").strip("_")
        if name not in ACTIVATIONS:
            continue
        before = made.get(id(operation.sources[0]))
        for result in operation.results:
            made[id(result)] = operation
        if before is None or before is operation:
            continue
        # What one class computes, such as an activation of the user's own, is its own affair.
        is_one = before.module is operation.module and not isinstance(operation.module, ProgramModel)
        if is_one or not {before.module, operation.module} <= held or operation.module is None:
            continue
        first = getattr(before.function, "__name__", "").strip("_")
        where = (
            "" if before.module is operation.module or before.module is None else f" of {_key(trace, before.module)}"
        )
        yield LayerNote(
            key=_key(trace, operation.module),
            text=f"has a {name} of a {first}{where}, and nothing that learns is between them: one of the two is too "
            "many. Take one out",
        )


def _unread_values(network: nn.Module) -> Iterator[LayerNote]:
    """Statements of forward programs whose value nothing reads."""
    for path, module in network.named_modules():
        if not isinstance(module, ProgramModel):
            continue
        key = config_key(network, path)
        programs = {"forward": module.program, **{f"programs.{name}": one for name, one in module.programs.items()}}
        for place, program in programs.items():
            for name, at in _unread(program):
                yield LayerNote(
                    key=f"{key}.{place}",
                    text=f"sets `{name}`, which nothing reads: the branch reaches no output. Take the line out, or "
                    "return what it gives",
                    at=at,
                )


def _unread(program: Program) -> Iterator[tuple[str, tuple[int, int]]]:
    """Names that a statement of their own sets and no expression reads; those of an unpacked tuple are often spare."""
    for node in ast.walk(program.tree):
        if not isinstance(node, ast.Assign) or len(node.targets) != 1:
            continue
        target = node.targets[0]
        if isinstance(target, ast.Name) and target.id not in program.names and not target.id.startswith("_"):
            yield target.id, (node.lineno, program.source.margin + node.col_offset + 1)


def _without_gradient(
    network: nn.Module, traces: Mapping[str | None, ForwardTrace], objectives: Mapping[str | None, Objective]
) -> Iterator[LayerNote]:
    """Layers whose parameters no output that the objective reads depends on."""
    parts = {part for objective in objectives.values() for term in objective.terms.values() for part in term.parts}
    learning = {id(one): one for one in network.parameters() if one.requires_grad}
    judged = [forward for forward in objectives if forward in traces]
    if "" in parts or len(judged) < len(objectives) or not judged:
        return
    reached: set[int] = set()
    for forward in judged:
        ends = _read_by(objectives[forward], traces[forward])
        found = _with_gradient(ends, list(learning.values()))
        if found is None:
            return
        reached |= found
    used = {id(one) for trace in traces.values() for step in trace.operations for one in step.sources}
    if not reached:
        return  # of a network that learns by another way, or of none, the run says more
    dead: dict[tuple[str, str], list[str]] = {}
    for name, layer in network.named_modules():
        own = [(path, one) for path, one in layer.named_parameters(recurse=False) if id(one) in learning]
        lost = [path for path, one in own if id(one) not in reached]
        if not lost or any(f"{name}.".startswith(f"{part}.") for part in parts):
            continue
        is_used = any(id(one) in used for path, one in own if path in lost)
        why = "what it gives reaches no output that the objective reads" if is_used else "the forward never uses it"
        # A module may hold a parameter that its forward uses, beside one that it does not.
        names = [".".join(filter(None, [name, path])) for path in lost] if len(lost) < len(own) else [name]
        dead.setdefault((config_key(network, name), why), []).extend(names)
    for (key, why), names in dead.items():
        yield LayerNote(
            key=key,
            text=f"({among(names, count=4)}) gets no gradient, for {why}: it stays as it was initialised. Use it, take "
            "it out of the model, or name it in freeze.parameters",
        )


def _read_by(objective: Objective, trace: ForwardTrace) -> list[Tensor]:
    """The outputs that an objective reads; all of them where a term may read any."""
    outputs = {"output": trace.output, **named_parts(trace.output)}
    if not all(isinstance(term, Term) and not term.needs for term in objective.terms.values()):
        return list(tensors_in(trace.output))
    names = {name for term in objective.terms.values() for name in term.names.values()}
    return list(tensors_in([outputs[name] for name in names if name in outputs]))


def _with_gradient(ends: Sequence[Tensor], learning: Sequence[nn.Parameter]) -> set[int] | None:
    """The ids of the parameters that outputs depend on; None where torch cannot say on the meta device."""
    ends = [one for one in ends if one.requires_grad and (one.is_floating_point() or one.is_complex())]
    if not ends:
        return set()
    try:
        found = torch.autograd.grad(
            ends, learning, [torch.ones_like(one) for one in ends], retain_graph=True, allow_unused=True
        )
    except (RuntimeError, NotImplementedError, TypeError, ValueError):
        return None  # a backward of the user's own, or one without a form for the meta device
    return {id(one) for one, gradient in zip(learning, found, strict=True) if gradient is not None}


def decay_notes(plain: Mapping[str, Any], network: nn.Module) -> Iterator[LayerNote]:
    """A weight decay that a config asks for, on the scales of norms."""
    node = plain["optimizer"]
    if plain["phases"] or not node.get("weight_decay"):
        return
    groups, exempt = node.get("groups") or {}, node.get("exempt_from_decay") or []
    decayed = {
        id(parameter)
        for group in parameter_groups(network, groups=groups, exempt_from_decay=exempt)
        if group.get("weight_decay", node["weight_decay"])
        for parameter in group["params"]
    }
    names = [
        f"{name}.{own}"
        for name, module in network.named_modules()
        if isinstance(module, NORMS)
        for own, parameter in module.named_parameters(recurse=False)
        if id(parameter) in decayed
    ]
    if names:
        yield LayerNote(
            key="optimizer.weight_decay",
            text=f"shrinks {among(names, count=4)} as well, the scales and shifts of norms, which fit nothing by being "
            "large. Write optimizer.exempt_from_decay=[norms, biases], or a group of optimizer.groups with "
            "weight_decay: 0",
        )


def synchronisation_notes(plain: Mapping[str, Any], network: nn.Module, placement: Placement) -> Iterator[LayerNote]:
    """Batch norms that take their statistics of few samples, each rank of its own share."""
    strategy, shares, size = plain["strategy"], placement.data_ranks, plain["data"].get("batch_size")
    if shares < 2 or not isinstance(size, int) or size // shares >= FEW_SAMPLES or strategy.get("sync_batchnorm"):
        return
    others = (*INSTANCE_NORMS, nn.SyncBatchNorm)
    norms = [
        name
        for name, module in network.named_modules()
        if module.training and isinstance(module, ANY_BATCH_NORM) and not isinstance(module, others)
    ]
    if norms:
        has_key = strategy["name"] in ("ddp", "fsdp", "auto")
        write = (
            "strategy.sync_batchnorm=true"
            if strategy["name"] != "auto"
            else "strategy=ddp +strategy.sync_batchnorm=true"
        )
        cure = f"Write {write}, or" if has_key else "Write"
        yield LayerNote(
            key=config_key(network, norms[0]),
            text=f"({among(norms, count=4)}) is normalised by {size // shares} samples of its own on each of {shares} "
            f"ranks, too few for its statistics. {cure} data.batch_size={FEW_SAMPLES * shares} or more, or take a "
            "torch.nn.GroupNorm",
        )
