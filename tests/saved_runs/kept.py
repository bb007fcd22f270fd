"""Callback that saves the trained weights of the process. Tests copy this file next to a conf."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Kept(Callback):
    """Callback that writes the state dict of the network at the end of training."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.network.state_dict(), "kept.pt")
