"""Steps of fused optimizers without torch's bookkeeping. The lists of tensors for the kernel are made only once.

AdamW with four parameters takes 40 us per step through `optimizer.step()`, and 15 us through this module, most of it in
the kernel. Without this module, a whole step of benchmarks/loop.py (an MLP 64-128-10) takes 1.16 times the processor
time (six pairs).

This module uses private names of torch (seen in 2.13, and tested):

- torch's functions `_fused_adam_`, `_fused_adamw_` and `_fused_sgd_`. Adam, AdamW and SGD with fused=True call them
  with the same arguments after counting the step.
- `_opt_called`, which schedules read to check that the optimizer has stepped before them.
- `_wrapped_by_lr_sched`, the mark of schedules on the method `step`.
- `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_global_optimizer_pre_hooks` and
  `_global_optimizer_post_hooks`.

It also relies on `load_state_dict` replacing `optimizer.state`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

from exp.optim.parameter_groups import Group

# A function that calls a kernel with a group, its parameters, their gradients and their state. The state already counts
# this step.
Kernel = Callable[[Group, list[Tensor], list[Tensor], tuple[list[Tensor], ...]], None]


@dataclass(frozen=True)
class _Call:
    """The arguments of a kernel call for one parameter group.

    Attributes:
        places: The positions of the group's parameters among the parameters of DirectSteps.
    """

    kernel: Kernel
    group: Group
    parameters: list[Tensor]
    state: tuple[list[Tensor], ...]
    places: Sequence[int]


class DirectSteps:
    """Callable that steps several optimizers, with the same result as `optimizer.step()`, bit for bit.

    The step counts of all parameters are views of one tensor, because torch increments each count separately, which
    takes 4 us per parameter. The optimizers must have no hooks. The first step, and every step of an optimizer that is
    not supported, call `optimizer.step()`.

    Args:
        optimizers: The optimizers.
        parameters: The parameters of each optimizer, in the order of the gradients.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[Tensor]]) -> None:
        self._optimizers, self._parameters = list(optimizers), [list(one) for one in parameters]
        # The kernel calls of each optimizer; empty if `optimizer.step()` is called instead. None before the first step.
        self._calls: list[list[_Call]] | None = None
        self._counts: Tensor | None = None

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Step all optimizers.

        Args:
            gradients: The gradients of each optimizer's parameters.
        """
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
            # Without this mark, a schedule would warn that it steps before its optimizer.
            vars(optimizer)["_opt_called"] = True
            with torch.no_grad():
                for call in known:
                    call.kernel(call.group, call.parameters, [own[place] for place in call.places], call.state)
        if self._calls is None:
            self.collect()

    def collect(self) -> bool:
        """Prepare the kernel calls of each optimizer, and make all step counts views of one tensor.

        Returns:
            Whether kernel calls step all optimizers from the next step.
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
    """Callable that steps one optimizer, with the same result as `optimizer.step()`, bit for bit.

    `optimizer.step()` is called if the kernel alone is not enough. This is the case in the first step, if a gradient is
    missing, or with a loss scale or a hook. Between two steps, only gradients and settings of groups may change.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._groups = len(optimizer.param_groups)
        self._parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        self._steps = DirectSteps([optimizer], [self._parameters])
        # The state object that contains the tensors of the kernel calls.
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
        """Return the gradients of all parameters; None if `optimizer.step()` must be called."""
        optimizer = self.optimizer
        if optimizer.state is not self._state or len(optimizer.param_groups) != self._groups:
            return None
        # If `found_inf` is set, the device may skip the step (precision/scaler.py).
        if (
            optimizer._optimizer_step_pre_hooks
            or optimizer._optimizer_step_post_hooks
            or "found_inf" in vars(optimizer)
        ):
            return None
        if _global_optimizer_pre_hooks or _global_optimizer_post_hooks:
            return None
        found = []
        for parameter in self._parameters:
            if parameter.grad is None:
                return None
            found.append(parameter.grad)
        return found


def _calls_of(optimizer: Optimizer, parameters: Sequence[Tensor]) -> list[_Call]:
    """Return the kernel calls of an optimizer's step; empty if `optimizer.step()` must be called."""
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
    """Return the state tensors of a group for the kernel; None if a parameter has no state yet."""
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
    """Return whether a step of the optimizer is one kernel call per group.

    This requires a fused optimizer of torch's own class, and one device and dtype per group.
    """
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
