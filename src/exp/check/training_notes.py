"""Note what trains badly without an error, as far as the config and the traced forward show it."""

# ruff: noqa: SIM905  (a list of words is easier to read as words)

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exp.check.layer_notes import Note, layer_notes
from exp.check.rules import better_mode
from exp.check.shapes import CLASSES_LAST, CLASSES_ON_AXIS_1, objectives_by_forward
from exp.models.containers import config_key, path_of
from exp.models.forward_trace import ForwardTrace
from exp.models.matching import ANY_BATCH_NORM, INSTANCE_NORMS, NORMS
from exp.nested import named_parts
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL
from exp.optim.parameter_groups import parameter_groups
from exp.optim.phase import Phase
from exp.spelling import among
from exp.strategies.placement import Placement

# Functions that keep probabilities probabilities: they change no numbers, or select or average some.
PASSING = frozenset(
    (
        "__getitem__ chunk clamp clip clone contiguous double flatten float getitem mean movedim permute reshape "
        "select squeeze swapaxes to transpose type_as unflatten unsqueeze view view_as"
    ).split()
)
PROBABILITIES = frozenset("softmax log_softmax gumbel_softmax softmin sigmoid logsigmoid expit".split())
# Batch norm of fewer samples per rank loses accuracy: 1.1 points of ImageNet at 8 (Wu and He 2018, figure 5).
FEW_SAMPLES = 16


def training_notes(
    plain: Mapping[str, Any],
    *,
    network: nn.Module,
    traces: Mapping[str | None, ForwardTrace],
    objective: Objective,
    phases: Sequence[Phase],
    placement: Placement,
    place: Callable[[str, tuple[int, int] | None], str | None] = lambda key, at: None,
) -> Iterator[str]:
    """Note what trains badly in a run without errors, one line each.

    Args:
        plain: The config.
        network: The network on the meta device.
        traces: By name of the forward, as in ShapeExamination.
        objective: Of the run.
        phases: Of the run.
        placement: Of the run.
        place: Returns the file and line of a key, or of a line and column of the program at a key; None if unknown.
    """
    found = list(_size(network))
    if plain["train"]:
        by_forward = objectives_by_forward(phases, objective)
        found += _rates(plain)
        found += _modes(plain)
        found += _probabilities(traces, by_forward)
        found += layer_notes(network, traces=traces, objectives=by_forward, is_adapted=bool(plain["lora"]["layers"]))
        found += _decayed_norms(plain, network)
        found += _batch_norms(plain, network, placement)
    for note in found:
        where = place(note.key, note.at)
        yield f"{note.key} {note.text}" + (f"  [{where}]" if where else "")


def _size(network: nn.Module) -> Iterator[Note]:
    """Note a network that does not fit into this machine's memory; its ranks may run on other machines."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        sizes = f"{needed / 2**30:,.0f} GiB, and this machine has {there / 2**30:,.0f} GiB of memory"
        yield Note(key="model", text=f"has parameters of {sizes}. Look for a size with a digit too many")


def _rates(plain: Mapping[str, Any]) -> Iterator[Note]:
    phases = {f"phases.{name}.optimizer": phase.get("optimizer") or {} for name, phase in plain["phases"].items()}
    for key, node in {"optimizer": plain["optimizer"], **phases}.items():
        groups = {f"{key}.groups.{name}": group for name, group in (node.get("groups") or {}).items()}
        for place, options in {key: node, **groups}.items():
            if options.get("lr") == 0:
                fix = (
                    "Write a rate above 0, or freeze the parameters with freeze.parameters, which saves their gradients"
                )
                yield Note(key=f"{place}.lr", text=f"is 0: its parameters do not change. {fix}")


def _modes(plain: Mapping[str, Any]) -> Iterator[Note]:
    watching = {f"callbacks.{name}": node for name, node in plain["callbacks"].items()}
    for key, node in {**watching, "scheduler": plain["scheduler"]}.items():
        if not isinstance(node, Mapping) or not {"monitor", "mode"} <= node.keys():
            continue
        better = better_mode(plain, node["monitor"], allow=plain["security"]["allow"])
        if better is not None and node["mode"] in ("min", "max") and node["mode"] != better:
            side = "higher" if better == "max" else "lower"
            text = f"is {node['mode']}, and {key}.monitor is {node['monitor']}: a {side} one is better"
            yield Note(key=f"{key}.mode", text=f"{text}. Write {key}.mode={better}")


def _probabilities(
    traces: Mapping[str | None, ForwardTrace], by_forward: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Note outputs that are probabilities, if their loss expects scores."""
    for forward, trace in traces.items():
        outputs = {"output": trace.output, **named_parts(trace.output)}
        for name, term in by_forward[forward].terms.items() if forward in by_forward else ():
            if not isinstance(term, Term) or term.inputs is not None:
                continue
            takes, value = _taken_by(term.loss), outputs.get(term.output)
            function, module = _made_by(trace, value) if takes and isinstance(value, Tensor) else (None, None)
            is_log = function == "log_softmax"
            if function is None or (is_log and not _has_softmax(term.loss)):
                continue
            key = "model" if module is None else config_key(trace.network, path_of(trace.network, module))
            harm = "it has no effect" if is_log else "its gradients are small, and the loss cannot become 0"
            text = f"ends in {function}, and objective.{name} is a {type(term.loss).__name__}, which takes {takes}"
            yield Note(key=key, text=f"{text}: {harm}. Remove {function} from the model")


def _taken_by(loss: nn.Module) -> str | None:
    """Return what a loss takes in words, if probabilities are wrong for it."""
    if isinstance(loss, NLL | nn.NLLLoss):
        return "log probabilities (LogSoftmax)"
    if _has_softmax(loss):
        return "scores, and applies a softmax"
    is_sigmoid = isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss)
    return "scores, and applies a sigmoid" if is_sigmoid else None


def _has_softmax(loss: nn.Module) -> bool:
    return isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1) and not isinstance(loss, NLL | nn.NLLLoss)


def _made_by(trace: ForwardTrace, value: Tensor) -> tuple[str | None, nn.Module | None]:
    """Return the function that made probabilities of scores, and the module that called it; None if none did."""
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


def _decayed_norms(plain: Mapping[str, Any], network: nn.Module) -> Iterator[Note]:
    """Note a weight decay that shrinks the scales of norms."""
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
        fix = "Write optimizer.exempt_from_decay=[norms, biases], or a group of optimizer.groups with weight_decay: 0"
        text = f"also shrinks {among(names, count=4)}, the scales and shifts of norms, which do not overfit. {fix}"
        yield Note(key="optimizer.weight_decay", text=text)


def _batch_norms(plain: Mapping[str, Any], network: nn.Module, placement: Placement) -> Iterator[Note]:
    """Note batch norms with few samples per rank, and frozen ones whose statistics change."""
    norms: dict[str, Any] = {
        name: module for name, module in network.named_modules() if isinstance(module, ANY_BATCH_NORM)
    }
    strategy, ranks, size = plain["strategy"], placement.data_ranks, plain["data"].get("batch_size")
    others = (*INSTANCE_NORMS, nn.SyncBatchNorm)
    local = [name for name, norm in norms.items() if norm.training and not isinstance(norm, others)]
    is_few = ranks > 1 and isinstance(size, int) and size // ranks < FEW_SAMPLES
    if local and is_few and not strategy.get("sync_batchnorm"):
        words = {"ddp": "", "fsdp": "", "auto": "strategy=ddp +"}
        prefix = words.get(strategy["name"])
        fix = "Write" if prefix is None else f"Write {prefix}strategy.sync_batchnorm=true, or"
        text = f"({among(local, count=4)}) is normalized by {size // ranks} samples on each of {ranks} ranks, too few"
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
