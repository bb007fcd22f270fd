"""Functions for nested data, such as a batch or the output of a network.

Nested data are mappings, tuples, lists and dataclasses that contain tensors and other values at any depth.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from typing import Any, TypeVar, cast

import torch
from torch import Size, Tensor

Nested = TypeVar("Nested")


def map_tensors(data: Nested, function: Callable[[Tensor], object]) -> Nested:
    """Return nested data in which each tensor is replaced by the result of a function.

    Containers keep their class. If the class of a mapping cannot be built from a dict, the mapping becomes a dict. A
    torch.Size is not treated as a container.

    Args:
        data: Nested data.
        function: Function that is called with each tensor.

    Returns:
        New nested data. If the function returns all tensors unchanged, `data` itself.
    """
    if isinstance(data, Tensor):
        return cast(Nested, function(data))
    if isinstance(data, Mapping):
        old = list(data.values())
    elif isinstance(data, list | tuple) and not isinstance(data, Size):
        old = list(data)
    elif is_dataclass_instance(data):
        old = list(_fields(data).values())
    else:
        return data
    new = [map_tensors(value, function) for value in old]
    return rebuild(data, new) if any(map(is_not, new, old)) else data


def move_tensors(data: Nested, device: torch.device) -> Nested:
    """Return nested data with all tensors on a device. Copies from pinned memory are asynchronous."""
    return map_tensors(data, lambda tensor: tensor.to(device, non_blocking=True))


def rebuild(data: Nested, parts: Sequence[object]) -> Nested:
    """Return a container with the class and the keys of `data`, and with new values.

    Args:
        data: Mapping, list, tuple or dataclass.
        parts: New values, in the order of the old values.
    """
    made: object
    kind: Callable[..., object] = type(data)
    if not isinstance(data, Mapping | list | tuple):
        made = copy.copy(data)
        for name, part in zip(_fields(data), parts, strict=True):
            object.__setattr__(made, name, part)  # the class may be frozen
    elif isinstance(data, Mapping):
        made = dict(zip(data, parts, strict=True))
        if kind is not dict:
            # The first argument of a defaultdict is not a mapping. The result is then a dict.
            with contextlib.suppress(TypeError):
                made = kind(made)
    else:
        # A namedtuple takes its values as separate arguments.
        made = kind(*parts) if hasattr(data, "_fields") else kind(parts)
    return cast(Nested, made)


def tensors_in(data: object) -> Iterator[Tensor]:
    """Yield all tensors in nested data, in the order of the containers."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_in(value)
    elif is_dataclass_instance(data):
        yield from tensors_in(_fields(data))


def named_parts(output: object) -> Mapping[str, Any]:
    """Return the values in a network's output by name.

    For a mapping, the names are its keys. For a dataclass or namedtuple, the names are its fields. For a list or tuple,
    the names are output_0, output_1 and so on. Values that are None are left out. For a single tensor, the result is
    empty.
    """
    if isinstance(output, Tensor):
        return {}
    if isinstance(output, Mapping):
        found = {str(name): part for name, part in output.items()}
    elif isinstance(output, tuple) and hasattr(output, "_fields"):
        found = dict(zip(output._fields, output, strict=True))
    elif isinstance(output, list | tuple) and not isinstance(output, Size):
        found = {f"output_{place}": part for place, part in enumerate(output)}
    else:
        found = _fields(output) if is_dataclass_instance(output) else {}
    return {name: part for name, part in found.items() if part is not None}


def is_dataclass_instance(data: object) -> bool:
    """Return whether an object is an instance of a dataclass."""
    return dataclasses.is_dataclass(data) and not isinstance(data, type)


def _fields(data: object) -> dict[str, object]:
    return {field.name: getattr(data, field.name) for field in dataclasses.fields(cast(Any, data))}
