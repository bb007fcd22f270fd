"""Remarks on layers that train badly without an exception, found in the trace of the forward."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

import torch
from torch import Tensor, nn

from exp.check.plan import Plan
from exp.check.shapes import CLASSES_LAST, CLASSES_ON_AXIS_1, objectives_by_forward
from exp.config.sources import source_of
from exp.models.containers import config_key, path_of
from exp.models.forward_trace import ForwardTrace
from exp.nested import named_parts, tensors_in
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import NLL
from exp.spelling import among

# Layers that turn scores into probabilities.
PROBABILITIES = (nn.Softmax, nn.LogSoftmax, nn.Sigmoid)


class Note(NamedTuple):
    """A remark on the value of a config key.

    Attributes:
        key: The key.
        text: Text that follows the key in the message.
    """

    key: str
    text: str


def training_notes(decided: Plan) -> Iterator[str]:
    """Yield a message for each layer that trains badly, with the file and line that set the layer."""
    settings, network, traces = decided.settings, decided.network, decided.shapes.traces
    if network is None or not settings.train:
        return
    by_forward = objectives_by_forward(decided.phases, decided.objective)
    found = list(_probabilities(traces, by_forward))
    if not settings.lora.layers:  # LoRA adds parameters that the traced forward lacks
        found += without_gradient(network, traces, by_forward)
    config = decided.resolved.config
    for note in found:
        where = source_of(config, note.key)
        yield f"{note.key} {note.text}" + (f"  [{where}]" if where else "")


def _probabilities(
    traces: Mapping[str | None, ForwardTrace], by_forward: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Yield a remark for each softmax or sigmoid layer with an output that a loss expects to be scores."""
    for forward, trace in traces.items():
        outputs = {"output": trace.output, **named_parts(trace.output)}
        for name, term in by_forward[forward].terms.items() if forward in by_forward else ():
            if not isinstance(term, Term) or term.inputs is not None:
                continue
            value = outputs.get(term.output)
            layers = [call.module for call in trace.calls if call.output is value]
            layer = next((layer for layer in layers if isinstance(layer, PROBABILITIES)), None)
            takes = _expected_input(term.loss)
            if layer is None or takes is None or (isinstance(layer, nn.LogSoftmax) and not _has_softmax(term.loss)):
                continue
            text = f"is a {type(layer).__name__}, but objective.{name} is a {type(term.loss).__name__}, which takes"
            key = config_key(trace.network, path_of(trace.network, layer))
            yield Note(key=key, text=f"{text} {takes}. Remove this layer from the model")


def _expected_input(loss: nn.Module) -> str | None:
    """Return a description of the input that a loss expects. Return None if probabilities may be a correct input."""
    if isinstance(loss, NLL | nn.NLLLoss):
        return "log probabilities (LogSoftmax)"
    if _has_softmax(loss):
        return "scores and applies a softmax itself"
    is_sigmoid = isinstance(loss, nn.BCEWithLogitsLoss | nn.MultiLabelSoftMarginLoss)
    return "scores and applies a sigmoid itself" if is_sigmoid else None


def _has_softmax(loss: nn.Module) -> bool:
    return isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1) and not isinstance(loss, NLL | nn.NLLLoss)


def without_gradient(
    network: nn.Module, traces: Mapping[str | None, ForwardTrace], objectives: Mapping[str | None, Objective]
) -> Iterator[Note]:
    """Yield a remark on layers with trainable parameters that have no effect on the objective.

    Args:
        network: Network on the meta device.
        traces: Trace of each forward, by the name of the forward.
        objectives: Objective with the terms that read the output of a forward, by the name of the forward.
    """
    parts = {part for objective in objectives.values() for term in objective.terms.values() for part in term.parts}
    learning = [one for one in network.parameters() if one.requires_grad]
    if "" in parts or not objectives or not objectives.keys() <= traces.keys():
        return
    reached: set[int] = set()
    for forward, objective in objectives.items():
        found = _with_gradient(_read_by(objective, traces[forward]), learning)
        if found is None:
            return
        reached |= found
    if not reached:
        return  # the network may be trained without gradients of the objective
    lost = {id(one) for one in learning} - reached
    layers: dict[str, list[str]] = {}
    for name, layer in network.named_modules():
        is_called = any(f"{name}.".startswith(f"{part}.") for part in parts)
        if not is_called and any(id(one) in lost for one in layer.parameters(recurse=False)):
            layers.setdefault(config_key(network, name), []).append(name or type(network).__name__)
    for key, names in layers.items():
        yield Note(
            key=key,
            text=f"({among(names, count=4)}) has parameters without a gradient, because no output that the objective "
            "reads depends on them. They keep their initial values. Use them, remove them from the model, or name "
            "them in freeze.parameters",
        )


def _read_by(objective: Objective, trace: ForwardTrace) -> list[Tensor]:
    """Return the outputs that an objective reads. Return all outputs if it is unknown which outputs a term reads."""
    outputs = {"output": trace.output, **named_parts(trace.output)}
    if not all(isinstance(term, Term) and not term.needs for term in objective.terms.values()):
        return list(tensors_in(trace.output))
    names = {name for term in objective.terms.values() for name in term.names.values()}
    return list(tensors_in([outputs[name] for name in names if name in outputs]))


def _with_gradient(ends: Sequence[Tensor], learning: Sequence[nn.Parameter]) -> set[int] | None:
    """Return the ids of the parameters that have an effect on outputs.

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
