"""Compile the network in place by torch.compile: the same module and state dict, with a compiled call.

Relied on, and tested (torch 2.13): `nn.Module.compile` compiles nothing, without an error, if `forward` is one of
torch's own. A copy of a compiled network is not compiled.
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

# A compiled backward runs once, and has none of its own.
EAGER = TWICE | {"retained_graph"}
_compiled: WeakSet[nn.Module] = WeakSet()


def compile_network(network: nn.Module, *, backend: str, mode: str | None = None, needs: frozenset[str]) -> None:
    """Compile a network's calls from now on; each shape and mode at its first call, which takes seconds.

    backend, mode: of torch.compile, such as inductor and reduce-overhead.
    needs: of the objective, some of which a compiled network cannot meet.
    """
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    options = _options(backend, on_cpu=on_cpu) if mode is None else None  # torch takes one of the two
    network.compile(backend=backend, mode=mode, options=options)
    _compiled.add(network)
    if needs & EAGER:
        log.warning(
            "terms of the objective need %s, which a compiled network cannot give: their steps run it uncompiled",
            ", ".join(sorted(needs & EAGER)),
        )


def _options(backend: str, *, on_cpu: bool) -> dict[str, Any] | None:
    # Where inductor lays a CPU's convolutions out anew, a LeNet's lost their gradients for a batch of 41 (torch 2.13).
    return {"layout_optimization": False} if backend == "inductor" and on_cpu else None


def is_compiled(network: nn.Module) -> bool:
    """Return whether a network was compiled by compile_network."""
    return network in _compiled


def uncompiled(network: nn.Module) -> AbstractContextManager[None]:
    """Run a network that may be compiled as it is, within this context."""
    return _eager() if is_compiled(network) else nullcontext()


def _eager() -> AbstractContextManager[None]:
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def as_needed(needs: frozenset[str], network: nn.Module) -> AbstractContextManager[None]:
    """Run a step's forward uncompiled where its terms need what a compiled network cannot give."""
    return _eager() if needs & EAGER and is_compiled(network) else nullcontext()
