"""Errors of layers and operations that rejected their input.

An error explains the cause and names the config key that fixes the problem. An operation is a call or an operator in a
forward program, which is the code in `model.forward`.
"""

from __future__ import annotations

import inspect
import linecache
import re
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exp.errors import ErrorDetails, one_line, user_location
from exp.models.compiler import FILE_PREFIX
from exp.models.forward_trace import Call, Refused
from exp.models.inference import LAZY_CLASSES
from exp.models.matching import FEATURE_NORMS
from exp.nested import is_dataclass_instance, named_parts, tensors_in
from exp.shared_types import dtype_name
from exp.spelling import among

# Number of samples in the stand-in batch of models/inference.py. An axis 0 of this size is the batch axis.
BATCH = 2
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
# Names of the attentions in torch's encoder and decoder layers. Their width is the layer's parameter d_model.
ATTENTIONS = ("self_attn", "multihead_attn")
# Letters for the sizes of spatial axes, by the number of axes.
AXES = {1: "L", 2: "H, W", 3: "D, H, W"}


@dataclass(frozen=True)
class Input:
    """The shape that layers of a class expect for one of their inputs.

    Attributes:
        text: Shape as text. A placeholder such as `{in_features}` is replaced by this attribute of the layer. `{axes}`
            is replaced by letters for the spatial axes, and `{time}` by the axes for time and batch.
        size: Name of the layer's attribute that states the size of one axis. None (default): any size is valid.
        axis: Index of the axis with this size. Default: -1, the last axis.
    """

    text: str
    size: str | None = None
    axis: int = -1


INPUTS: Mapping[tuple[type[nn.Module], ...], tuple[Input, ...]] = {
    (nn.Linear,): (Input("floats [B, ..., {in_features}]", "in_features"),),
    (*CONVOLUTIONS, *TRANSPOSED): (Input("floats [B, {in_channels}, {axes}]", "in_channels", 1),),
    FEATURE_NORMS: (Input("floats [B, {num_features}, {axes}]", "num_features", 1),),
    (nn.GroupNorm,): (Input("floats [B, {num_channels}, ...]", "num_channels", 1),),
    (nn.LayerNorm, nn.RMSNorm): (Input("floats [B, ..., {normalized_shape}]", "normalized_shape"),),
    (nn.PReLU,): (Input("floats [B, {num_parameters}, ...]", "num_parameters", 1),),
    (nn.RNNBase,): (
        Input("floats [{time}, {input_size}]", "input_size"),
        Input("a state [..., B, {hidden_size}]", "hidden_size"),
    ),
    (nn.RNNCellBase,): (
        Input("floats [B, {input_size}]", "input_size"),
        Input("a state [B, {hidden_size}]", "hidden_size"),
    ),
    (nn.MultiheadAttention,): (
        Input("query [{time}, {embed_dim}]", "embed_dim"),
        Input("key [{time}, {kdim}]", "kdim"),
        Input("value [{time}, {vdim}]", "vdim"),
    ),
    (nn.Bilinear,): (
        Input("a first input [B, ..., {in1_features}]", "in1_features"),
        Input("a second input [B, ..., {in2_features}]", "in2_features"),
    ),
}


@dataclass(frozen=True, kw_only=True)
class Demand:
    """The input that a layer expects.

    Attributes:
        expected: Description of the input.
        fix: Fix of the error. None (default) if no fix is known.
        parameters: Constructor parameters of the layer that caused the error. Default: no parameters.
    """

    expected: str
    fix: str | None = None
    parameters: tuple[str, ...] = ()


def describe_value(value: object, *, batch: int | None = None) -> str:
    """Return the shape and dtype of a value as text, such as `[B, 10] float32`.

    B stands for the batch axis. For a container, the text describes all entries.

    Args:
        value: Any value.
        batch: Number of samples in the batch. Axis 0 is the batch axis only if it has this size. None treats axis 0 of
            every tensor as the batch axis. Default: None.
    """
    if isinstance(value, Tensor):
        is_batch = not isinstance(value, nn.Parameter) and batch in (None, *value.shape[:1])
        sizes = ["B" if is_batch and not axis else str(size) for axis, size in enumerate(value.shape)]
        return f"[{', '.join(sizes)}] {dtype_name(value.dtype)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {describe_value(item, batch=batch)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(describe_value(item, batch=batch) for item in value)})"
    if is_dataclass_instance(value):
        return describe_value(named_parts(value), batch=batch)
    # The repr of other objects may be long, so only their class is shown.
    is_plain = isinstance(value, bool | int | float | str | torch.Size | torch.dtype | None)
    return (
        repr(value)
        if is_plain
        else f"a {type(value).__module__}.{type(value).__qualname__}, which is not a torch.Tensor"
    )


def _describe_given(values: object) -> str:
    return describe_value(values, batch=BATCH)


def layer_error(error: BaseException, key: str, call: Call) -> ErrorDetails:
    """Return the error of a layer that rejected its input.

    Args:
        error: Exception that the layer raised.
        key: Config key of the layer.
        call: Call of the layer, with its inputs.
    """
    module = call.module
    given = ", ".join(map(_describe_given, call.inputs)) or "nothing"
    demand = _dtype_demand(module, call, error) or _shape_demand(module, call)
    message = "" if demand is not None else f": {_first_line(error)}{user_location(error)}"
    demand = demand or _general_demand(module, error)
    fix = demand.fix
    if fix is not None and key.rpartition(".")[2] in ATTENTIONS:
        fix = fix.replace("embed_dim", "d_model")
    got = f"{_class_of(module).__name__} gets {given}{message}"
    return ErrorDetails(key, got, demand.expected, fix, origins=_origins(key, module, demand.parameters))


def _class_of(module: nn.Module) -> type[nn.Module]:
    """Return the class of a layer. For a lazy layer, return its final class, such as Linear for LazyLinear."""
    sized: type[nn.Module] | None = getattr(type(module), "cls_to_become", None)
    return sized or type(module)


def _origins(key: str, module: nn.Module, parameters: Sequence[str]) -> tuple[str, ...]:
    """Return the config keys that may set these constructor parameters of a layer, by name or by position."""
    known = _parameters(module)
    named = [f"{key}.{one}" for one in parameters]
    placed = [f"{key}._args_.{known.index(one)}" for one in parameters if one in known]
    # An attention in torch's encoder layers has the width d_model of the encoder layer.
    holder = [f"{key.rpartition('.')[0]}.d_model"] if "embed_dim" in parameters else []
    return (*named, *placed, *holder)


def _parameters(module: nn.Module) -> list[str]:
    try:
        return list(inspect.signature(_class_of(module)).parameters)
    except (TypeError, ValueError):
        return []


def _write(size: str, value: object, module: nn.Module) -> str:
    """Return the fix of a wrong size. The fix states the right value, and mentions if exp can infer the size."""
    is_inferred = any(isinstance(module, cls | lazy) and size == own for cls, (lazy, own) in LAZY_CLASSES.items())
    return f"Write {size}: {value}" + (f", or leave {size} out, to infer it from the data" if is_inferred else "")


def _dtype_demand(module: nn.Module, call: Call, error: BaseException) -> Demand | None:
    """Return the expected input of a layer if its input has a wrong dtype. Otherwise return None.

    The dtype is wrong if it differs from the dtype of the layer's parameters. An embedding needs integers.
    """
    given = list(tensors_in(call.inputs))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if given and given[0].dtype in (torch.int64, torch.int32):
            return None
        return Demand(
            expected="integers (int64), such as class numbers",
            fix="Return int64 from the data set, or convert the input with x.long()",
        )
    own = {one.dtype for one in module.parameters(recurse=False)}
    others = [one.dtype for one in given if one.dtype not in own]
    if not own or not others or not _is_of_dtypes(error):
        return None
    wanted, other = next(iter(own)), others[0]
    expected = f"{dtype_name(wanted)}, the dtype of the layer's parameters"
    inputs = _inputs(module)
    if inputs:
        expected = f"{_text(inputs[0], module)} with {expected}"
    if not other.is_floating_point and not other.is_complex:
        fix = "Put a torch.nn.Embedding before this layer, or convert its input with x.float() in a forward program"
    elif wanted is torch.float32:
        fix = f"Change the layer or operation before this layer, which returns {dtype_name(other)}"
    else:
        fix = f"Leave dtype out, or convert the input with x.to({dtype_name(wanted)}) in a forward program"
    return Demand(expected=expected, fix=fix, parameters=("dtype",))


def _is_of_dtypes(error: BaseException) -> bool:
    return re.search(r"dtype|type|not implemented for '", str(error)) is not None


def _inputs(module: nn.Module) -> tuple[Input, ...]:
    others = (Input("floats [B, C, {axes}]"),) if _axes_of(module) else ()  # such as pooling layers
    return next((inputs for classes, inputs in INPUTS.items() if isinstance(module, classes)), others)


def _text(one: Input, module: nn.Module) -> str:
    """Return the shape of an input as text, with the sizes of the layer."""
    fields = {"axes": AXES.get(_axes_of(module), "..."), "time": "T, B"}
    if getattr(module, "batch_first", False):
        fields["time"] = "B, T"
    if one.size is not None:
        size = getattr(module, one.size)
        # A lazy layer has size 0 until its first forward, so a letter is shown.
        letter = "C" if one.axis == 1 else "N"
        fields[one.size] = ", ".join(map(str, size)) if isinstance(size, tuple) else str(size or letter)
    return one.text.format(**fields)


def _axes_of(module: nn.Module) -> int:
    """Return the number of spatial axes in the class name of a layer, such as 2 for Conv2d. Otherwise return 0."""
    found = re.search(r"([123])d$", _class_of(module).__name__)
    return int(found[1]) if found else 0


def _shape_demand(module: nn.Module, call: Call) -> Demand | None:
    """Return the expected input of a layer if its input has a wrong type, number of axes or size.

    Otherwise return None.
    """
    inputs = _inputs(module)
    value = call.inputs[0] if call.inputs else None
    if inputs and isinstance(value, list | tuple | dict):
        fix = "Select one of the tensors in a forward program, such as `outputs, state = recurrent(x)`"
        return Demand(expected=f"one tensor, {_text(inputs[0], module)}", fix=fix)
    if not isinstance(value, Tensor):
        return None
    return (_axes_demand(module, inputs[0], value) if inputs else None) or _size_demand(module, inputs, call)


def _axes_demand(module: nn.Module, first: Input, value: Tensor) -> Demand | None:
    """Return the expected input of a layer if its input has a wrong number of axes, such as 3 for Conv2d.

    Otherwise return None.
    """
    axes = _axes_of(module)
    is_row = isinstance(module, nn.BatchNorm1d) and value.dim() == 2
    is_sample = value.dim() == axes + 1 and value.shape[0] == getattr(module, first.size or "", None)
    if not axes or value.dim() == axes + 2 or is_row or is_sample:
        return None
    other = _class_of(module).__name__.replace(f"{axes}d", f"{value.dim() - 2}d")
    fix = f"Use torch.nn.{other}" if hasattr(nn, other) else "Add the missing axes with torch.nn.Unflatten"
    return Demand(expected=_text(first, module), fix=fix, parameters=("_target_",))


def _size_demand(module: nn.Module, inputs: Sequence[Input], call: Call) -> Demand | None:
    """Return the expected input of a layer if an input has a wrong size. Otherwise return None.

    For example, the last axis of the input of a Linear must have the size in_features.
    """
    for one, given in zip(inputs, call.inputs, strict=False):
        value = next(tensors_in([given]), None)
        if one.size is None or value is None or value.dim() < max(one.axis + 1, 1):
            continue
        size = getattr(module, one.size)
        if isinstance(size, tuple):
            there: object = list(value.shape[-len(size) :])
            is_right = there == list(size)
        else:
            there = value.shape[one.axis]
            is_right = there == size or not size
        if not is_right:
            return Demand(expected=_text(one, module), fix=_write(one.size, there, module), parameters=(one.size,))
    return None


def _general_demand(module: nn.Module, error: BaseException) -> Demand:
    """Return the expected input of a layer for an error that no other rule explains.

    The description contains the constructor parameters that torch's error message mentions.
    """
    message = str(error)
    # torch writes `output padding` for output_padding.
    words = {name: name.replace("_", "[_ ]") for name in _parameters(module)}
    places = {name: re.search(rf"\b{word}\b", message, re.IGNORECASE) for name, word in words.items()}
    names = [name for _, name in sorted((found.start(), name) for name, found in places.items() if found is not None)]
    values = [f"{name}={getattr(module, name)}" for name in names if hasattr(module, name)]
    expected = f"an input that matches {among(values)}" if values else "an input that the layer accepts"
    return Demand(expected=expected, parameters=tuple(names))


def operation_error(error: BaseException, key: str, refused: Refused | None = None) -> ErrorDetails | None:
    """Return the error of an operation in a forward program.

    Return None if another part of the code raised the exception.

    Args:
        error: The exception.
        key: Config key of the model with the forward program.
        refused: Call of a torch function that raised the exception. None (default) if no such call is known.
    """
    frames = list(traceback.extract_tb(error.__traceback__))
    lines = [place for place, frame in enumerate(frames) if frame.filename.startswith(FILE_PREFIX)]
    # If the line calls a layer that raised the exception, `layer_error` reports it.
    if not lines or any("torch/nn/modules/module.py" in one.filename for one in frames[lines[-1] :]):
        return None
    frame = frames[lines[-1]]
    line, column = frame.lineno or 1, (frame.colno or 0) + 1
    end = frame.end_colno if frame.end_lineno == frame.lineno else None
    # Read the line from linecache, because frame.line is stripped but the columns count its indentation.
    shown = linecache.getline(frame.filename, line).rstrip("\n")[column - 1 : end] or frame.line or ""
    given = ""
    if refused is not None and refused.sources:
        # The name of an operator has underscores, such as __add__.
        name = getattr(refused.function, "__name__", "the operation").strip("_")
        given = f"{name} gets {', '.join(map(_describe_given, refused.sources))}: "
    expected = "an assertion that holds" if isinstance(error, AssertionError) else "operands of matching shapes"
    if _is_of_dtypes(error):
        expected = "operands of matching dtypes, such as floats"
    got = f"`{shown.strip()}`: {given}{_first_line(error)}"
    return ErrorDetails(f"{key}.forward", got, expected, at=(line, column))


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and isinstance(error, Exception) else one_line(error)
