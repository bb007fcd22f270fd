"""Optimizer steps that the device skips under a loss scale, without waiting for the host.

Private names of torch (seen in 2.13, and tested): `_found_inf_per_device(optimizer)`, `_unscale_grads_`, `_scale` and
`_device` of torch.amp.GradScaler; `_step_supports_amp_scaling` of an optimizer that was made fused, whose step reads
the attributes `grad_scale` and `found_inf` (GradScaler sets both from what it found, and takes them off again) and
changes neither parameters nor state where `found_inf`, 0-d in float32, is not 0.
"""

from __future__ import annotations

import logging
from typing import Any
from weakref import WeakKeyDictionary

import torch
from torch import Tensor
from torch.distributed import ProcessGroup, ReduceOp, all_reduce
from torch.optim import SGD, Optimizer

log = logging.getLogger(__name__)

# The scale of the first step comes down from 65536 to 1 in 16 skips; more in a row is no search for a scale.
SKIPS_IN_A_ROW = 20
FIX = (
    "a gradient is infinite or not a number whatever the scale. Find the layer with python -m exp.precision and keep "
    "it in fp32 (precision.keep), or train in bf16"
)
UNSCALED_FIX = (
    "a gradient is infinite or not a number. Look for the layer with '+hooks=nan_guard', or lower optimizer.lr"
)


class CountingScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that counts the steps it skips because a gradient was infinite or not a number.

    The counts stay on the scaler's device: reading one waits for the device, keeping them does not. `step` unscales
    where nobody did, fused optimizers included. An optimizer without a gradient, or on a rank of a pipeline without a
    parameter, passes through, and still agrees with the others.

    scales: whether the loss is multiplied.
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
        """From now on a step that one rank of the group must skip is skipped by all: found_inf is reduced (MAX).

        For ranks that hold different parts of one model. Each must call unscale_ or step in the same order then.
        """
        self._group = group

    def unscale_(self, optimizer: Optimizer) -> None:
        if not self.is_enabled():
            return
        if self._scale is None:
            # A rank whose part of the model has no loss never scaled one; nor need it have anything to train.
            held = (p.device for group in optimizer.param_groups for p in group["params"])
            self.scale(torch.zeros((), device=next(held, self._device)))
        super().unscale_(optimizer)
        found: dict[Any, Tensor] = self._found_inf_per_device(optimizer)
        device = self._place()
        if not found:
            found[device] = torch.zeros((), dtype=torch.float32, device=device)
        if self._group is not None:
            worst = torch.stack([tensor.to(device) for tensor in found.values()]).amax()
            all_reduce(worst, op=ReduceOp.MAX, group=self._group)
            for tensor in found.values():
                tensor.copy_(worst)
        self._unscaled[optimizer] = True

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        if not self.is_enabled():
            return super().step(optimizer, *args, **kwargs)
        if optimizer not in self._unscaled:
            self.unscale_(optimizer)
        known = len(optimizer.state)
        has_parameters = any(group["params"] for group in optimizer.param_groups)
        # A fused step looks at its first parameter, and a rank may hold none that learns.
        result = super().step(optimizer, *args, **kwargs) if has_parameters else None
        found = self._found_inf_per_device(optimizer).values()
        skip = torch.stack([tensor.to(self._place()) for tensor in found]).amax()
        self._skips[optimizer] = skip
        self._skipped = self._skipped + skip
        self._taken = self._taken + (1 - skip)
        if type(optimizer) is SGD and len(optimizer.state) > known and bool(skip):
            # A fused SGD makes its momentum by empty_like and, skipped, leaves it unwritten (torch 2.13): the next step
            # would add what lay in that memory. Only at the step that makes the momentum, for it waits for the device.
            for parameter in list(optimizer.state)[known:]:
                del optimizer.state[parameter]
        return result

    def _place(self) -> torch.device:
        assert self._scale is not None, "a loss is scaled before a gradient is unscaled"
        return self._scale.device

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled or new_scale is not None:
            super().update(new_scale)
            self._unscaled.clear()

    def skipped(self, optimizer: Optimizer) -> bool:
        """Whether this optimizer left its parameters alone at its last step. Waits for the device."""
        return optimizer in self._skips and bool(self._skips[optimizer].item())

    @property
    def skipped_steps(self) -> Tensor | float:
        """Steps skipped so far, before a resume included: 0-d on the scaler's device, or a float before the first."""
        return self._skipped.detach() if isinstance(self._skipped, Tensor) else float(self._skipped)

    @property
    def taken_steps(self) -> Tensor | int:
        """Steps in this process that were not skipped: 0-d on the scaler's device, or 0 before the first."""
        return self._taken

    @property
    def loss_scale(self) -> Tensor | float:
        """The factor on the loss: 0-d on the scaler's device, or a float before the first step."""
        if not self.is_enabled() or self._scale is None:
            return self.get_scale()
        # The scaler updates its own in place; a value that waits in a buffer must not change.
        return self._scale.detach().clone()

    def state_dict(self) -> dict[str, Any]:
        return {**super().state_dict(), "skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        state = dict(state_dict)
        self._skipped = state.pop("skipped_steps")
        if state:  # of a run that had a scale
            super().load_state_dict(state)


class FiniteSteps(CountingScaler):
    """A scaler whose scale is always 1: it skips and counts steps whose gradients are not finite, and no more."""

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
        # Gradients of float16 parameters, too: there is nothing to divide them by.
        return super()._unscale_grads_(optimizer, inv_scale, found_inf, True)

    def update(self, new_scale: float | Tensor | None = None) -> None:
        if self._unscaled:
            super().update(1.0)

    def state_dict(self) -> dict[str, Any]:
        return {"skipped_steps": int(self.skipped_steps)}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        super().load_state_dict({"skipped_steps": state_dict["skipped_steps"]})


class ScaleWatch:
    """Looks at scale and skipped steps whenever they are written, and warns once.

    fix: what is said where the skips do not end.
    """

    def __init__(self, fix: str = FIX) -> None:
        self._fix = fix
        self._seen: tuple[int, float] | None = None
        self._row = 0
        self._skips = 0.0
        self._has_warned = False

    def see(self, *, step: int, loss_scale: float | None, skipped_steps: float) -> None:
        """step: of the run, counted from 1. loss_scale: None where steps are skipped without one.
        skipped_steps: of all optimizers, of which phases have several a step."""
        if self._seen is not None:
            steps, skips = step - self._seen[0], skipped_steps - self._seen[1]
            is_row = skips >= steps > 0
            self._row, self._skips = (self._row + steps, self._skips + skips) if is_row else (0, 0.0)
        self._seen = step, skipped_steps
        if self._has_warned:
            return
        if loss_scale is not None and loss_scale < 1.0:
            self._has_warned = True
            log.warning("step %d: the loss scale has fallen to %g: %s", step, loss_scale, self._fix)
        elif self._row >= SKIPS_IN_A_ROW:
            self._has_warned = True
            scale = "" if loss_scale is None else f", the loss scale is {loss_scale:g}"
            log.warning(
                "step %d: in the last %d steps optimizers skipped %d updates%s: %s",
                step, self._row, self._skips, scale, self._fix,
            )  # fmt: skip
