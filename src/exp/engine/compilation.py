"""Compilation of the network by torch.compile, in place: the module and its state dict stay the same.

Tested with torch 2.13: if `forward` is a method of a class of torch, `nn.Module.compile` compiles nothing and reports
no error. A copy of a compiled network is not compiled.
"""

from __future__ import annotations

import logging
from contextlib import AbstractContextManager, nullcontext
from typing import Any
from weakref import WeakSet

import torch
from torch import nn

from exp.objectives.term import TWICE

log = logging.getLogger(__name__)

# A compiled backward runs only once, and cannot be differentiated.
EAGER = TWICE | {"retained_graph"}
_compiled: WeakSet[nn.Module] = WeakSet()


def compile_network(network: nn.Module, *, backend: str, mode: str | None = None, needs: frozenset[str]) -> None:
    """Compile the forward of a network. Each new input shape or mode compiles at its first call, which takes seconds.

    Args:
        network: The network.
        backend: Backend of torch.compile, such as inductor.
        mode: Mode of torch.compile, such as reduce-overhead. Default: None.
        needs: Needs of the objective's terms. A warning lists the needs that a compiled network does not support.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    options = _options(backend, on_cpu=on_cpu) if mode is None else None  # torch accepts only one of mode and options
    network.compile(backend=backend, mode=mode, options=options)
    _compiled.add(network)
    if needs & EAGER:
        log.warning(
            "terms of the objective need %s, which a compiled network does not support: their steps run uncompiled",
            ", ".join(sorted(needs & EAGER)),
        )


def _options(backend: str, *, on_cpu: bool) -> dict[str, Any] | None:
    # On a CPU, inductor's layout of convolutions lost gradients of a LeNet with a batch of 41 samples (torch 2.13).
    return {"layout_optimization": False} if backend == "inductor" and on_cpu else None


def is_compiled(network: nn.Module) -> bool:
    """Return whether compile_network compiled the network."""
    return network in _compiled


def run_uncompiled(network: nn.Module) -> AbstractContextManager[None]:
    """Return a context in which the network runs uncompiled.

    If the network is not compiled, the context does nothing.
    """
    return _eager() if is_compiled(network) else nullcontext()


def _eager() -> AbstractContextManager[None]:
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def as_needed(needs: frozenset[str], network: nn.Module) -> AbstractContextManager[None]:
    """Return a context that runs the network uncompiled if the terms' needs do not support compilation."""
    return _eager() if needs & EAGER and is_compiled(network) else nullcontext()
