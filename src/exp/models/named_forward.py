"""A network seen through another of its forwards: a further program of a YAML model, or a method of a module."""

from __future__ import annotations

import copy

from torch import nn

from exp.models.containers import ProgramModel


def with_forward(network: nn.Module, name: str) -> nn.Module:
    """A module whose forward is the network's method of that name, and whose everything else is the network's.

    It shares layers, parameters, buffers and hooks, so that what is trained, moved, loaded or observed in one is so in
    the other. It is not to be registered in a module, for then its parameters were there twice.

    Raises: AttributeError where there is no such method.
    """
    method = getattr(network, name)
    view = copy.copy(network)  # shallow: the tables of layers and parameters are the same objects
    view.__dict__["forward"] = method
    # A network that torch.compile has in hand would run its own forward.
    view.__dict__["_compiled_call_impl"] = None
    view.__dict__["forward_name"] = name
    return view


def forward_name(module: nn.Module) -> str | None:
    """Which of its forwards a network is seen through; None where it is its own."""
    return vars(module).get("forward_name")


def forward_names(network: nn.Module) -> list[str]:
    """What `with_forward` takes: the programs of a YAML model, the public methods of a module of one's own."""
    if isinstance(network, ProgramModel):
        return list(network.programs)
    classes = type(network).__mro__
    own = classes[: classes.index(nn.Module)]
    names = [name for cls in own for name, value in vars(cls).items() if callable(value) and not name.startswith("_")]
    return [name for name in dict.fromkeys(names) if not hasattr(nn.Module, name)]
