"""Gradient scaler that counts skipped steps on the device, without waiting for the device.

This module uses private names of torch 2.13: `_found_inf_per_device(optimizer)`, `_unscale_grads_`, `_scale` and
`_device` of torch.amp.GradScaler, and `_step_supports_amp_scaling` of fused optimizers. Tests check these names.

The step of a fused optimizer reads the attributes `grad_scale` and `found_inf`, which GradScaler sets before the step
and removes after it. `found_inf` is a 0-d float32 tensor. If it is not 0, the step changes neither parameters nor
state.
"""

from __future__ import annotations

from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.optim import SGD, Optimizer

State = dict[str, Any]


class CountingScaler(torch.amp.GradScaler):
    """torch.amp.GradScaler that counts the steps that it skips because a gradient is infinite or nan.

    The counts are tensors on the scaler's device. Counting does not wait for the device, but reading a count does.
    `step` first unscales gradients that are still scaled, also for fused optimizers.

    On a pipeline rank, an optimizer may have no gradient or no parameter. Such an optimizer does not step, but the rank
    takes part in the decision of all ranks whether to skip the step.

    Attributes:
        scales: Whether the loss is multiplied by the scale.
    """

    scales = True

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._skips: WeakKeyDictionary[Optimizer, Tensor] = WeakKeyDictionary()
        self._unscaled: WeakKeyDictionary[Optimizer, bool] = WeakKeyDictionary()
        self._skipped: Tensor | int = 0
        self._taken: Tensor | int = 0
        self._group: ProcessGroup | None = None

    def agree_over(self, group: ProcessGroup | None) -> None:
        """Make all ranks of a process group skip a step if one of the ranks finds a non-finite gradient.

        The ranks have different parts of one model. All ranks must call unscale_ and step in the same order, because
        `found_inf` is reduced over the ranks.

        Args:
            group: Process group. None: each rank decides alone.
        """
        self._group = group

    def unscale_(self, optimizer: Optimizer) -> None:
        if not self.is_enabled():
            return
        if self._scale is None:
            # On a pipeline rank without the loss, the scale is not initialized yet. The rank may also have no trained
            # parameter.
            held = (p.device for group in optimizer.param_groups for p in group["params"])
            self.scale(torch.zeros((), device=next(held, self._device)))
        super().unscale_(optimizer)
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        device = self._scale_device()
        if not found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        if self._group is not None:
            worst = torch.stack([tensor.to(device) for tensor in found.values()]).amax()
            all_reduce(worst, op=ReduceOp.MAX, group=self._group)
            for tensor in found.values():
                tensor.copy_(worst)
        self._unscaled[optimizer] = True

    def step(self, optimizer: Optimizer, *args: object, **kwargs: object) -> float | None:
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)
        known = len(optimizer.state)
        has_parameters = any(group["params"] for group in optimizer.param_groups)
        # A fused step needs at least one parameter, and a rank may have no trained parameter.
        result = super().step(optimizer, *args, **kwargs) if has_parameters else None
        found = self._found_inf_per_device(optimizer).values()
        skip = torch.stack([tensor.to(self._scale_device()) for tensor in found]).amax()
        self._skips[optimizer] = skip
        self._skipped = self._skipped + skip
        self._taken = self._taken + (1 - skip)
        if type(optimizer) is SGD and len(optimizer.state) > known and bool(skip):
            # If the first step of fused SGD is skipped, the momentum that the step created by empty_like is not
            # initialized (torch 2.13). Only this step is checked, because the check waits for the device.
            for parameter in list(optimizer.state)[known:]:
                del optimizer.state[parameter]
        return result

    def _scale_device(self) -> torch.device:
        assert self._scale is not None, "a loss is scaled before a gradient is unscaled"
        return self._scale.device

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled or new_scale is not None:
            super().update(new_scale)
            self._unscaled.clear()

    def has_skipped(self, optimizer: Optimizer) -> bool:
        """Return whether the last step of an optimizer was skipped. The call waits until the device has finished."""
        return optimizer in self._skips and bool(self._skips[optimizer].item())

    @property
    def skipped_steps(self) -> Tensor | float:
        """Number of steps skipped so far, including the steps before a resume.

        The number is a 0-d tensor on the scaler's device, or a float before the first step.
        """
        return self._skipped.detach() if isinstance(self._skipped, Tensor) else float(self._skipped)

    @property
    def taken_steps(self) -> Tensor | int:
        """Number of steps of this process that were not skipped.

        The number is a 0-d tensor on the scaler's device, or 0 before the first step.
        """
        return self._taken

    @property
    def loss_scale(self) -> Tensor | float:
        """Factor by which the loss is multiplied.

        The factor is a 0-d tensor on the scaler's device, or a float before the first step.
        """
        if not self.is_enabled() or self._scale is None:
            return self.get_scale()
        # The scale is cloned, because the scaler updates it in place, and recorded values must not change.
        return self._scale.detach().clone()

    def state_dict(self) -> State:
        return {**super().state_dict(), "skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: State) -> None:
        state = dict(state_dict)
        self._skipped = state.pop("skipped_steps")
        if state:  # the saved run had a scale
            super().load_state_dict(state)


class FiniteSteps(CountingScaler):
    """Gradient scaler with the constant scale 1, which skips and counts steps with non-finite gradients."""

    scales = False

    def __init__(self, *, device: str) -> None:
        super().__init__(device=device, init_scale=1.0)

    def scale(self, outputs: Any) -> Any:
        if self._scale is None:
            super().scale(outputs.detach())
        return outputs

    def _unscale_grads_(
        self, optimizer: Optimizer, inv_scale: Tensor, found_inf: Tensor, allow_fp16: bool
    ) -> dict[torch.device, Tensor]:
        # Gradients of float16 parameters are allowed, because the scale is 1.
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled:
            super().update(1.0)

    def state_dict(self) -> State:
        return {"skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: State) -> None:
        super().load_state_dict({"skipped_steps": state_dict["skipped_steps"]})
