"""Selection of the inputs of a loss by name, with checks of their shapes and dtypes.

Inputs in half precision are converted to float32. For an output [B, 1] and a target [B], torch would broadcast both to
[B, B] and compute a meaningless loss. This module raises an error for such shapes.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.shared_types import dtype_name
from exp.spelling import did_you_mean

# The values of a step by name: `output`, `target`, `input`, and the names in mappings that the network and the data set
# return.
Values = Mapping[str, Any]
HALF = (torch.float16, torch.bfloat16)
# Losses that compare output and target element by element.
ELEMENTWISE = (
    *(nn.MSELoss, nn.L1Loss, nn.SmoothL1Loss, nn.HuberLoss, nn.BCELoss, nn.BCEWithLogitsLoss, nn.PoissonNLLLoss),
    *(nn.GaussianNLLLoss, nn.KLDivLoss, nn.SoftMarginLoss, nn.MultiLabelSoftMarginLoss, nn.HingeEmbeddingLoss),
)


def pick(values: Values, name: str, role: str) -> Tensor:
    """Return the tensor with a given name.

    Args:
        values: The values of the step by name.
        name: The name.
        role: The use of the tensor for the error message, such as "output".

    Raises:
        RunError: No value has this name, or the value is not a tensor. The message proposes the closest name.
    """
    if name in values:
        value = values[name]
        if type(value) is Tensor or isinstance(value, Tensor):  # the comparison of types takes a third of the time
            return value
        if not isinstance(value, Mapping):
            raise RunError(f"the {role} of a term must be a tensor, but {name!r} is a {type(value).__name__}")
        values = value
    raise RunError(unknown_value(f"the {role} of a term", name, values))


def unknown_value(reader: str, name: str, known: Iterable[str], *, fix: str | None = None) -> str:
    """Return the error message for an unknown name of a value.

    Args:
        reader: The subject of the message, such as "a term's output".
        name: The unknown name.
        known: The names of all values.
        fix: An additional sentence that states a fix. Default: None.
    """
    names = sorted(known)
    text = f"{reader} is {name!r}, a name that neither network nor batch returns. Known names: {', '.join(names)}."
    return " ".join(filter(None, [text, did_you_mean(name, names), fix]))


def names_of_values(inputs: Mapping[str, str] | None, *, output: str, target: str) -> dict[str, str]:
    """Return the names of the values that a loss or a metric reads.

    Args:
        inputs: Names of values by parameter. None if the loss or metric takes an output and a target.
        output: The name of the output.
        target: The name of the target.

    Returns:
        The names by their config key relative to the loss or metric: `output` and `target`, or `inputs.PARAMETER`.
    """
    if inputs is not None:
        return {f"inputs.{parameter}": name for parameter, name in inputs.items()}
    return {"output": output, "target": target}


def full(tensor: Tensor) -> Tensor:
    """Return a half-precision tensor in float32, and any other tensor unchanged."""
    return tensor.float() if tensor.dtype in HALF else tensor


def match_target(loss: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """Return the target of an elementwise loss in the dtype of the output.

    Raises:
        RunError: Output and target have different shapes.
    """
    if output.shape != target.shape:
        raise RunError(
            f"{type(loss).__name__} needs equal shapes, but the output has the shape {list(output.shape)} and the "
            f"target has the shape {list(target.shape)}. {_elementwise_fix(output, target)}"
        )
    return target if target.dtype == output.dtype else target.to(output.dtype)


def require_classes_last(loss: nn.Module, output: Tensor, target: Tensor) -> None:
    """Raise RunError unless the output is `[..., V]` for V classes and the target is `[...]` with class numbers."""
    name = type(loss).__name__
    if output.dim() < 2 or output.shape[:-1] != target.shape:
        raise RunError(
            f"{name} needs a target of shape {list(output.shape[:-1])} for outputs of shape {list(output.shape)}, but "
            f"the target has the shape {list(target.shape)}. {classes_fix(output, target)}"
        )
    if target.is_floating_point():
        raise RunError(
            f"{name} needs class numbers (int64), but the target has the dtype {dtype_name(target.dtype)}. For a "
            "regression, write objective=[mse]. For probabilities, write objective=[bce_with_logits]"
        )


def _elementwise_fix(output: Tensor, target: Tensor) -> str:
    if output.shape == (*target.shape, 1):
        return "End the model with {_target_: torch.nn.Flatten, start_dim: 0}, or add an axis of length 1 to the target"
    if not target.is_floating_point() and output.dim() == target.dim() + 1:
        return "For class numbers, write objective=[cross_entropy]"
    return f"Change the model's last layer to {target.shape[-1] if target.dim() > 1 else 1} outputs per sample"


def classes_fix(output: Tensor, target: Tensor) -> str:
    """Return the fix for a target with a shape or dtype that does not match the scores of the classes."""
    if target.shape == (*output.shape[:-1], 1):
        return "Remove the target's last axis, which has length 1"
    if target.shape == output.shape and not target.is_floating_point():
        return "The targets seem to be one-hot. Convert them to class numbers with target.argmax(-1)"
    if output.dim() > 2 and output.shape[2:] == target.shape[1:]:
        return "The classes seem to be on axis 1. Move this axis to the end with x.movedim(1, -1)"
    if output.dim() > 2 and target.dim() == 1:
        return "The model returns several predictions per sample. Average them (x.mean(1)), or select one (x[:, -1])"
    return "Change the model to return one row of scores for each class number"
