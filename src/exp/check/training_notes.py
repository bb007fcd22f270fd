"""Remarks on settings that train badly without an error, found in the config and the traced forward."""

# ruff: noqa: SIM905  (a list of words is easier to read as words)

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from exp.check.plan import Plan
from exp.check.shapes import CLASSES_LAST, CLASSES_ON_AXIS_1, objectives_by_forward
from exp.config.settings import Settings
from exp.config.sources import source_of
from exp.models.containers import config_key, path_of
from exp.models.forward_trace import ForwardTrace
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS
from exp.nested import named_parts, tensors_in
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL
from exp.spelling import among
from exp.strategies.placement import Placement

# Functions with results that are probabilities if their inputs are. They keep, select or average numbers.
PASSING = frozenset(
    (
        "__getitem__ chunk clamp clip clone contiguous double flatten float getitem mean movedim permute reshape "
        "select squeeze swapaxes to transpose type_as unflatten unsqueeze view view_as"
    ).split()
)
PROBABILITIES = frozenset("softmax log_softmax gumbel_softmax softmin sigmoid logsigmoid expit".split())
# Batch norm of fewer samples per rank loses accuracy: 1.1 points of ImageNet at 8 (Wu and He 2018, figure 5).
FEW_SAMPLES = 16


class Note(NamedTuple):
    """A remark on the value of a config key.

    Attributes:
        key: The key.
        text: Text that follows the key in the message.
    """

    key: str
    text: str


def training_notes(decided: Plan) -> Iterator[str]:
    """Yield a line for each setting that trains badly, with the file and line that set it."""
    settings, network, traces = decided.settings, decided.network, decided.shapes.traces
    if network is None or not settings.train:
        return
    by_forward = objectives_by_forward(decided.phases, decided.objective)
    found = [*_rates(settings), *_probabilities(traces, by_forward)]
    if not settings.lora.layers:  # LoRA adds parameters that the traced forward lacks
        found += without_gradient(network, traces, by_forward)
    found += _batch_norms(settings, network, decided.placement)
    config = decided.resolved.config
    for note in found:
        where = source_of(config, note.key)
        yield f"{note.key} {note.text}" + (f"  [{where}]" if where else "")


def _rates(settings: Settings) -> Iterator[Note]:
    phases = {f"phases.{name}.optimizer": phase.get("optimizer") or {} for name, phase in settings.phases.items()}
    for key, node in {"optimizer": settings.optimizer, **phases}.items():
        groups = {f"{key}.groups.{name}": group for name, group in (node.get("groups") or {}).items()}
        for place, options in {key: node, **groups}.items():
            if options.get("lr") == 0:
                fix = (
                    "Write a rate above 0, or freeze the parameters with freeze.parameters, which saves their gradients"
                )
                yield Note(key=f"{place}.lr", text=f"is 0: its parameters do not change. {fix}")


def _probabilities(
    traces: Mapping[str | None, ForwardTrace], by_forward: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Yield a remark for each output that is a probability although its loss expects scores."""
    for forward, trace in traces.items():
        outputs = {"output": trace.output, **named_parts(trace.output)}
        for name, term in by_forward[forward].terms.items() if forward in by_forward else ():
            if not isinstance(term, Term) or term.inputs is not None:
                continue
            takes, value = _expected_input(term.loss), outputs.get(term.output)
            function, module = _find_maker(trace, value) if takes and isinstance(value, Tensor) else (None, None)
            is_log = function == "log_softmax"
            if function is None or (is_log and not _has_softmax(term.loss)):
                continue
            key = "model" if module is None else config_key(trace.network, path_of(trace.network, module))
            harm = "it has no effect" if is_log else "its gradients are small, and the loss cannot become 0"
            text = f"ends in {function}, and objective.{name} is a {type(term.loss).__name__}, which takes {takes}"
            yield Note(key=key, text=f"{text}: {harm}. Remove {function} from the model")


def _expected_input(loss: nn.Module) -> str | None:
    """Return a description of the input that a loss expects. Return None if probabilities may be a correct input."""
    if isinstance(loss, NLL | nn.NLLLoss):
        return "log probabilities (LogSoftmax)"
    if _has_softmax(loss):
        return "scores, and applies a softmax"
    is_sigmoid = isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss)
    return "scores, and applies a sigmoid" if is_sigmoid else None


def _has_softmax(loss: nn.Module) -> bool:
    return isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1) and not isinstance(loss, NLL | nn.NLLLoss)


def _find_maker(trace: ForwardTrace, value: Tensor) -> tuple[str | None, nn.Module | None]:
    """Return the function that turned scores into probabilities, and the module that called it.

    Returns:
        The name of the function and the module. None for both if the value is not made of probabilities.
    """
    for operation in reversed(trace.operations):
        if not any(result is value for result in operation.results):
            continue
        name = getattr(operation.function, "__name__", "").removeprefix("special_")
        if name in PROBABILITIES:
            return name, operation.module
        if name not in PASSING:
            break
        value = operation.sources[0]
    return None, None


def _batch_norms(settings: Settings, network: nn.Module, placement: Placement) -> Iterator[Note]:
    """Yield remarks on batch norms with few samples per rank, and on frozen batch norms with changing statistics."""
    norms: dict[str, Any] = {
        name: module for name, module in network.named_modules() if isinstance(module, ANY_BATCH_NORM)
    }
    strategy, ranks = settings.strategy, placement.data_ranks
    share = None if settings.batch_size is None else settings.batch_size // ranks
    others = (*INSTANCE_NORMS, nn.SyncBatchNorm)
    local = [name for name, norm in norms.items() if norm.training and not isinstance(norm, others)]
    if local and ranks > 1 and share is not None and share < FEW_SAMPLES and not strategy.get("sync_batchnorm"):
        words = {"ddp": "", "fsdp": "", "auto": "strategy=ddp +"}
        prefix = words.get(strategy["name"])
        fix = "Write" if prefix is None else f"Write {prefix}strategy.sync_batchnorm=true, or"
        text = f"({among(local, count=4)}) is normalized by {share} samples on each of {ranks} ranks, too few"
        fix = f"{fix} data.batch_size={FEW_SAMPLES * ranks} or more, or use torch.nn.GroupNorm"
        yield Note(key=config_key(network, local[0]), text=f"{text} for its statistics. {fix}")
    frozen = [
        name
        for name, norm in norms.items()
        if norm.affine and not (norm.weight.requires_grad or norm.bias.requires_grad)
        if norm.training and norm.track_running_stats and norm.momentum != 0
    ]
    if frozen:
        text = f"({among(frozen, count=6)}) is frozen, and its running statistics change with every batch, so that they"
        fix = "Write freeze.batch_norm=eval, or do not freeze it"
        yield Note(key=config_key(network, frozen[0]), text=f"{text} no longer fit its weights. {fix}")


def without_gradient(
    network: nn.Module, traces: Mapping[str | None, ForwardTrace], objectives: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Yield remarks on layers with parameters that influence no output that the objective reads."""
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
        return  # no parameter gets a gradient through the objective, so the network may learn in another way
    used = {id(one) for trace in traces.values() for step in trace.operations for one in step.sources}
    dead: dict[tuple[str, str], list[str]] = {}
    for name, layer in network.named_modules():
        own = [(path, one) for path, one in layer.named_parameters(recurse=False) if id(one) in learning]
        lost = {path: one for path, one in own if id(one) not in reached}
        if not lost or any(f"{name}.".startswith(f"{part}.") for part in parts):
            continue
        is_used = any(id(one) in used for one in lost.values())
        why = "its output reaches no output that the objective reads" if is_used else "the forward never uses it"
        # If only some parameters of a layer get no gradient, list these parameters instead of the layer.
        names = [".".join(filter(None, [name, path])) for path in lost] if len(lost) < len(own) else [name]
        dead.setdefault((config_key(network, name), why), []).extend(names)
    for (key, why), names in dead.items():
        yield Note(
            key=key,
            text=f"({among(names, count=4)}) gets no gradient, because {why}: it keeps its initial values. Use it, "
            "remove it from the model, or name it in freeze.parameters",
        )


def _read_by(objective: Objective, trace: ForwardTrace) -> list[Tensor]:
    """Return the outputs that an objective reads. Return all outputs if a term may read any output."""
    outputs = {"output": trace.output, **named_parts(trace.output)}
    if not all(isinstance(term, Term) and not term.needs for term in objective.terms.values()):
        return list(tensors_in(trace.output))
    names = {name for term in objective.terms.values() for name in term.names.values()}
    return list(tensors_in([outputs[name] for name in names if name in outputs]))


def _with_gradient(ends: Sequence[Tensor], learning: Sequence[nn.Parameter]) -> set[int] | None:
    """Return the ids of the parameters on which outputs depend.

    Return None if the meta device cannot run the backward.
    """
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
