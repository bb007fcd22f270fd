"""Steps of fused optimizers without the bookkeeping around the kernel: lists of the state are made once, not per step.

AdamW with four parameters: 40 us per step through `optimizer.step()`, 15 us here, most of it in the kernel. A whole
step of benchmarks/loop.py (an MLP 64-128-10) takes 1.16 times the processor time without it (six pairs).

Private names of torch (seen in 2.13, and tested): `torch._fused_adam_`, `torch._fused_adamw_` and `torch._fused_sgd_`,
which Adam, AdamW and SGD with fused=True call with these arguments after counting the step; `_opt_called`, which
schedules read to see that the optimizer stepped first, and `_wrapped_by_lr_sched`, their mark on `step`;
`_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_global_optimizer_pre_hooks` and
`_global_optimizer_post_hooks`; `_profiler_enabled` of torch.autograd. `load_state_dict` replaces `optimizer.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from exp.optim.parameter_groups import Group

# A kernel takes a group, its parameters, their gradients and their state, in which this step is already counted.
Kernel = Callable[[Group, list[Tensor], list[Tensor], tuple[list[Tensor], ...]], None]


@dataclass(frozen=True)
class _Call:
    """A kernel's call for one group. places: indices of the group's parameters among those of DirectSteps."""

    kernel: Kernel
    group: Group
    parameters: list[Tensor]
    state: tuple[list[Tensor], ...]
    places: Sequence[int]


class DirectSteps:
    """Callable that steps several optimizers, bit for bit like `optimizer.step()`.

    The step counts of all parameters are one tensor: torch increments each one separately, 4 us per parameter. The
    optimizers must have no hooks. The first step, and the steps of an unknown optimizer, call `optimizer.step()`.

    Args:
        optimizers: The optimizers.
        parameters: The parameters of each optimizer, in the order of the gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[Tensor]]) -> None:
        self._optimizers, self._parameters = list(optimizers), [list(one) for one in parameters]
        # The calls of each optimizer; empty if it steps itself. None before the first step.
        self._calls: list[list[_Call]] | None = None
        self._counts: Tensor | None = None

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Step with the gradients of each optimizer's parameters."""
        calls = self._calls
        if calls is None:
            calls = [[] for _ in self._optimizers]
        elif self._counts is not None:
            self._counts.add_(1)
        for place, (optimizer, known, own) in enumerate(zip(self._optimizers, calls, gradients, strict=True)):
            if not known:
                for parameter, gradient in zip(self._parameters[place], own, strict=True):
                    parameter.grad = gradient
                optimizer.step()
                continue
            # A schedule warns if it steps before its optimizer.
            vars(optimizer)["_opt_called"] = True
            with torch.no_grad():
                for call in known:
                    call.kernel(call.group, call.parameters, [own[place] for place in call.places], call.state)
        if self._calls is None:
            self.collect()

    def collect(self) -> bool:
        """Look up the state of each optimizer, and make all step counts views of one tensor.

        Returns:
            Whether the kernels step all optimizers from now on.
        """
        self._calls = list(map(_calls_of, self._optimizers, self._parameters))
        held = [
            (optimizer.state[parameter], call.state[2], number)
            for optimizer, calls in zip(self._optimizers, self._calls, strict=True)
            for call in calls
            if call.kernel is _adam
            for number, parameter in enumerate(call.parameters)
        ]
        self._counts = torch.stack([state["step"] for state, _, _ in held]) if held else None
        for (state, counts, number), view in zip(held, [] if self._counts is None else self._counts, strict=True):
            state["step"] = counts[number] = view
        return all(self._calls)


class DirectStep:
    """Callable that steps one optimizer, bit for bit like `optimizer.step()`.

    It calls `optimizer.step()` if more than the kernel is needed: at the first step, without a gradient, under a loss
    scale, with a hook or a profiler. Between two calls only gradients and settings of groups may change.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._groups = len(optimizer.param_groups)
        self._parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        self._steps = DirectSteps([optimizer], [self._parameters])
        # The state object whose tensors are in the calls.
        self._state: Mapping[Tensor, object] | None = None
        self._collect()

    def __call__(self) -> None:
        gradients = self._gradients()
        if gradients is not None:
            self._steps([gradients])
        else:
            self.optimizer.step()
            self._collect()

    def _collect(self) -> None:
        self._state = self.optimizer.state if self._is_known and self._steps.collect() else None

    def _gradients(self) -> list[Tensor] | None:
        """Return the gradients of all parameters. None if more than the kernel is needed."""
        optimizer = self.optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != self._groups:
            return None
        # With found_inf the device may skip the step (precision/scaler.py).
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or "found_inf" in vars(optimizer)
        ):
            return None
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks or _profiler_enabled():
            return None
        found = []
        for parameter in self._parameters:
            if parameter.grad is None:
                return None
            found.append(parameter.grad)
        return found


def _calls_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[_Call]:
    """Return the kernel calls of an optimizer's step. Empty if it steps itself."""
    if not is_known(optimizer):
        return []
    places = {id(parameter): place for place, parameter in enumerate(parameters)}
    found = []
    for group in optimizer.param_groups:
        state = _state_of(optimizer, group)
        if state is None:
            return []
        own = [places[id(parameter)] for parameter in group["params"]]
        kernel = _sgd if type(optimizer) is SGD else _adam
        found.append(_Call(kernel, group, list(group["params"]), state, own))
    return found


def _state_of(optimizer: Optimizer, group: Group) -> tuple[list[Tensor], ...] | None:
    """Return the kernel's state of a group. None if a parameter has no state yet."""
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
    """Return whether a step is one kernel call per group: torch's own class, fused, one device and dtype."""
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
