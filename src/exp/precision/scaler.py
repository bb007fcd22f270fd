"""torch's gradient scaler, and what it keeps to itself: whether the last step was skipped, and how many were."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.optim import Optimizer


class CountingScaler(torch.amp.GradScaler):
    """A torch.amp.GradScaler that counts the steps it skips because a gradient was infinite or not a number.

    The counts stay on the scaler's device: reading one waits for the device, keeping them does not.
    Relies on `_found_inf_per_device(optimizer)` and `_scale` of torch.amp.GradScaler, seen in torch 2.13.
    """

    def __init__(self, **settings: Any) -> None:
        super().__init__(**settings)
        self._last_skipped: Tensor | None = None
        self._skipped: Tensor | int = 0

    def step(self, optimizer: Optimizer, *args: Any, **kwargs: Any) -> float | None:
        result = super().step(optimizer, *args, **kwargs)
        if self.is_enabled():
            found = self._found_inf_per_device(optimizer).values()
            self._last_skipped = torch.stack([tensor.to(self._scale.device) for tensor in found]).amax()
            self._skipped = self._skipped + self._last_skipped
        return result

    @property
    def last_step_skipped(self) -> bool:
        """Whether the optimizer left the parameters alone at the last step."""
        return self._last_skipped is not None and bool(self._last_skipped.item())

    @property
    def skipped_steps(self) -> Tensor | float:
        """Steps skipped so far, before a resume included: 0-d on the scaler's device, or a float before the first."""
        return self._skipped.detach() if isinstance(self._skipped, Tensor) else float(self._skipped)

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
        super().load_state_dict(state)
