"""Nested data, such as a batch or what a network returns: mappings, tuples and lists with tensors in them."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch
    from torch import Tensor


def mapped(data: Any, function: Callable[[Tensor], Any]) -> Any:
    """The same structure with what the function makes of each tensor; all else as it is.

    A mapping that can be built from a dict, a namedtuple, a tuple and a list keep their classes; another mapping
    becomes a dict. A torch.Size is no structure.
    """
    from torch import Size, Tensor

    if isinstance(data, Tensor):
        return function(data)
    if isinstance(data, Mapping):
        return rebuilt(data, [mapped(value, function) for value in data.values()])
    if isinstance(data, list | tuple) and not isinstance(data, Size):
        return rebuilt(data, [mapped(value, function) for value in data])
    return data


def moved(data: Any, device: torch.device) -> Any:
    """The same structure on a device; copies from pinned memory run beside the computation."""
    return mapped(data, lambda tensor: tensor.to(device, non_blocking=True))


def rebuilt(data: Any, parts: list[Any]) -> Any:
    """A mapping, list or tuple like `data`, with these in the place of its values, in order."""
    if isinstance(data, Mapping):
        by_name = dict(zip(data, parts, strict=True))
        if type(data) is dict:
            return by_name
        try:
            return type(data)(by_name)  # type: ignore[call-arg]
        except TypeError:  # such as a defaultdict, whose first argument is another
            return by_name
    # A namedtuple takes its parts one by one.
    return type(data)(*parts) if hasattr(data, "_fields") else type(data)(parts)


def tensors_in(data: Any) -> Iterator[Tensor]:
    """The tensors in nested data, in order."""
    from torch import Tensor

    if isinstance(data, Tensor):
        yield data
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from tensors_in(value)
    elif isinstance(data, list | tuple):
        for value in data:
            yield from tensors_in(value)
