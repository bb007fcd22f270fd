"""Inputs of a loss: a value by name, in full precision, of the shape and dtype that the loss needs.

torch stretches [B, 1] against [B] to [B, B] and trains on nonsense; here that is refused.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exp.errors import RunError
from exp.shared_types import dtype_name
from exp.spelling import find_nearest

# What a step computed, by name: `output`, `target`, `input`, and whatever else the network and the batch name.
Values = Mapping[str, Any]
HALF = (torch.float16, torch.bfloat16)
# Losses that compare element by element.
ELEMENTWISE = (
    nn.MSELoss,
    nn.L1Loss,
    nn.SmoothL1Loss,
    nn.HuberLoss,
    nn.BCELoss,
    nn.BCEWithLogitsLoss,
    nn.PoissonNLLLoss,
    nn.GaussianNLLLoss,
    nn.KLDivLoss,
    nn.SoftMarginLoss,
    nn.MultiLabelSoftMarginLoss,
    nn.HingeEmbeddingLoss,
)


def pick(values: Values, name: str, role: str) -> Tensor:
    """The tensor of that name, among the values or in the mapping that stands there.

    Raises: RunError where there is none, with what is there and the nearest name.
    """
    if name in values:
        value = values[name]
        if type(value) is Tensor or isinstance(value, Tensor):  # the first is thrice as fast
            return value
        if not isinstance(value, Mapping):
            raise RunError(f"a term's {role} {name!r} is a {type(value).__name__}; it must be a tensor")
        values = value
    found = find_nearest(name, values)
    hint = f". Nearest: {found[0]}" if found else ""
    there = ", ".join(sorted(values))
    raise RunError(f"a term's {role} is {name!r}, which neither network nor batch gives; there are {there}{hint}")


def names_of_values(inputs: Mapping[str, str] | None, *, output: str, target: str) -> dict[str, str]:
    """Return the names of the values that a loss or a metric reads, by their keys below its node."""
    if inputs is not None:
        return {f"inputs.{parameter}": name for parameter, name in inputs.items()}
    return {"output": output, "target": target}


def full(tensor: Tensor) -> Tensor:
    """Casts half precision to float32; leaves other dtypes as they are."""
    return tensor.float() if tensor.dtype in HALF else tensor


def match_target(loss: nn.Module, output: Tensor, target: Tensor) -> Tensor:
    """The target as the loss needs it: for an elementwise loss of the output's own shape, in its dtype.

    Raises: RunError where the shapes differ.
    """
    if not isinstance(loss, ELEMENTWISE):
        return target
    if output.shape != target.shape:
        name = type(loss).__name__
        raise RunError(
            f"{name} compares element by element: the output is {list(output.shape)}, the target {list(target.shape)}; "
            f"both must have one shape. {elementwise_fix(output, target)}"
        )
    return target if target.dtype == output.dtype else target.to(output.dtype)


def require_classes_last(loss: nn.Module, output: Tensor, target: Tensor) -> None:
    """Raises: RunError unless the output is `[..., V]` and the target `[...]` of integer class numbers."""
    name = type(loss).__name__
    if output.dim() < 2 or output.shape[:-1] != target.shape:
        expected = list(output.shape[:-1])
        raise RunError(
            f"{name} reads classes from the last axis: the output is {list(output.shape)}, so that the target must be "
            f"{expected}; it is {list(target.shape)}. {_classes_fix(output, target)}"
        )
    if target.is_floating_point():
        raise RunError(
            f"{name} needs class numbers (int64); the target is {dtype_name(target.dtype)}. For a "
            "regression choose objective=[mse], for probabilities objective=[bce_with_logits]"
        )


def elementwise_fix(output: Tensor, target: Tensor) -> str:
    """What to do about an output and a target of other shapes than each other's."""
    if output.shape == (*target.shape, 1):
        return "End the model with {_target_: torch.nn.Flatten, start_dim: 0}, or give the target an axis of 1"
    if target.shape == (*output.shape, 1):
        return "Drop the target's last axis of 1, or let the model keep it"
    if not target.is_floating_point() and output.dim() == target.dim() + 1:
        return "Class numbers need objective=[cross_entropy]"
    return f"The model's last layer must give {target.shape[-1] if target.dim() > 1 else 1} numbers for a sample"


def _classes_fix(output: Tensor, target: Tensor) -> str:
    if target.shape == (*output.shape[:-1], 1):
        return "Drop the target's last axis of 1"
    if target.shape == output.shape and not target.is_floating_point():
        return "The targets seem to be one-hot: give class numbers, target.argmax(-1)"
    if output.dim() > 2 and output.shape[2:] == target.shape[1:]:
        return "The classes seem to be on axis 1: move them to the last one (x.movedim(1, -1))"
    if output.dim() > 2 and target.dim() == 1:
        return "The model gives several predictions for a sample: pool or select one, as x.mean(1) or x[:, -1]"
    return "The model must give one row of scores for each class number"
