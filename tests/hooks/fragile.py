"""A layer with nan or inf at one forward in training, for the tests of nan_guard."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from exp.hooks.hook import Hook


class Fragile(nn.Module):
    """Layer that returns its input, except in training forward number `at`, counted from 1.

    With where="forward", the output of this forward is nan. With where="backward", the output is right, and the
    gradient is infinite, as that of a square root at 0.
    """

    def __init__(self, *, at: int, where: str = "forward") -> None:
        super().__init__()
        self.at, self.where = at, where
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.seen += 1
        is_now = (self.seen == self.at) & self.training
        if self.where == "forward":
            return x * torch.where(is_now, torch.nan, 1.0)
        eps = torch.where(is_now, 0.0, 1.0)
        return x + torch.sqrt(x * 0 + eps) - eps


class Keeper(Callback):
    """Callback that writes weights and optimizer state after an exception."""

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        states = [optimizer.state_dict() for optimizer in trainer.optimizers]
        kept = {"step": trainer.global_step, "network": pl_module.network.state_dict(), "optimizers": states}
        torch.save(kept, Path(trainer.default_root_dir) / "kept.pt")


class Broken(Hook):
    """Transforming hook with infinite gradients at any loss scale."""

    transforms = True

    def forward(self, name: str, module: nn.Module, inputs: Any, output: Tensor) -> Tensor | None:
        return output + torch.sqrt(output * 0) if name == "fragile" else None
