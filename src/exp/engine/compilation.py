"""Compile the network in place by torch.compile: the same module and state dict, with a compiled call.

Relied on, and tested (torch 2.13): `nn.Module.compile` compiles nothing, in silence, where `forward` is one of torch's
own; the private `_compiled_call_impl` is what it sets; and with the private `skip_nnmodule_hook_guards` of
`torch._dynamo.config` a compiled network would call the hooks of modules that were there at its first call, and no
others.
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch._dynamo
from torch import nn

from exp.objectives.term import TWICE

log = logging.getLogger(__name__)

# A compiled backward runs once, and has none of its own.
EAGER = TWICE | {"retained_graph"}
# torch's switch for hooks, as the first network of this process found it.
_found: list[bool] = []


def compile_network(network: nn.Module, *, backend: str, mode: str | None = None, needs: frozenset[str]) -> None:
    """Compile a network's calls from now on; each shape and mode at its first call, which takes seconds.

    backend, mode: of torch.compile, such as inductor and reduce-overhead.
    needs: of the objective, some of which a compiled network cannot meet.
    """
    _guard_hooks()
    on_cpu = all(parameter.device.type == "cpu" for parameter in network.parameters())
    options = _options(backend, on_cpu=on_cpu) if mode is None else None  # torch takes one of the two
    network.compile(backend=backend, mode=mode, options=options)
    if needs & EAGER:
        log.warning(
            "terms of the objective need %s, which a compiled network cannot give: their steps run it uncompiled",
            ", ".join(sorted(needs & EAGER)),
        )


def compiled_function(function: Callable[..., Any], *, backend: str) -> Callable[..., Any]:
    """A function of tensors on a CPU, its gradients' computation included, compiled at its first call.

    backend: as of `compile_network`.
    """
    _guard_hooks()
    made: Callable[..., Any] = torch.compile(function, backend=backend, options=_options(backend, on_cpu=True))
    return made


def _guard_hooks() -> None:
    if not _found:
        _found.append(torch._dynamo.config.skip_nnmodule_hook_guards)
    torch._dynamo.config.skip_nnmodule_hook_guards = False


def _options(backend: str, *, on_cpu: bool) -> dict[str, Any] | None:
    # Where inductor lays a CPU's convolutions out anew, a LeNet's lost their gradients for a batch of 41 (torch 2.13).
    return {"layout_optimization": False} if backend == "inductor" and on_cpu else None


def forget_compiled() -> None:
    """Forget what was compiled in this process, and leave torch's switch as it was found.

    torch counts what it compiled by the code of a class, whose networks of eight widths are all that it compiles.
    """
    torch.compiler.reset()
    if _found:
        torch._dynamo.config.skip_nnmodule_hook_guards = _found.pop()


def is_compiled(network: nn.Module) -> bool:
    """Return whether a network was compiled by compile_network."""
    return network._compiled_call_impl is not None


def uncompiled(network: nn.Module) -> AbstractContextManager[None]:
    """Run a network that may be compiled as it is, within this context."""
    return _eager() if is_compiled(network) else nullcontext()


def _eager() -> AbstractContextManager[None]:
    stance: AbstractContextManager[None] = torch.compiler.set_stance("force_eager")
    return stance


def as_needed(needs: frozenset[str], network: nn.Module) -> AbstractContextManager[None]:
    """Run a step's forward uncompiled where its terms need what a compiled network cannot give."""
    return _eager() if needs & EAGER and is_compiled(network) else nullcontext()
