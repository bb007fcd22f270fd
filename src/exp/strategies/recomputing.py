"""Activation checkpointing: a module's activations are computed again in the backward, and not kept until then."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.utils.checkpoint import checkpoint


def recompute(modules: Iterable[nn.Module]) -> None:
    """Lets each module's forward keep its inputs alone. In place: names in the state dict stay what they are.

    Random numbers are drawn again as they were (torch.utils.checkpoint keeps the generators' states).
    """
    for module in modules:
        # On the instance, which nn.Module calls, hooks around it as before.
        module.forward = _twice(module.forward)


def _twice(forward: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(forward)
    def checkpointed(*inputs: Any, **named: Any) -> Any:
        return checkpoint(forward, *inputs, use_reentrant=False, **named)

    return checkpointed
