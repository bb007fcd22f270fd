"""Tell what a layer or an operation of a forward program was given, what it takes, and which key would mend it."""

from __future__ import annotations

import inspect
import linecache
import math
import re
import traceback
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from exp.errors import Fault, one_line, own_place
from exp.models.compiler import FILE_PREFIX
from exp.models.forward_trace import Call, Refused
from exp.models.inference import LAZY_CLASSES
from exp.models.matching import BATCH_NORMS, FEATURE_NORMS, INSTANCE_NORMS
from exp.nested import is_record, named_parts, tensors_in

# Samples of the stand-in batch, models/inference.py: an axis 0 of that many is the batch's.
BATCH = 2
CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
POOLS = {
    **{f"{kind}Pool{axes}d": axes for kind in ("Max", "Avg", "LP", "AdaptiveAvg", "AdaptiveMax") for axes in (1, 2, 3)},
    **{f"FractionalMaxPool{axes}d": axes for axes in (2, 3)},
}
# Of torch's encoder and decoder layers, whose own parameter for their width is d_model.
ATTENTIONS = ("self_attn", "multihead_attn")
AXES = {1: "L", 2: "H, W", 3: "D, H, W"}
DIMS = re.compile(r"Dimension out of range \(expected to be in range of (\[-?\d+, -?\d+\]), but got (-?\d+)\)")
# What torch says of arguments that a call lacks.
LACKING = re.compile(r"missing \d+ required positional arguments?: (.+)")
PRODUCTS = frozenset("matmul __matmul__ __rmatmul__ mm bmm mv addmm baddbmm".split())  # noqa: SIM905  (words)
REORDERED = frozenset("view reshape unflatten view_as reshape_as".split())  # noqa: SIM905  (words)


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a layer takes in the place of what it was given.

    parameters: of the layer's constructor, those that made it so. cure: where one is known.
    """

    expected: str
    cure: str | None = None
    parameters: tuple[str, ...] = ()


def described(value: object, *, batch: int | None = None) -> str:
    """A value as a shape with B for the batch, `[B, 10] float32`; containers by their parts.

    batch: how many samples the batch has; an axis 0 of another size is none of it. None where every value is a batch's.
    """
    if isinstance(value, Tensor):
        is_batch = not isinstance(value, nn.Parameter) and batch in (None, *value.shape[:1])
        sizes = ["B" if is_batch and not axis else str(size) for axis, size in enumerate(value.shape)]
        return f"[{', '.join(sizes)}] {_name(value.dtype)}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(item, batch=batch)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(described(item, batch=batch) for item in value)})"
    if is_record(value):
        return described(named_parts(value), batch=batch)
    # An object's own repr may be pages, and holds its address where nobody wrote one.
    is_plain = isinstance(value, bool | int | float | str | torch.Size | torch.dtype | None)
    return (
        repr(value) if is_plain else f"a {type(value).__module__}.{type(value).__qualname__}, which is no torch.Tensor"
    )


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def _given(values: object) -> str:
    return described(values, batch=BATCH)


def layer_fault(error: BaseException, key: str, call: Call, refused: Refused | None = None) -> Fault:
    """The fault of a layer that refused its input.

    refused: the function in it that raised, where one did.
    """
    module = call.module
    name = _class_of(module)
    given = ", ".join(map(_given, call.inputs)) or "no input"
    demand = _dtype_demand(module, call, error) or _input_demand(module, call) or _size_demand(module, call)
    message = "" if demand is not None else f": {_first_line(error)}{own_place(error)}"
    demand = demand or _named_demand(module, error, call, refused)
    cure = demand.cure
    if cure is not None and key.rpartition(".")[2] in ATTENTIONS:
        cure = cure.replace("embed_dim", "d_model")
    return Fault(
        key=key,
        got=f"{name} is given {given}{message}",
        expected=demand.expected,
        cure=cure,
        origins=_origins(key, module, demand.parameters),
    )


def _class_of(module: nn.Module) -> str:
    """The name of a layer's class; of one whose size is left to the data that of the class it stands for."""
    sized = getattr(type(module), "cls_to_become", None)
    return (sized or type(module)).__name__


def _origins(key: str, module: nn.Module, parameters: Sequence[str]) -> tuple[str, ...]:
    """The keys of a layer's parameters, as they are written by name or by place."""
    known = _parameters(module)
    named = [f"{key}.{one}" for one in parameters]
    placed = [f"{key}._args_.{known.index(one)}" for one in parameters if one in known]
    # torch's encoder layers hold an attention of their own width.
    holder = [f"{key.rpartition('.')[0]}.d_model"] if "embed_dim" in parameters else []
    return (*named, *placed, *holder)


def _parameters(module: nn.Module) -> list[str]:
    sized = getattr(type(module), "cls_to_become", None)
    try:
        return list(inspect.signature(sized or type(module)).parameters)
    except (TypeError, ValueError):
        return []


def _write(size: str, value: object, module: nn.Module) -> str:
    """The cure of a size: its right value, or none where the layer can follow the data."""
    is_inferred = any(isinstance(module, cls | lazy) and size == own for cls, (lazy, own) in LAZY_CLASSES.items())
    shown = f"[{', '.join(map(str, value))}]" if isinstance(value, tuple) else str(value)
    return f"Write {size}: {shown}" + (", or leave it out: it is inferred from the data" if is_inferred else "")


def _dtype_demand(module: nn.Module, call: Call, error: BaseException) -> Demand | None:
    """Of a layer that is given numbers of another kind than its own."""
    given = list(tensors_in(call.inputs))
    if isinstance(module, nn.Embedding | nn.EmbeddingBag):
        if given and given[0].dtype in (torch.int64, torch.int32):
            return None
        return Demand(
            expected="whole numbers (int64), such as classes or characters",
            cure="Give int64, of the data set or as x.long()",
        )
    own = {one.dtype for one in module.parameters(recurse=False)}
    others = [one.dtype for one in given if one.dtype not in own]
    if not own or not others or not _is_of_dtypes(error):
        return None
    wanted, other = next(iter(own)), others[0]
    expected = f"{_name(wanted)}, as its parameters are"
    shape = _input_demand(module, call, judged=False)
    if shape is not None:
        expected = f"{shape.expected}, of {expected}"
    if not other.is_floating_point and not other.is_complex:
        cure = "Put a torch.nn.Embedding before it, or give it x.float() in a forward program"
    elif wanted is torch.float32:
        cure = f"Give it float32: what is before it makes {_name(other)}"
    else:
        cure = f"Leave dtype out, or give it x.to({_name(wanted)}) in a forward program"
    return Demand(expected=expected, cure=cure, parameters=("dtype",))


def _is_of_dtypes(error: BaseException) -> bool:
    return re.search(r"dtype|type|not implemented for '", str(error)) is not None


def _input_demand(module: nn.Module, call: Call, *, judged: bool = True) -> Demand | None:
    """Of a layer with a size of its own, such as in_features, that its input has not.

    judged: false tells what it takes of sizes that are right, too.
    """
    value = call.inputs[0] if call.inputs else None
    if not isinstance(value, Tensor):
        if not isinstance(value, list | tuple | dict) or _takes(module) is None:
            return None
        cure = "Give it one of them by a forward program, such as `outputs, state = recurrent(x)`"
        return Demand(expected=f"one tensor, {_takes(module)}", cure=cure)
    takes = _takes(module)
    if takes is None or (not judged):
        return None if takes is None else Demand(expected=takes)
    if isinstance(module, nn.Linear):
        return _sized(module, "in_features", value, axis=-1, expected=takes)
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED, *FEATURE_NORMS)):
        return _channels_demand(module, value, takes)
    if isinstance(module, nn.GroupNorm):
        return _sized(module, "num_channels", value, axis=1, expected=takes)
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        sizes = tuple(value.shape[-len(module.normalized_shape) :])
        written: object = sizes[0] if len(sizes) == 1 else sizes
        right = None if sizes == module.normalized_shape else _write("normalized_shape", written, module)
        return Demand(expected=takes, cure=right, parameters=("normalized_shape",))
    if isinstance(module, nn.RNNBase | nn.RNNCellBase):
        return _recurrent_demand(module, call, value, takes)
    if isinstance(module, nn.MultiheadAttention):
        return _attention_demand(module, call)
    return None


def _takes(module: nn.Module) -> str | None:
    """The input of a layer of torch, in words."""
    if isinstance(module, nn.Linear):
        return f"floats [B, ..., {module.in_features or 'N'}]"
    if isinstance(module, (*CONVOLUTIONS, *TRANSPOSED)):
        return f"floats [B, {module.in_channels or 'C'}, {AXES[len(module.kernel_size)]}]"
    if isinstance(module, FEATURE_NORMS):
        axes = _axes_of(module)
        return f"floats [B, {module.num_features or 'C'}{f', {AXES[axes]}' if axes else ', ...'}]"
    if isinstance(module, nn.GroupNorm):
        return f"floats [B, {module.num_channels}, ...], its num_channels"
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        return f"floats [B, ..., {', '.join(map(str, module.normalized_shape))}], its normalized_shape"
    if isinstance(module, nn.RNNBase):
        return f"floats [{'B, T' if module.batch_first else 'T, B'}, {module.input_size}], its input_size"
    if isinstance(module, nn.RNNCellBase):
        return f"floats [B, {module.input_size}], its input_size"
    if isinstance(module, nn.MultiheadAttention):
        leading = "B, T" if module.batch_first else "T, B"
        sizes = {"query": module.embed_dim, "key": module.kdim, "value": module.vdim}
        return ", ".join(f"{name} [{leading}, {size}]" for name, size in sizes.items())
    return None


def _axes_of(module: nn.Module) -> int:
    """How many axes beside batch and channels a layer's class has in its name; 0 where the name has none."""
    found = re.search(r"([123])d$", _class_of(module))
    return int(found[1]) if found else 0


def _sized(module: nn.Module, size: str, value: Tensor, *, axis: int, expected: str) -> Demand | None:
    if value.dim() <= axis or value.dim() == 0:
        return Demand(expected=expected)
    there = value.shape[axis]
    if there == getattr(module, size):
        return None
    return Demand(expected=expected, cure=_write(size, there, module), parameters=(size,))


def _channels_demand(module: nn.Module, value: Tensor, takes: str) -> Demand | None:
    """Of convolutions and norms: axes, channels, then what the kernel needs."""
    axes, size = _axes_of(module), "num_features" if isinstance(module, FEATURE_NORMS) else "in_channels"
    allowed = {axes + 2, 2} if isinstance(module, nn.BatchNorm1d) else {axes + 2}
    if not isinstance(module, BATCH_NORMS):
        allowed.add(axes + 1)  # one sample without its batch
    is_one = value.dim() == axes + 1 and not isinstance(module, BATCH_NORMS)
    if axes and (value.dim() not in allowed or (is_one and value.shape[0] != getattr(module, size))):
        fits = value.dim() - 2
        name = _class_of(module).replace(f"{axes}d", f"{fits}d")
        is_there = 1 <= fits <= 3 and fits != axes
        cure = f"Take a torch.nn.{name}" if is_there else "Give the input these axes first, as torch.nn.Unflatten does"
        return Demand(expected=takes, cure=cure, parameters=("_target_",))
    if value.shape[min(1, value.dim() - 1)] != getattr(module, size) and getattr(module, size):
        if isinstance(module, INSTANCE_NORMS) and is_one:
            return None
        return Demand(expected=takes, cure=_write(size, value.shape[1], module), parameters=(size,))
    if isinstance(module, TRANSPOSED):
        most = max(*module.stride, *module.dilation) - 1
        if max(module.output_padding) > most:
            expected = f"an output_padding of at most {most}, less than stride or dilation"
            cure = f"Write output_padding: {most}"
            return Demand(expected=expected, cure=cure, parameters=("output_padding",))
    return _kernel_demand(module, value, takes) if isinstance(module, CONVOLUTIONS) else None


def _kernel_demand(module: nn.Conv1d | nn.Conv2d | nn.Conv3d, value: Tensor, takes: str) -> Demand | None:
    """Of a convolution whose groups or kernel its input does not fit."""
    channels, groups = module.in_channels, module.groups
    if channels and channels % groups:
        expected = f"{takes} with a number of channels that groups, {groups}, divides"
        return Demand(expected=expected, cure=_divisors("groups", channels), parameters=("groups",))
    padding = module.padding
    if isinstance(padding, str):
        return None
    sides = value.shape[-len(module.kernel_size) :]
    if module.padding_mode in ("circular", "reflect"):
        most = [side - (module.padding_mode == "reflect") for side in sides]
        if any(pad > limit for pad, limit in zip(padding, most, strict=True)):
            expected = f"a padding of at most {_one_or_all(most)}: {module.padding_mode} takes it from the input"
            return Demand(expected=expected, parameters=("padding",))
    spans = [step * (size - 1) + 1 for step, size in zip(module.dilation, module.kernel_size, strict=True)]
    room = [side + 2 * pad for side, pad in zip(sides, padding, strict=True)]
    if all(span <= side for span, side in zip(spans, room, strict=True)):
        return None
    cause = "kernel_size" if set(module.dilation) == {1} else "dilation"
    expected = (
        f"{takes} large enough for its kernel of {_one_or_all(spans)}; with its padding it is {_one_or_all(room)}"
    )
    cure = f"Write kernel_size: {min(room)} or less, or more padding" if cause == "kernel_size" else None
    return Demand(expected=expected, cure=cure, parameters=(cause,))


def _one_or_all(sizes: Sequence[int]) -> str:
    return str(sizes[0]) if len(set(sizes)) == 1 else " x ".join(map(str, sizes))


def _divisors(name: str, number: int) -> str:
    found = [one for one in range(1, number + 1) if number % one == 0]
    return f"Write {name}: {' or '.join(map(str, found[:6]))}"


def _recurrent_demand(module: nn.Module, call: Call, value: Tensor, takes: str) -> Demand | None:
    size = getattr(module, "input_size", None)
    if value.dim() and value.shape[-1] != size:
        return Demand(expected=takes, cure=_write("input_size", value.shape[-1], module), parameters=("input_size",))
    states = list(tensors_in(call.inputs[1:]))
    width = getattr(module, "hidden_size", 0)
    if not states:
        return None
    layers = getattr(module, "num_layers", 0) * (2 if getattr(module, "bidirectional", False) else 1)
    projected = getattr(module, "proj_size", 0) or width
    shape = f"[{layers}, B, {projected}]" if layers else f"[B, {projected}]"
    wrong = states[0].shape[-1] != projected
    cure = _write("hidden_size", states[0].shape[-1], module) if wrong else None
    return Demand(expected=f"a state {shape}, of its hidden_size", cure=cure, parameters=("hidden_size",))


def _attention_demand(module: nn.MultiheadAttention, call: Call) -> Demand | None:
    takes = _takes(module) or ""
    sizes = {"embed_dim": module.embed_dim, "kdim": module.kdim, "vdim": module.vdim}
    is_one_size = module.kdim == module.embed_dim == module.vdim
    for (name, size), value in zip(sizes.items(), call.inputs, strict=False):
        if isinstance(value, Tensor) and value.dim() and value.shape[-1] != size:
            own = "embed_dim" if is_one_size and name != "embed_dim" else name
            cure = _write(name if not is_one_size else own, value.shape[-1], module)
            return Demand(expected=takes, cure=cure, parameters=(own,))
    return None


def _size_demand(module: nn.Module, call: Call) -> Demand | None:
    """Of layers without parameters, whose input has to have axes or to be divisible."""
    value = call.inputs[0] if call.inputs else None
    if not isinstance(value, Tensor):
        return None
    axes = POOLS.get(_class_of(module))
    if axes is not None and type(module).__module__.startswith("torch.nn."):
        return _pool_demand(module, value, axes)
    judge = _JUDGES.get(type(module))
    return None if judge is None else judge(module, value, call)


def _pool_demand(module: nn.Module, value: Tensor, axes: int) -> Demand | None:
    takes = f"floats [B, C, {AXES[axes]}]"
    if value.dim() not in (axes + 1, axes + 2):
        fits = value.dim() - 2
        name = _class_of(module).replace(f"{axes}d", f"{fits}d")
        cure = f"Take a torch.nn.{name}" if 1 <= fits <= 3 else None
        return Demand(expected=takes, cure=cure, parameters=("_target_",))
    kernel, padding = getattr(module, "kernel_size", None), getattr(module, "padding", 0)
    if kernel is None:
        return None
    sides = value.shape[-axes:]
    spans, pads = _each(kernel, axes), _each(padding, axes)
    if any(2 * pad > span for span, pad in zip(spans, pads, strict=True)):
        expected = f"a padding of at most {min(spans) // 2}, half of its kernel_size"
        return Demand(expected=expected, cure=f"Write padding: {min(spans) // 2}", parameters=("padding",))
    if any(span > side + 2 * pad for span, side, pad in zip(spans, sides, pads, strict=True)):
        expected = f"{takes} large enough for its kernel_size, {_one_or_all(spans)}; it is {_one_or_all(sides)}"
        cure = f"Write kernel_size: {min(sides)} or less"
        return Demand(expected=expected, cure=cure, parameters=("kernel_size",))
    return None


def _each(size: object, axes: int) -> list[int]:
    return list(size) if isinstance(size, list | tuple) else [size] * axes if isinstance(size, int) else []


def _shuffle(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.PixelShuffle)
    factor, channels = module.upscale_factor, value.shape[-3] if value.dim() > 2 else None
    if channels is None:
        return Demand(expected="floats [B, C, H, W]")
    expected = f"a number of channels that upscale_factor squared, {factor**2}, divides"
    cure = f"Give it {math.ceil(channels / factor**2) * factor**2} channels, where the layer before it makes {channels}"
    return Demand(expected=expected, cure=cure, parameters=("upscale_factor",))


def _unshuffle(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.PixelUnshuffle)
    if value.dim() < 3:
        return Demand(expected="floats [B, C, H, W]")
    sides = f"{value.shape[-2]} x {value.shape[-1]}"
    expected = f"a height and width that downscale_factor, {module.downscale_factor}, divides; they are {sides}"
    cure = _divisors("downscale_factor", math.gcd(*value.shape[-2:]))
    return Demand(expected=expected, cure=cure, parameters=("downscale_factor",))


def _channel_shuffle(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.ChannelShuffle)
    if value.dim() < 3:
        return Demand(expected="floats [B, C, ...] with more axes")
    expected = f"a number of channels that groups, {module.groups}, divides"
    return Demand(expected=expected, cure=_divisors("groups", value.shape[1]), parameters=("groups",))


def _unflatten(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.Unflatten)
    dim, sizes = module.dim, module.unflattened_size
    if not isinstance(dim, int) or not -value.dim() <= dim < value.dim():
        return None
    product, there = math.prod(int(one) for one in sizes if isinstance(one, int)), value.shape[dim]
    expected = f"sizes whose product is {there}, what axis {dim} has; theirs is {product}"
    return Demand(expected=expected, parameters=("unflattened_size",))


def _prelu(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.PReLU)
    if value.dim() < 2 or module.num_parameters in (1, value.shape[1]):
        return None
    expected = f"floats [B, {module.num_parameters}, ...], its num_parameters"
    cure = f"Write num_parameters: {value.shape[1]}, or 1"
    return Demand(expected=expected, cure=cure, parameters=("num_parameters",))


def _glu(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.GLU)
    if not -value.dim() <= module.dim < value.dim():
        return None
    there = value.shape[module.dim]
    return Demand(expected=f"an even size along its dim, {module.dim}; it is {there}", parameters=("dim",))


def _bilinear(module: nn.Module, _: Tensor, call: Call) -> Demand | None:
    assert isinstance(module, nn.Bilinear)
    sizes = {"in1_features": module.in1_features, "in2_features": module.in2_features}
    expected = f"two inputs, [B, ..., {module.in1_features}] and [B, ..., {module.in2_features}]"
    if len(call.inputs) < 2:
        return Demand(expected=expected, cure="Give it both in a forward program")
    for (name, size), value in zip(sizes.items(), call.inputs, strict=False):
        if isinstance(value, Tensor) and value.dim() and value.shape[-1] != size:
            return Demand(expected=expected, cure=_write(name, value.shape[-1], module), parameters=(name,))
    return Demand(expected=f"{expected} of the same other axes")


def _fold(module: nn.Module, value: Tensor, _: Call) -> Demand | None:
    assert isinstance(module, nn.Fold)
    output, kernel, step, pad, gap = (
        _each(one, 2)
        for one in (module.output_size, module.kernel_size, module.stride, module.padding, module.dilation)
    )
    counts = [(output[axis] + 2 * pad[axis] - gap[axis] * (kernel[axis] - 1) - 1) // step[axis] + 1 for axis in (0, 1)]
    expected = f"[B, C * {math.prod(kernel)}, {math.prod(counts)}]: {counts[0]} x {counts[1]} places of its kernel"
    is_channels = value.dim() > 1 and value.shape[-2] % math.prod(kernel) != 0
    return Demand(expected=expected, parameters=("kernel_size",) if is_channels else ("output_size",))


_JUDGES: Mapping[type[nn.Module], Callable[[nn.Module, Tensor, Call], Demand | None]] = {
    nn.PixelShuffle: _shuffle,
    nn.PixelUnshuffle: _unshuffle,
    nn.ChannelShuffle: _channel_shuffle,
    nn.Unflatten: _unflatten,
    nn.PReLU: _prelu,
    nn.GLU: _glu,
    nn.Bilinear: _bilinear,
    nn.Fold: _fold,
}


def _named_demand(module: nn.Module, error: BaseException, call: Call, refused: Refused | None) -> Demand:
    """Of any other layer: the parameters that the message names, or whose value it has as a dim."""
    message = str(error)
    names = [name for name in _parameters(module) if re.search(rf"\b{re.escape(name)}\b", message)]
    if (lacking := LACKING.search(message)) is not None:
        takes = ", ".join(inspect.signature(module.forward).parameters)
        cure = "Give it all of them in a forward program"
        return Demand(expected=f"{takes}; it lacks {lacking[1]}", cure=cure)
    if (dims := DIMS.search(message)) is not None:
        held = [name for name in _parameters(module) if "dim" in name and str(getattr(module, name, None)) == dims[2]]
        return Demand(expected=f"a dim in {dims[1]}", parameters=tuple(held))
    if "padding" in message.lower() and "padding" in _parameters(module):
        value = call.inputs[0] if call.inputs else None
        sides = list(value.shape[-_axes_of(module) or -1 :]) if isinstance(value, Tensor) else []
        most = f", {_one_or_all(sides)}" if sides else ""
        return Demand(expected=f"a padding smaller than the input's sides{most}", parameters=("padding",))
    expected = None if refused is None else _operands(refused)
    return Demand(expected=expected or "an input that it takes", parameters=tuple(names))


def operation_fault(error: BaseException, key: str, refused: Refused | None = None) -> Fault | None:
    """The fault of an operation in a forward program; None where the error does not come from one's own line.

    refused: the function that raised, where one of torch's did.
    """
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FILE_PREFIX)]
    if not frames or not _innermost_is_program(error):
        return None
    frame = frames[-1]
    line, column = frame.lineno or 1, (frame.colno or 0) + 1
    text = frame.line or ""
    end = frame.end_colno if frame.end_lineno == frame.lineno else None
    # Python shows a line without its indentation, and counts columns with it.
    whole = linecache.getline(frame.filename, line).rstrip("\n")
    shown = whole[column - 1 : end] if whole else text.strip()
    given = ""
    if refused is not None and refused.sources:
        given = f"{_word(refused)} is given {', '.join(map(_given, refused.sources))}: "
    expected = "operands that fit each other"
    if isinstance(error, AssertionError):
        expected = "an assertion that holds"
    elif refused is not None:
        expected = _operands(refused) or expected
    return Fault(
        key=f"{key}.forward",
        got=f"`{shown.strip()}`: {given}{_first_line(error)}",
        expected=expected,
        cure=None if refused is None else _cure_of_operands(refused),
        at=(line, column),
    )


def _word(refused: Refused) -> str:
    """The name of a function, without the underscores of an operator."""
    return getattr(refused.function, "__name__", "the operation").strip("_")


def _operands(refused: Refused) -> str | None:
    """What a function of torch takes, in words; None where nothing is known of it."""
    name, message, sources = _word(refused), str(refused.error), refused.sources
    if (dims := DIMS.search(message)) is not None:
        return f"a dim in {dims[1]}"
    floats = {one.dtype for one in sources if one.is_floating_point() or one.is_complex()}
    if _is_of_dtypes(refused.error) and "index" in message.lower() and name in _INDEXED:
        return "indices of whole numbers (int64)"
    if name in ("masked_fill", "masked_select", "masked_scatter"):
        return "a mask of bool"
    if len(floats) > 1:
        return "operands of one dtype"
    if _is_of_dtypes(refused.error) and not floats:
        return "floats"
    if getattr(refused.function, "__name__", "") in PRODUCTS:
        return "[..., N, K] and [..., K, M]: as many columns as the second has rows"
    if name in ("cat", "concat", "concatenate", "hstack", "vstack"):
        return "the same sizes along every axis but that of the dim"
    if name == "stack":
        return "tensors of one shape"
    if name in REORDERED and sources:
        return f"sizes whose product is {_count(sources[0])}"
    if name == "permute" and sources:
        return f"each of its {sources[0].dim()} axes once"
    if name == "scaled_dot_product_attention":
        return "query [B, ..., L, E], key [B, ..., S, E] and value [B, ..., S, V]"
    if "broadcast" in message or "must match the size" in message:
        return "shapes that broadcast: from the right, sizes that are equal, or one of them 1"
    return None


_INDEXED = frozenset("index_select gather take take_along_dim scatter scatter_add index_add index_copy getitem".split())  # noqa: SIM905  (words)


def _count(value: Tensor) -> str:
    """How many numbers a tensor has, `B * 192` of a batch."""
    if value.dim() and value.shape[0] == BATCH:
        return f"B * {math.prod(value.shape[1:])}"
    return str(value.numel())


def _cure_of_operands(refused: Refused) -> str | None:
    """The cure of what is nearly right: a product with the second transposed, one dtype for both."""
    name, sources = getattr(refused.function, "__name__", ""), refused.sources
    dtypes = [one.dtype for one in sources]
    if _is_of_dtypes(refused.error) and len(sources) == 2 and {torch.float64, torch.float32} == set(dtypes):
        return "Leave .double() out, or write .float() behind it"
    if name in PRODUCTS and len(sources) == 2 and all(one.dim() > 1 for one in sources):
        first, second = sources
        if first.shape[-1] == second.shape[-1] and first.shape[-1] != second.shape[-2]:
            return "Transpose the second: `.transpose(-2, -1)`"
    if name == "view" and "Use .reshape" in str(refused.error):
        return "Write reshape in its place"
    return None


def _first_line(error: BaseException) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines and isinstance(error, Exception) else one_line(error)


def _innermost_is_program(error: BaseException) -> bool:
    """Whether no layer was entered below the last program line: torch's own functions may be."""
    stack = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = max((index for index, name in enumerate(stack) if name.startswith(FILE_PREFIX)), default=None)
    if last is None:
        return False
    return not any(
        name.endswith(("torch/nn/modules/module.py", "torch\\nn\\modules\\module.py")) for name in stack[last:]
    )
