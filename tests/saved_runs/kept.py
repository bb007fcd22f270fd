"""A callback that keeps what was trained, as it stands in the process; the tests copy this beside a conf."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer


class Kept(Callback):
    """Writes the state of the network at the end of training."""

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        torch.save(pl_module.network.state_dict(), "kept.pt")
