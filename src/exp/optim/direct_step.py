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

from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor
from torch._C._autograd import _profiler_enabled
from torch.distributed.tensor import DTensor
from torch.optim import SGD, Adam, AdamW, Optimizer
from torch.optim.optimizer import _global_optimizer_post_hooks, _global_optimizer_pre_hooks

Group = dict[str, Any]


class DirectStep:
    """Called, it makes a step of an optimizer, bit for bit the one of `optimizer.step()`.

    Where that has more to do than its kernel (the first step, a parameter without a gradient, hooks of the optimizer, a
    profiler that looks for its steps), it is what is called.
    """

    def __init__(self, optimizer: Optimizer) -> None:
        self.optimizer = optimizer
        self._is_known = is_known(optimizer)
        self._kernel = self._sgd if type(optimizer) is SGD else self._adam
        self._state: Mapping[Tensor, object] | None = None
        self._groups: list[tuple[Group, list[Tensor], tuple[list[Tensor], ...]]] = []

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
            states = [optimizer.state.get(parameter, {}) for parameter in parameters]
            names: tuple[str, ...] = ("exp_avg", "exp_avg_sq", "step")
            if type(optimizer) is SGD:
                names = ("momentum_buffer",) if group["momentum"] else ()
            if any(state.get(name) is None for state in states for name in names):
                return  # a parameter that had no gradient yet
            self._groups.append((group, parameters, tuple([state[name] for state in states] for name in names)))
        self._state = optimizer.state

    @staticmethod
    def _adam(group: Group, parameters: list[Tensor], gradients: list[Tensor], state: tuple[list[Tensor], ...]) -> None:
        averages, squares, steps = state
        torch._foreach_add_(steps, 1)
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

    @staticmethod
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
