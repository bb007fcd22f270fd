"""A layer and a callback that give one optimizer step gradients with nan or inf. Configs of tests use them."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback
from torch import Tensor, nn

from exp.nested import tensors_in


class Spoils(nn.Module):
    """Layer that returns its input, and adds `value` to the gradient while `active`."""

    active, value = False, float("nan")

    def forward(self, x: Tensor) -> Tensor:
        if Spoils.active and x.requires_grad:
            x.register_hook(lambda gradient: gradient + Spoils.value)
        return x


class Spoiler(Callback):
    """Callback that activates `Spoils` the first `times` times that optimizer step `at` begins.

    It reads the checkpoints in `directory` before each step, because later checkpoints replace them.
    """

    at, times = 1, 1
    directory = Path()

    def __init__(self) -> None:
        self._read: set[tuple[Path, int]] = set()

    def on_train_batch_start(self, trainer: Any, *_: object) -> None:
        for path in Spoiler.directory.glob("*.ckpt"):
            with contextlib.suppress(FileNotFoundError):  # a thread may remove old checkpoints
                version = (path, path.stat().st_mtime_ns)
                if version not in self._read:
                    self._read.add(version)
                    assert is_finite(torch.load(path, weights_only=True)), path
        if trainer.global_step + 1 == Spoiler.at and Spoiler.times:
            Spoils.active = True

    def on_train_batch_end(self, trainer: Any, *_: object) -> None:
        if Spoils.active and trainer.global_step >= Spoiler.at:
            self._deactivate()

    def on_exception(self, *_: object) -> None:
        # A nan loss ends the step before on_train_batch_end.
        if Spoils.active:
            self._deactivate()

    def _deactivate(self) -> None:
        Spoils.active = False
        Spoiler.times -= 1


def is_finite(state: Any) -> bool:
    return all(bool(torch.isfinite(tensor).all()) for tensor in tensors_in(state) if tensor.is_floating_point())
