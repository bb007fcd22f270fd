"""A fused optimizer's step without the bookkeeping around its kernel: lists of its state are made once, not each step.

AdamW over four parameters: 40 us a step through `optimizer.step()`, 15 us here, of which the kernel is most. A whole
step of benchmarks/loop.py (an MLP 64-128-10) takes 1.16 times the processor time without it (six pairs).

Private names of torch (seen in 2.13, and tested): `torch._fused_adam_`, `torch._fused_adamw_` and `torch._fused_sgd_`,
which Adam, AdamW and SGD with fused=True call with these arguments, behind `torch._foreach_add_` of the counts of
steps; `_opt_called`, where a schedule notes that the optimizer went first, and `_wrapped_by_lr_sched`, its mark on
`step`; `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_global_optimizer_pre_hooks` and
`_global_optimizer_post_hooks`; `_profiler_enabled` of torch.autograd. `load_state_dict` replaces `optimizer.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Group = dict[str, Any]
# On the host torch makes a tensor of a plain 1 anew for each parameter: four counts take 7 us so, and 3 with this.
ONE = torch.ones(())
# Of a group, its parameters, their gradients and their state; the counts of steps are counted already.
Kernel = Callable[[Group, list[Tensor], list[Tensor], tuple[list[Tensor], ...]], None]


class DirectStep:
    """Called, it makes a step of an optimizer, bit for bit the one of `optimizer.step()`.

    Where that has more to do than its kernel (the first step, a parameter without a gradient, hooks of the optimizer, a
    profiler that looks for its steps), it is what is called. Nobody else changes the optimizer between two calls, but
    for its gradients and the settings of its groups.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._kernel = _kernel_of(optimizer)
        self._state: Mapping[Tensor, object] | None = None
        self._groups: list[tuple[Group, list[Tensor], tuple[list[Tensor], ...]]] = []
        if self._is_known:
            self._collect()

    def __call__(self) -> None:
        optimizer = self.optimizer
        gradients = self._gradients() if self._is_known and optimizer.state is self._state else None
        if gradients is None:
            optimizer.step()
            if self._is_known:
                self._collect()
            return
        # A schedule on this optimizer asks, and warns where the optimizer does not go first.
        vars(optimizer)["_opt_called"] = True
        with torch.no_grad():
            for (group, parameters, state), own in zip(self._groups, gradients, strict=True):
                if self._kernel is _adam:
                    _count(state[2])
                self._kernel(group, parameters, own, state)

    def _gradients(self) -> list[list[Tensor]] | None:
        """Of each group; None where `optimizer.step()` has to see to it."""
        optimizer = self.optimizer
        if optimizer._optimizer_step_pre_hooks or optimizer._optimizer_step_post_hooks:
            return None
        # Held: the device may skip the step (precision/scaler.py).
        if "found_inf" in vars(optimizer):
            return None
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled():
            return None
        if len(optimizer.param_groups) != len(self._groups):
            return None
        found = []
        for (group, parameters, _), now in zip(self._groups, optimizer.param_groups, strict=True):
            if group is not now or len(group["params"]) != len(parameters):
                return None
            own = []
            for parameter in parameters:
                if (gradient := parameter.grad) is None:
                    return None
                own.append(gradient)
            found.append(own)
        return found

    def _collect(self) -> None:
        optimizer = self.optimizer
        self._groups, self._state = [], None
        for group in optimizer.param_groups:
            parameters: list[Tensor] = list(group["params"])
            state = _state_of(optimizer, group)
            if state is None:
                return  # a parameter that had no gradient yet
            self._groups.append((group, parameters, state))
        self._state = optimizer.state


@dataclass(frozen=True)
class _Call:
    """A kernel's call for one group. places: of its parameters among the optimizer's, in the order of its user."""

    kernel: Kernel
    group: Group
    parameters: list[Tensor]
    state: tuple[list[Tensor], ...]
    places: Sequence[int]


class DirectSteps:
    """Called, it makes a step of each of several optimizers, bit for bit the ones of `optimizer.step()`.

    Their counts of steps are one tensor, which is counted at once: torch counts each by itself, 4 us a parameter.
    Nobody else steps these optimizers, or gives them hooks. One that is not known makes its step itself.

    parameters: of each optimizer, in the order in which their gradients are given.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[Tensor]]) -> None:
        self._optimizers, self._parameters = list(optimizers), [list(one) for one in parameters]
        # Of each optimizer; None of one that steps itself.
        self._calls: list[list[_Call] | None] = []
        self._counts: Tensor | None = None

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """gradients: of each optimizer's parameters."""
        if self._counts is not None and self._calls:
            self._counts.add_(1)
        calls = self._calls or [None] * len(self._optimizers)
        with torch.no_grad():
            for place, (optimizer, known, own) in enumerate(zip(self._optimizers, calls, gradients, strict=True)):
                if known is None:
                    _step(optimizer, self._parameters[place], own)
                    continue
                vars(optimizer)["_opt_called"] = True
                for call in known:
                    call.kernel(call.group, call.parameters, [own[place] for place in call.places], call.state)
        if not self._calls:
            self._calls = list(map(self._calls_of, self._optimizers, self._parameters))
            self._count_together()

    def _calls_of(self, optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[_Call] | None:
        if not is_known(optimizer):
            return None
        places = {id(parameter): place for place, parameter in enumerate(parameters)}
        found = []
        for group in optimizer.param_groups:
            state = _state_of(optimizer, group)
            if state is None:
                return None
            own = [places[id(parameter)] for parameter in group["params"]]
            found.append(_Call(_kernel_of(optimizer), group, list(group["params"]), state, own))
        return found

    def _count_together(self) -> None:
        """Let the counts of all parameters be views of one tensor; of SGD there are none."""
        held = [
            (optimizer.state[parameter], call.state[2], number)
            for optimizer, calls in zip(self._optimizers, self._calls, strict=True)
            for call in calls or ()
            if call.kernel is _adam
            for number, parameter in enumerate(call.parameters)
        ]
        self._counts = torch.stack([state["step"] for state, _, _ in held]) if held else None
        for (state, counts, number), view in zip(held, [] if self._counts is None else self._counts, strict=True):
            state["step"] = counts[number] = view


def _step(optimizer: Optimizer, parameters: Sequence[Tensor], gradients: Sequence[Tensor]) -> None:
    for parameter, gradient in zip(parameters, gradients, strict=True):
        parameter.grad = gradient
    optimizer.step()


def _count(counts: list[Tensor]) -> None:
    """Add 1 to the counts of steps, which are on the host unless they are on the parameters' device."""
    if counts[0].is_cpu:
        torch._foreach_add_(counts, ONE, alpha=1.0)
    else:
        torch._foreach_add_(counts, 1)


def _kernel_of(optimizer: Optimizer) -> Kernel:
    return _sgd if type(optimizer) is SGD else _adam


def _state_of(optimizer: Optimizer, group: Group) -> tuple[list[Tensor], ...] | None:
    """What the kernel takes of a group's state; None where a parameter has none yet."""
    states = [optimizer.state.get(parameter, {}) for parameter in group["params"]]
    names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")
    if type(optimizer) is SGD:
        names = ("momentum_buffer",) if group["momentum"] else ()
    if any(state.get(name) is None for state in states for name in names):
        return None
    return tuple([state[name] for state in states] for name in names)


def _adam(group: Group, parameters: list[Tensor], gradients: list[Tensor], state: tuple[list[Tensor], ...]) -> None:
    averages, squares, steps = state
    kernel = torch._fused_adamw_ if group["decoupled_weight_decay"] else torch._fused_adam_
    beta1, beta2 = group["betas"]
    kernel(
        parameters,
        gradients,
        averages,
        squares,
        [],
        steps,
        amsgrad=False,
        lr=group["lr"],
        beta1=beta1,
        beta2=beta2,
        weight_decay=group["weight_decay"],
        eps=group["eps"],
        maximize=group["maximize"],
        grad_scale=None,
        found_inf=None,
    )


def _sgd(group: Group, parameters: list[Tensor], gradients: list[Tensor], state: tuple[list[Tensor], ...]) -> None:
    torch._fused_sgd_(
        parameters,
        gradients,
        state[0] if state else [],
        weight_decay=group["weight_decay"],
        momentum=group["momentum"],
        lr=group["lr"],
        dampening=group["dampening"],
        nesterov=group["nesterov"],
        maximize=group["maximize"],
        is_first_step=False,
        grad_scale=None,
        found_inf=None,
    )


def is_known(optimizer: Optimizer) -> bool:
    """Whether its step is one call of a kernel for each group: fused, on one device, in one dtype, and torch's own."""
    if type(optimizer) not in (Adam, AdamW, SGD):
        return False
    patched = vars(optimizer).get("step")
    if patched is not None and not hasattr(patched, "_wrapped_by_lr_sched"):
        return False
    return all(_is_plain(group) for group in optimizer.param_groups)


def _is_plain(group: Group) -> bool:
    parameters = group["params"]
    kinds = {(parameter.device, parameter.dtype) for parameter in parameters}
    return (
        bool(group["fused"])
        and len(kinds) == 1
        and not any(isinstance(parameter, DTensor) for parameter in parameters)
        and not any(group.get(name) for name in ("amsgrad", "capturable", "differentiable"))
        and not any(isinstance(beta, Tensor) for beta in group.get("betas", ()))
    )
