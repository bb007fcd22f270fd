"""Where numbers change their dtype: at the edge of the whole network under a true word."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from exp.models.named_forward import forward_name
from exp.precision.edges import Ends, cast
from exp.precision.words import HALF


class Entrance:
    """The hooks of the whole network under a true word: floating inputs are cast, integer ones left alone.

    Here and not in the batch, so that targets stay as exact as the data set gave them. Within, what a forward creates
    without a dtype (torch.zeros(n)) has the network's, too.

    Never compiled: torch.compile makes one graph of a network's forward, and would make others of its own hooks.
    """

    def __init__(self, *, dtype: torch.dtype, ends: Ends) -> None:
        self.dtype, self.ends = dtype, ends
        self.defaults: list[torch.dtype] = []

    def attach(self, module: nn.Module) -> list[Any]:
        """The handles of its two hooks."""
        return [
            module.register_forward_pre_hook(self.enter, with_kwargs=True),
            module.register_forward_hook(self.leave, with_kwargs=True, always_call=True),
        ]

    @torch.compiler.disable
    def enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Any, Any]:
        self.ends.begin(training=module.training, forward=forward_name(module))
        self.defaults.append(torch.get_default_dtype())
        torch.set_default_dtype(self.dtype)
        return cast(args, self.dtype), cast(kwargs, self.dtype)

    @torch.compiler.disable
    def leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> Any:
        if self.defaults:
            torch.set_default_dtype(self.defaults.pop())
        return self.ends.restore(output) if self.dtype in HALF else output
