"""The check that layers match the data and each other.

The errors come from forwards of the network on the meta device, where tensors have shapes but no numbers.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor, nn

from exp.check.calls import call_error
from exp.check.input_errors import describe_value, layer_error, operation_error
from exp.check.meta_forward import Failure, MetaForward
from exp.errors import ConfigError, ErrorDetails, not_supported_with, unsuitable
from exp.models.containers import ProgramModel, config_key, forward_name, path_of
from exp.models.forward_trace import Call, ForwardTrace, Recorder, Refused
from exp.models.syntax import ProgramError
from exp.nested import named_parts, tensors_in
from exp.objectives.loss_inputs import ELEMENTWISE
from exp.objectives.objective import Objective, Term
from exp.objectives.penalties import R1, JacobianNorm
from exp.objectives.term import AbstractTerm
from exp.objectives.terms import NLL, CrossEntropy
from exp.optim.phase import Phase
from exp.shared_types import DataSpec
from exp.spelling import among, did_you_mean

CLASSES_LAST = (CrossEntropy, NLL)
CLASSES_ON_AXIS_1 = (nn.CrossEntropyLoss, nn.NLLLoss)
WIDTHS = ("out_features", "out_channels")


def shape_errors(
    seen: MetaForward, spec: DataSpec, objective: Objective | None = None, phases: Sequence[Phase] = ()
) -> list[ErrorDetails]:
    """Return the errors found by the forwards on the meta device, each at the key of the layer that causes it.

    Args:
        seen: Result of the forwards.
        spec: Input shapes of the data, and the number of outputs that the data needs.
        objective: Objective that compares the outputs. None (default) checks only the last axis of the output.
        phases: Phases of the run. The output of a forward is checked against the terms of the phases that select it.
            Default: no phases.
    """
    if seen.failure is not None:
        return list(_failure_errors(seen.failure, spec))
    terms: Mapping[str | None, Objective | None] = {None: None}
    terms = terms if objective is None else objectives_by_forward(phases, objective)
    errors = (
        error
        for name, trace in seen.traces.items()
        if name in terms
        for error in output_errors(trace.network, trace.output, trace.calls, spec, terms[name])
    )
    return list(dict.fromkeys(errors))


def objectives_by_forward(phases: Sequence[Phase], objective: Objective) -> dict[str | None, Objective]:
    """Return an objective for each forward of the network, with the terms that read the output of the forward.

    Returns:
        Objectives by the name of the forward. The name None stands for the network's own forward. It is the only name
        in a run without phases.
    """
    if not phases:
        return {None: objective}
    names: dict[str | None, list[str]] = {}
    for phase in phases:
        names.setdefault(phase.forward, []).extend(phase.terms)
    return {forward: objective.only(terms) for forward, terms in names.items()}


def has_forward(module: nn.Module) -> bool:
    """Return whether the class of a module defines a forward."""
    return type(module).forward is not nn.Module.forward


def _failure_errors(failure: Failure, spec: DataSpec) -> Iterator[ErrorDetails]:
    error, network, recorder = failure.error, failure.network, failure.recorder
    call = recorder.inside
    if isinstance(error, ConfigError):
        yield from error.errors
    elif isinstance(error, ProgramError):
        for one in (error, *error.others):
            yield _program_error(one)
    elif call is not None and network is not None and not has_forward(call.module):
        key = config_key(network, recorder.path_of(network, call.module))
        fix = "Call the inner layers one by one in model.forward"
        yield unsuitable(key, type(call.module).__name__, "which has no forward", "a layer with a forward", fix)
    elif failure.is_undecidable:
        return
    elif call is None or network is None:
        yield ErrorDetails("model", failure.message, "a model that exp can build")
    else:
        key = config_key(network, recorder.path_of(network, call.module))
        refused = recorder.refused if recorder.refused is not None and recorder.refused.error is error else None
        detail = _double_error(spec, refused, key, call) or operation_error(error, key, refused)
        detail = detail or layer_error(error, key, call)
        name = forward_name(network)
        if name is not None and detail.key == "model.forward":
            detail = replace(detail, key=f"model.programs.{name}")
        yield detail


def _program_error(error: ProgramError) -> ErrorDetails:
    key = error.key or "model.forward"
    return ErrorDetails(key=key, got=error.message, expected=error.expected, at=(error.line, error.column))


def _double_error(spec: DataSpec, refused: Refused | None, key: str, call: Call) -> ErrorDetails | None:
    """Return an error if a float64 input of the data reaches a layer with float32 parameters.

    Otherwise return None.
    """
    has_double = any(one.dtype == "float64" for one in spec.inputs.values())
    found = set() if refused is None else {one.dtype for one in refused.sources}
    if not has_double or not {torch.float64, torch.float32} <= found:
        return None
    place = "data.input_dtype" if list(spec.inputs) == ["input"] else "data.inputs"
    got = f"float64, and the layer {key} ({type(call.module).__name__}) computes in float32"
    fix = "Convert the inputs to float32 in the data set or in data.transforms, or write precision=fp64"
    return ErrorDetails(place, got, "float32", fix)


def output_errors(
    network: nn.Module, output: object, calls: Sequence[Call], spec: DataSpec, objective: Objective | None
) -> list[ErrorDetails]:
    """Return the errors of a network's output, such as a wrong type or a wrong number of classes.

    Args:
        network: The network.
        output: Output of the network for a batch.
        calls: Calls of all modules, in the order in which they returned.
        spec: Shapes of the data, and the number of outputs that the data needs.
        objective: Objective that compares the outputs. None checks only the last axis of the output.
    """
    parts = named_parts(output)
    named = {"output": output, **parts}
    errors = []
    for name, loss, wanted in _terms(objective):
        if wanted not in named:
            continue  # the name may be an entry of the batch
        value = named[wanted]
        got, origins = f"the network returns {describe_value(value)}", _returning(network)
        is_known = isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1 + ELEMENTWISE)
        if not isinstance(value, Tensor):
            fix = "Return a tensor from the network, or a mapping of names to tensors"
            if parts:
                fix = f"Set objective.{name}.output to one of {among(parts)}"
            expected = "one tensor for the loss"
            errors.append(ErrorDetails(f"objective.{name}", got, expected, fix, origins=origins))
        elif is_known and not (value.is_floating_point() or value.is_complex()):
            got = f"{got}, and objective.{name} is a {type(loss).__name__}"
            fix = "Return the scores, not the result of an argmax or a comparison"
            errors.append(ErrorDetails("model", got, "floats", fix, origins=origins))
        elif (error := _width_error(network, value, calls, spec, loss)) is not None:
            errors.append(error)
    return list(dict.fromkeys(errors))


def _returning(network: nn.Module) -> tuple[str, ...]:
    """Return the config key of the network's forward program. Return no key for a network without a program."""
    return ("model.forward",) if isinstance(network, ProgramModel) else ()


def _terms(objective: Objective | None) -> list[tuple[str, nn.Module | None, str]]:
    """Return the terms that compare an output with the entry `target`: name of the term, loss, name of the output."""
    if objective is None:
        return [("", None, "output")]
    compared = {name: term for name, term in objective.terms.items() if isinstance(term, Term)}
    return [
        (name, term.loss, term.output)
        for name, term in compared.items()
        if term.target == "target" and term.inputs is None
    ]


def _width_error(
    network: nn.Module, value: Tensor, calls: Sequence[Call], spec: DataSpec, loss: nn.Module | None
) -> ErrorDetails | None:
    wanted, what = _needed_width(spec, loss)
    if wanted is None or (value.dim() == 1 and wanted == 1 and spec.num_classes is None):
        return None
    got, origins = f"the network returns {describe_value(value)}", _returning(network)
    if value.dim() < 2:
        return ErrorDetails(config_key(network, ""), got, f"[B, ..., {wanted}], because {what}", origins=origins)
    width = value.shape[1 if isinstance(loss, CLASSES_ON_AXIS_1) else -1]
    if width == wanted:
        return None
    expected, head = f"{wanted}, because {what}", _head(value, calls, width)
    if head is None:
        return ErrorDetails("model", f"{got}, with {width} values per sample", expected, origins=origins)
    module, size = head
    key = f"{config_key(network, path_of(network, module))}.{size}"
    return ErrorDetails(key, str(width), expected, f"Write {size}: ${{data.num_outputs}}")


def _needed_width(spec: DataSpec, loss: nn.Module | None) -> tuple[int | None, str]:
    """Return the number of values per sample that a loss needs, and the reason. None: any number is valid."""
    classes = "the data has this number of classes"
    if spec.num_classes is not None and (loss is None or isinstance(loss, CLASSES_LAST + CLASSES_ON_AXIS_1)):
        return spec.num_classes, classes
    if spec.num_classes is None and (loss is None or isinstance(loss, ELEMENTWISE)):
        return spec.num_outputs, "a target of the data has this number of values"
    return None, ""


def _head(value: Tensor, calls: Sequence[Call], width: int) -> tuple[nn.Module, str] | None:
    """Return the layer that determines the width of the output, and the layer's parameter for the width.

    The layer that returned the output determines the width. If no layer with this width returned the output, the last
    called layer with this width is returned. Return None if there is no such layer.
    """
    sized = [
        (call, name)
        for call in calls
        for name in WIDTHS
        if not any(call.module.children()) and call.module.__dict__.get(name) == width
    ]
    exact = [pair for pair in sized if pair[0].output is value]
    return next(((call.module, name) for call, name in reversed(exact or sized)), None)


def term_errors(objective: Objective, network: nn.Module, spec: DataSpec) -> Iterator[ErrorDetails]:
    """Yield the errors of terms of the objective that a step cannot compute or train.

    Examples are unknown submodules of the network, gradients of integers, and losses with trainable parameters.

    Args:
        objective: Objective of the run.
        network: Network on the meta device.
        spec: Shapes and dtypes of the data.
    """
    known = [name for name, _ in network.named_modules() if name]
    for name, term in objective.terms.items():
        key, of_loss = f"objective.{name}", isinstance(term, Term)
        if (error := _call_error(name, term, objective)) is not None:
            yield error
        learning = [parameter for parameter, value in term.named_parameters() if value.requires_grad]
        if learning:
            kind = type(term.loss if isinstance(term, Term) else term).__name__
            parts = ", ".join(parameter.removeprefix("loss.") if of_loss else parameter for parameter in learning)
            fix = (
                "Move the parameters to the network, return them by a name, and pass this name to the loss with inputs"
            )
            place = objective.loss_keys[name] if of_loss else key
            other = f"trainable parameters ({parts}), which no optimizer would update"
            yield not_supported_with(place, kind, other, "a loss without trainable parameters", fix)
        for part in (part for part in term.parts if part and part not in known):
            expected = f"one of {among(known, word=part)}, or '' for the whole network"
            got = f"the module {part!r}, which the network does not have"
            yield ErrorDetails(key, got, expected, did_you_mean(part, known))
        own = spec.inputs.get(term.input) if isinstance(term, R1 | JacobianNorm) else None
        if own is not None and "int" in own.dtype:
            fix = "Let the network return the embedding of the input by a name, and write this name"
            because = f"which is {own.dtype}, and integers have no gradient"
            yield unsuitable(f"{key}.input", term.input, because, "a floating-point value", fix)


def _call_error(name: str, term: AbstractTerm, objective: Objective) -> ErrorDetails | None:
    """Return the error of a loss or of a user's term that a training step cannot call.

    Return None if the call is possible.
    """
    node = f"objective.{name}"
    passes = ["passes"] if objective.needs_of(name) else []
    if not isinstance(term, Term):
        return call_error(term.forward, name=type(term).__name__, given=["values", "batch", *passes], key=node)
    given = ["output", "target", *passes] if term.inputs is None else passes
    kind, key = type(term.loss).__name__, objective.loss_keys[name]
    return call_error(term.loss.forward, name=kind, given=given, key=key, node=node, inputs=term.inputs)


def double_backward_errors(trace: ForwardTrace, objective: Objective) -> Iterator[ErrorDetails]:
    """Yield the error of a layer that does not support the second derivative that a term needs."""
    terms = objective.differentiated_twice
    if not terms or not _is_once_differentiable(trace, trace.output):
        return
    # Calls are in the order of their returns, so an inner layer comes before the module that contains it.
    call = next(call for call in trace.calls if _is_once_differentiable(trace, call.output))
    path = Recorder().path_of(trace.network, call.module)
    expected = f"a backward that can be differentiated, because objective.{terms[0]} contains a gradient"
    fix = (
        f"Write the backward with functions of torch and without once_differentiable, or leave objective.{terms[0]} out"
    )
    because = "whose backward is marked once_differentiable"
    yield unsuitable(config_key(trace.network, path), type(call.module).__name__, because, expected, fix)


def _is_once_differentiable(trace: ForwardTrace, output: object) -> bool:
    """Return whether an output has a gradient that cannot be differentiated again.

    The gradient is taken with respect to the inputs and parameters of the network.
    """
    sources = [one for one in (*trace.inputs.values(), *trace.network.parameters()) if one.requires_grad]
    ends = [one for one in tensors_in(output) if one.requires_grad and one.is_floating_point()]
    if not ends or not sources:
        return False
    # torch 2.13 raises an error only if the incoming gradient requires a gradient. Otherwise the result is wrong.
    given = [torch.ones_like(one, requires_grad=True) for one in ends]
    try:
        found = torch.autograd.grad(ends, sources, given, create_graph=True, allow_unused=True)
        slopes = [one.sum() for one in found if one is not None and one.requires_grad]
        if slopes:
            torch.autograd.backward(slopes, retain_graph=True)
    except (RuntimeError, NotImplementedError) as error:  # ignore other errors, because missing numbers may cause them
        return "once_differentiable" in str(error)
    finally:
        for one in sources:
            one.grad = None
    return False
