"""Values by name, as a term takes them: the network's outputs and the batch's entries."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from exp.errors import RunError
from exp.spelling import nearest

HALF = (torch.float16, torch.bfloat16)


def pick(values: Mapping[str, Any], name: str, role: str) -> Tensor:
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
    found = nearest(name, values)
    hint = f". Nearest: {found[0]}" if found else ""
    there = ", ".join(sorted(values))
    raise RunError(f"a term's {role} is {name!r}, which neither network nor batch gives; there are {there}{hint}")


def full(tensor: Tensor) -> Tensor:
    """In float32 where it is of half precision, else as it is."""
    return tensor.float() if tensor.dtype in HALF else tensor
