"""Where numbers change their dtype: at the edge of a kept layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn

from exp.nested import rebuilt


def cast(data: Any, dtype: torch.dtype, *, notes: list[tuple[Tensor, Tensor]] | None = None) -> Any:
    """The same structure with its floating tensors in `dtype`; all else as it is.

    notes: takes (cast, before) of every tensor that changed.
    """
    if isinstance(data, Tensor):
        if not data.is_floating_point() or data.dtype == dtype:
            return data
        changed = data.to(dtype)
        if notes is not None:
            notes.append((changed, data))
        return changed
    return _mapped(data, lambda part: cast(part, dtype, notes=notes))


def _mapped(data: Any, change: Callable[[Any], Any]) -> Any:
    """A tuple, list or mapping with its parts changed; one that holds nothing to change is returned itself."""
    if isinstance(data, Mapping):
        parts = {name: change(value) for name, value in data.items()}
        return data if all(parts[name] is data[name] for name in parts) else rebuilt(data, list(parts.values()))
    if isinstance(data, list | tuple):
        changed = [change(value) for value in data]
        return data if all(new is old for new, old in zip(changed, data, strict=True)) else rebuilt(data, changed)
    return data


class Ends:
    """What kept layers gave before it was rounded to the dtype around them, for those that end the network.

    A layer's output is held until the network returns only where it was among the outputs before, or where nothing is
    known yet: at the first call of each of the network's forwards, in training and in evaluation. Where a strategy
    runs the layers without calling the network, nothing is held.
    """

    def __init__(self) -> None:
        self.call: tuple[bool, str | None] | None = None
        self.waiting: list[tuple[str, Tensor, Tensor]] = []
        self.known: dict[tuple[bool, str | None], set[str]] = {}

    def begin(self, *, training: bool, forward: str | None) -> None:
        """The network is called. forward: the name of the forward that it is seen through; None is its own."""
        self.call = training, forward

    def hold(self, name: str, notes: list[tuple[Tensor, Tensor]]) -> None:
        if self.call is not None and (self.call not in self.known or name in self.known[self.call]):
            self.waiting += [(name, rounded, full) for rounded, full in notes]

    def restore(self, output: Any) -> Any:
        """The network's output with the full numbers of kept layers, in float32, for the loss."""
        waiting, self.waiting = self.waiting, []
        call, self.call = self.call, None
        found: set[str] = set()

        def full(part: Any) -> Any:
            for name, rounded, before in waiting:
                if part is rounded:
                    found.add(name)
                    return before.float()
            return part if isinstance(part, Tensor) else _mapped(part, full)

        restored = full(output) if waiting else output
        if output is not None and call is not None:  # else the forward raised, and nothing is known of it
            self.known.setdefault(call, found)
        return restored


class Edge:
    """The hooks of one kept layer: autocast off, floating inputs cast, the output in the dtype around it.

    They are methods of a plain object, so that a module with them is copied and pickled like any other.
    """

    def __init__(
        self, *, name: str, device_type: str, inside: torch.dtype, around: torch.dtype | None, ends: Ends | None
    ) -> None:
        self.name, self.device_type = name, device_type
        self.inside, self.around, self.ends = inside, around, ends
        self.autocast: list[bool] = []

    def attach(self, module: nn.Module) -> list[Any]:
        """The handles of its two hooks. always_call: autocast comes back where the forward raised, too."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        # Not an autocast object that is entered here and left there: torch.compile follows only this form.
        enabled = torch.is_autocast_enabled(self.device_type)
        self.autocast.append(enabled)
        if enabled:
            torch.set_autocast_enabled(self.device_type, False)
        return cast(args, self.inside), cast(kwargs, self.inside)

    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.autocast and self.autocast.pop():
            torch.set_autocast_enabled(self.device_type, True)
        if self.around is None or output is None:
            return output
        if self.ends is None:
            return cast(output, self.around)
        notes: list[tuple[Tensor, Tensor]] = []
        output = cast(output, self.around, notes=notes)
        self.ends.hold(self.name, notes)
        return output
