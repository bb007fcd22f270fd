"""What a layer that failed was given, and what it wants, in words."""

from __future__ import annotations

import traceback
from collections.abc import Mapping
from typing import Any

from torch import Tensor, nn

from exp.errors import Fault
from exp.models.compiler import FILE_PREFIX
from exp.models.inference import LAZY_CLASSES
from exp.models.normalisation import FEATURE_NORMS
from exp.plan.watch import Call


def described(value: Any) -> str:
    """A value as a shape with B for the batch, `[B, 10] float32`; containers by their parts."""
    if isinstance(value, Tensor):
        sizes = ", ".join(["B", *map(str, value.shape[1:])]) if value.dim() else ""
        return f"[{sizes}] {str(value.dtype).removeprefix('torch.')}"
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key}: {described(item)}" for key, item in value.items()) + "}"
    if isinstance(value, list | tuple):
        return f"({', '.join(map(described, value))})"
    return repr(value)


def layer_fault(error: Exception, key: str, call: Call) -> Fault:
    """The fault of a layer that refused its input."""
    name = type(call.module).__name__
    given = ", ".join(map(described, call.inputs)) or "no input"
    expected, cure = wants(call.module)
    if expected is None:
        return Fault(key=key, got=f"{name} is given {given}: {_first_line(error)}", expected="an input that it takes")
    return Fault(key=key, got=f"{name} is given {given}", expected=expected, cure=cure)


def program_fault(error: Exception, key: str, call: Call) -> Fault | None:
    """The fault of an operation in a forward program; None where the error does not come from one's own line."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if frame.filename.startswith(FILE_PREFIX)]
    own = _innermost_is_program(error)
    if not own or not frames:
        return None
    frame = frames[-1]
    text = (frame.line or "").strip()
    got = f"line {frame.lineno}, `{text}`: {_first_line(error)}"
    return Fault(key=f"{key}.forward", got=got, expected="operands that fit each other")


def wants(module: nn.Module) -> tuple[str | None, str | None]:
    """What input a layer of torch takes, and the cure where its size may be left to the data."""
    cures = {
        size: f"Leave {size} out: it is inferred from the data"
        for cls, (lazy, size) in LAZY_CLASSES.items()
        if isinstance(module, cls | lazy)
    }
    cure = next(iter(cures.values()), None)
    if isinstance(module, nn.Linear):
        return f"floats [B, ..., {module.in_features}]", cure
    if isinstance(module, nn.Conv1d | nn.Conv2d | nn.Conv3d):
        axes = ", ".join(["L", "H, W", "D, H, W"][len(module.kernel_size) - 1 : len(module.kernel_size)])
        return f"floats [B, {module.in_channels}, {axes}], large enough for its kernel", cure
    if isinstance(module, FEATURE_NORMS):
        return f"floats [B, {module.num_features}, ...] with the axes that its name says", cure
    if isinstance(module, nn.LayerNorm | nn.RMSNorm):
        sizes = ", ".join(map(str, module.normalized_shape))
        return f"floats [B, ..., {sizes}], its normalized_shape", None
    if isinstance(module, nn.RNNBase):
        axes = "B, T" if module.batch_first else "T, B"
        return f"floats [{axes}, {module.input_size}], its input_size", None
    if isinstance(module, nn.Embedding):
        return "whole numbers (int64), such as classes or characters", None
    return None, None


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0] if lines else type(error).__name__


def _innermost_is_program(error: Exception) -> bool:
    """Whether no layer was entered below the last program line: torch's own functions may be."""
    stack = [frame.filename for frame in traceback.extract_tb(error.__traceback__)]
    last = max((index for index, name in enumerate(stack) if name.startswith(FILE_PREFIX)), default=None)
    if last is None:
        return False
    return not any(
        name.endswith(("torch/nn/modules/module.py", "torch\\nn\\modules\\module.py")) for name in stack[last:]
    )
