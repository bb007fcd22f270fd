"""What a hook computes beside the step with the step's network and batches, so that nothing of the run is touched."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.data.randomness import preserve_generators
from exp.errors import Fault

if TYPE_CHECKING:
    from exp.hooks.hook import Hook
    from exp.strategies.strategy import Blueprint


def objective_faults(hook: Hook, planned: Blueprint, *, takes_samples: bool) -> Iterator[Fault]:
    """What an objective must not be for a hook that runs it apart from the step.

    takes_samples: each sample by itself. Else a rank's samples together, among which weights matter over ranks alone.
    """
    own = f"hooks.{hook.name}"
    if planned.needs:
        yield hook.fault(
            key="objective",
            got=f"an objective that needs {', '.join(sorted(planned.needs))}, with {own}",
            expected="terms of the values of one forward pass",
            cure=f"Choose other terms, or {hook.leave_out}",
        )
    if not takes_samples and planned.placement.world_size == 1:
        return
    where, expected = ", over several ranks", "one rank, or a mean over samples: else a rank's loss is no share of it"
    if takes_samples:
        where, expected = "", "a mean over samples, of which each has an equal share"
    for term in planned.weighed:
        yield hook.fault(
            key=f"objective.{term}",
            got=f"a term that divides by weights of its targets{where}, with {own}",
            expected=expected,
            cure=f"Take class weights and ignored targets out, or {hook.leave_out}",
        )


def running(network: nn.Module, state: dict[str, Tensor]) -> Callable[..., Any]:
    """What `Step.loss_with` calls in the network's place: the network with these parameters and buffers."""
    return lambda *inputs, **named: functional_call(network, state, inputs, named)


@contextmanager
def apart(network: nn.Module) -> Iterator[None]:
    """Gives every generator of random numbers back as it was, and takes the kernels that any transform understands."""
    with preserve_generators(), ExitStack() as stack:
        for device in {parameter.device for parameter in network.parameters()}:
            stack.enter_context(_generator_kept(device))
        # Fused attention has no rule for torch.func.vmap; the plain one computes the same.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        state = torch.mps.get_rng_state()
        try:
            yield
        finally:
            torch.mps.set_rng_state(state)
    else:
        yield
