"""Note what trains badly without a fault, as far as the config and the traced forward show it, each with its cure.

What only the data and the first steps show is noted by engine/first_steps.py.
"""

# ruff: noqa: SIM905  (a list of words is read more easily as words)

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from torch import Tensor, nn

from exp.check.layer_notes import LayerNote, decay_notes, layer_notes, synchronisation_notes
from exp.check.rules import better_mode
from exp.check.shapes import CLASSES_LAST, CLASSES_ON_AXIS_1, objectives_by_forward
from exp.models.containers import config_key
from exp.models.forward_trace import ForwardTrace
from exp.models.matching import ANY_BATCH_NORM
from exp.nested import named_parts
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL
from exp.optim.phase import Phase
from exp.spelling import among
from exp.strategies.placement import Placement

# What changes no numbers, or only picks and averages some: probabilities stay probabilities.
PASSING = frozenset(
    (
        "__getitem__ chunk clamp clip clone contiguous double flatten float getitem mean movedim permute reshape "
        "select squeeze swapaxes to transpose type_as unflatten unsqueeze view view_as"
    ).split()
)


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
    """Note what a run without a fault does in vain, a line each.

    network, traces: as ShapeExamination has them. objective, phases, placement: of the run.
    place: the file and line of a key, and of a line and column of a program at it; None where nobody knows them.
    """
    yield from _size(network)
    if not plain["train"]:
        return
    yield from _rates(plain)
    yield from _modes(plain)
    by_forward = objectives_by_forward(phases, objective)
    found = [
        *_probabilities(traces, by_forward),
        *layer_notes(network, traces=traces, objectives=by_forward, is_adapted=bool(plain["lora"]["layers"])),
        *decay_notes(plain, network),
        *synchronisation_notes(plain, network, placement),
    ]
    for note in found:
        where = place(note.key, note.at)
        yield f"{note.key} {note.text}" + (f"  [{where}]" if where else "")
    yield from _frozen_norms(network)


def _size(network: nn.Module) -> Iterator[str]:
    """A network that no memory of this machine holds: its ranks may lie on others, or a digit too many was typed."""
    needed = sum(parameter.numel() * parameter.element_size() for parameter in network.parameters())
    there = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    if needed > there:
        yield (
            f"model: its parameters alone take {needed / 2**30:,.0f} GiB, and this machine has "
            f"{there / 2**30:,.0f} GiB of memory. Look for a size with a digit too many"
        )


def _rates(plain: Mapping[str, Any]) -> Iterator[str]:
    optimizers = {"optimizer": plain["optimizer"]}
    optimizers |= {
        f"phases.{name}.optimizer": phase["optimizer"]
        for name, phase in plain["phases"].items()
        if phase.get("optimizer")
    }
    for key, node in optimizers.items():
        groups = {f"{key}.groups.{name}": group for name, group in (node.get("groups") or {}).items()}
        for place, options in {key: node, **groups}.items():
            if options.get("lr") == 0:
                yield (
                    f"{place}.lr is 0: what it trains stays as it is. Write a rate above 0, or name the parameters "
                    "that shall not learn in freeze.parameters, which spares their gradients"
                )


def _modes(plain: Mapping[str, Any]) -> Iterator[str]:
    watching = {f"callbacks.{name}": node for name, node in plain["callbacks"].items()}
    for key, node in {**watching, "scheduler": plain["scheduler"]}.items():
        if not isinstance(node, Mapping) or not {"monitor", "mode"} <= node.keys():
            continue
        better = better_mode(plain, node["monitor"], allow=plain["security"]["allow"])
        if better is not None and node["mode"] in ("min", "max") and node["mode"] != better:
            side = "higher" if better == "max" else "lower"
            yield (
                f"{key}.mode is {node['mode']}, and {key}.monitor is {node['monitor']}: a {side} one is better, so "
                f"that it takes what gets better for what gets worse. Write {key}.mode={better}"
            )


def _probabilities(
    traces: Mapping[str | None, ForwardTrace], by_forward: Mapping[str | None, Objective]
) -> Iterator[LayerNote]:
    for forward, part in by_forward.items():
        trace = traces.get(forward)
        for name, term in part.terms.items() if trace is not None else ():
            if not isinstance(term, Term) or term.inputs is not None or trace is None:
                continue
            takes = _taken_by(term.loss)
            value = {"output": trace.output, **named_parts(trace.output)}.get(term.output)
            function, module = _made_by(trace, value) if takes and isinstance(value, Tensor) else (None, None)
            if function is not None:
                key = config_key(trace.network, _path(trace.network, module))
                harm = "its gradients are small, and the loss cannot become 0"
                if function.endswith("log_softmax"):
                    if not isinstance(term.loss, CLASSES_LAST + CLASSES_ON_AXIS_1) or _is_nll(term.loss):
                        continue
                    harm = "it is computed twice, and changes nothing"
                text = (
                    f"ends in {function}, and objective.{name} is a {type(term.loss).__name__}, which takes {takes}: "
                )
                yield LayerNote(key=key, text=f"{text}{harm}. Take {function} out of the model")


def _taken_by(loss: nn.Module) -> str | None:
    """What a loss takes that no probabilities are; None for another loss."""
    if _is_nll(loss):
        return "log probabilities (LogSoftmax)"
    if isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1):
        return "scores, and has a softmax of its own"
    has_sigmoid = isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss)
    return "scores, and has a sigmoid of its own" if has_sigmoid else None


def _is_nll(loss: nn.Module) -> bool:
    return isinstance(loss, NLL | nn.NLLLoss)


def _made_by(trace: ForwardTrace, value: Tensor) -> tuple[str | None, nn.Module | None]:
    """The function that made probabilities of scores, and the module that called it; None where none did."""
    for operation in reversed(trace.operations):
        if not any(result is value for result in operation.results):
            continue
        name = getattr(operation.function, "__name__", "")
        if name.endswith("softmax") or name in ("sigmoid", "logsigmoid", "softmin", "special_expit"):
            return name, operation.module
        if name not in PASSING:
            return None, None
        value = operation.sources[0]
    return None, None


def _path(network: nn.Module, module: nn.Module | None) -> str:
    return next((path for path, one in network.named_modules() if one is module), "")


def _frozen_norms(network: nn.Module) -> Iterator[str]:
    norms: dict[str, Any] = {
        name: module for name, module in network.named_modules() if isinstance(module, ANY_BATCH_NORM)
    }
    found = [
        name
        for name, norm in norms.items()
        if norm.affine and not (norm.weight.requires_grad or norm.bias.requires_grad)
        if norm.training and norm.track_running_stats and norm.momentum != 0
    ]
    if found:
        yield (
            f"the weights of {among(found, count=6)} are frozen, and their running statistics move with every batch: "
            "what was learned with others no longer fits. Write freeze.batch_norm=eval, or "
            "take them out of the freeze"
        )
