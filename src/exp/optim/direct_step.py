"""Steps of fused optimizers that call torch's kernels directly, with lists of tensors that are made only once.

For AdamW with four parameters, a step takes 40 us by `optimizer.step()`, and 15 us by this module, most of it in the
kernel. A whole training step of benchmarks/loop.py (an MLP 64-128-10) takes 1.16 times as much processor time without
this module (six pairs of runs).

This module uses private names of torch (seen in 2.13, and tested):

- torch's functions `_fused_adam_`, `_fused_adamw_` and `_fused_sgd_`. Adam, AdamW and SGD with fused=True increment
  the step count and then call these functions with the same arguments.
- `_opt_called`, which a schedule reads to check that the optimizer has stepped before the schedule.
- `_wrapped_by_lr_sched`, an attribute that a schedule sets on the method `step` of the optimizer.
- `_optimizer_step_pre_hooks`, `_optimizer_step_post_hooks`, `_global_optimizer_pre_hooks` and
  `_global_optimizer_post_hooks`.

The module also relies on `load_state_dict`, which must replace the object `optimizer.state`.
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

# A function that calls a kernel. Its arguments are a parameter group, and the group's parameters, gradients and state
# tensors. The step count in the state already includes the current step.
Kernel = Callable[[Group, list[Tensor], list[Tensor], tuple[list[Tensor], ...]], None]


@dataclass(frozen=True)
class _Call:
    """The kernel and its arguments for a parameter group of an optimizer.

    Attributes:
        kernel: The function that calls the kernel.
        group: The parameter group, with the options of the optimizer.
        parameters: The parameters of the group.
        state: For each kind of state, such as exp_avg, the tensors of all parameters.
        places: The indices of the group's parameters in the list of the optimizer's parameters.
    """

    kernel: Kernel
    group: Group
    parameters: list[Tensor]
    state: tuple[list[Tensor], ...]
    places: Sequence[int]


class DirectSteps:
    """Callable that steps several optimizers. The result is bit for bit that of `optimizer.step()`.

    The step counts of all parameters are views of a single tensor, so that a step increments only this tensor. torch
    increments each count separately, which takes 4 us per parameter.

    The first step calls `optimizer.step()`. For an optimizer without support, every step calls `optimizer.step()`.

    Args:
        optimizers: The optimizers. They must have no hooks.
        parameters: The parameters of each optimizer, in the order in which gradients are passed.
    """

    def __init__(self, optimizers: Sequence[Optimizer], parameters: Sequence[Sequence[Tensor]]) -> None:
        self._optimizers, self._parameters = list(optimizers), [list(one) for one in parameters]
        # The kernel calls of each optimizer. An empty list means that `optimizer.step()` is called. None before the
        # first step.
        self._calls: list[list[_Call]] | None = None
        self._counts: Tensor | None = None

    def __call__(self, gradients: Sequence[Sequence[Tensor]]) -> None:
        """Step all optimizers.

        Args:
            gradients: For each optimizer, the gradients of its parameters.
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
            True if the next steps of all optimizers call kernels. False if an optimizer needs `optimizer.step()`.
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
    """Callable that steps an optimizer. The result is bit for bit that of `optimizer.step()`.

    `optimizer.step()` is called in the first step, if a gradient is missing, and if there is a loss scale or a hook.
    Other steps call the kernel directly. Between two steps, only gradients and options of groups may change.

    Args:
        optimizer: The optimizer.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._groups = len(optimizer.param_groups)
        self._parameters: list[Tensor] = [one for group in optimizer.param_groups for one in group["params"]]
        self._steps = DirectSteps([optimizer], [self._parameters])
        # The object `optimizer.state` from which the tensors of the kernel calls were taken. None without kernel calls.
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
        """Return the gradients of all parameters. Return None if the step must call `optimizer.step()`."""
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
    """Return the kernel calls of an optimizer's step. The list is empty if the step must call `optimizer.step()`."""
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
    """Return the state tensors of a group for the kernel. Return None if a parameter has no state yet."""
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
    """Return whether a step of an optimizer consists of a single kernel call per parameter group.

    This requires a fused Adam, AdamW or SGD of torch, not a subclass. All parameters of a group must have the same
    device and dtype.
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
