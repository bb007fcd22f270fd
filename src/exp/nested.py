"""Walk nested data, such as a batch or a network's output: mappings, tuples and lists of tensors."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from operator import is_not
from typing import TypeVar, cast

import torch
from torch import Size, Tensor

Nested = TypeVar("Nested")


def mapped(data: Nested, function: Callable[[Tensor], object]) -> Nested:
    """Applies a function to each tensor and keeps the structure.

    A mapping that can be built from a dict, a namedtuple, a tuple and a list keep their classes; another mapping
    becomes a dict. One in which nothing changes is returned itself. A torch.Size is no structure.
    """
    if isinstance(data, Tensor):
        return cast(Nested, function(data))
    if isinstance(data, Mapping):
        old = list(data.values())
    elif isinstance(data, list | tuple) and not isinstance(data, Size):
        old = list(data)
    else:
        return data
    new = [mapped(value, function) for value in old]
    return rebuilt(data, new) if any(map(is_not, new, old)) else data


def moved(data: Nested, device: torch.device) -> Nested:
    """Moves the tensors to a device; copies from pinned memory run beside the computation."""
    return mapped(data, lambda tensor: tensor.to(device, non_blocking=True))


def rebuilt(data: Nested, parts: Sequence[object]) -> Nested:
    """A mapping, list or tuple like `data`, with these in the place of its values, in order."""
    made: object
    kind: Callable[..., object] = type(data)
    if isinstance(data, Mapping):
        made = dict(zip(data, parts, strict=True))
        if kind is not dict:
            # A defaultdict, whose first argument is another, stays a dict.
            with contextlib.suppress(TypeError):
                made = kind(made)
    else:
        # A namedtuple takes its parts one by one.
        made = kind(*parts) if hasattr(data, "_fields") else kind(parts)
    return cast(Nested, made)


def tensors_in(data: object) -> Iterator[Tensor]:
    """The tensors in nested data, in order."""
    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping | list | tuple):
        for value in data.values() if isinstance(data, Mapping) else data:
            yield from tensors_in(value)
