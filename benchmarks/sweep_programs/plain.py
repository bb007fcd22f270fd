"""Sweep with Hydra's basic launcher and a plain Lightning script, as the documentation of Hydra and Lightning shows.

    python plain.py -m data=digits.pt network=mlp epochs=10 lr=1e-3,3e-3 seed=0,1 [threads=1]

Progress bar, model summary and sanity check are off, which makes it faster.
"""

from __future__ import annotations

import time
from typing import Any

import hydra
import lightning as L
import torch
from hydra.core.config_store import ConfigStore
from hydra.core.hydra_config import HydraConfig
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers import TensorBoardLogger
from omegaconf import DictConfig
from parts import loaders, network, note
from torch import Tensor
from torch.nn import functional

ConfigStore.instance().store(
    "plain", {"data": "???", "network": "mlp", "epochs": 10, "lr": 1e-3, "seed": 0, "threads": None}
)


class Classifier(L.LightningModule):
    def __init__(self, *, name: str, lr: float) -> None:
        super().__init__()
        self.network, self.lr = network(name), lr

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        inputs, target = batch
        loss = functional.cross_entropy(self.network(inputs), target)
        self.log("loss/train", loss)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "val")

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._evaluate(batch, "test")

    def _evaluate(self, batch: Any, stage: str) -> None:
        inputs, target = batch
        output = self.network(inputs)
        self.log(f"loss/{stage}", functional.cross_entropy(output, target))
        self.log(f"accuracy/{stage}", (output.argmax(1) == target).float().mean())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.AdamW(self.parameters(), lr=self.lr)


@hydra.main(version_base="1.3", config_path=None, config_name="plain")
def main(config: DictConfig) -> float:
    began = time.time()
    if config.threads:
        torch.set_num_threads(config.threads)
    L.seed_everything(config.seed, verbose=False)
    folder = HydraConfig.get().runtime.output_dir
    training, validation, test = loaders(config.data)
    checkpoint = ModelCheckpoint(monitor="loss/val", save_last=True, dirpath=f"{folder}/checkpoints")
    trainer = L.Trainer(
        max_epochs=config.epochs, accelerator="cpu", devices=1, logger=TensorBoardLogger(folder, name=""),
        callbacks=[checkpoint], enable_progress_bar=False, enable_model_summary=False, num_sanity_val_steps=0,
    )  # fmt: skip
    module = Classifier(name=config.network, lr=config.lr)
    trainer.fit(module, training, validation)
    trainer.test(module, test, ckpt_path="best", verbose=False)
    assert checkpoint.best_model_score is not None
    best = float(checkpoint.best_model_score)
    accuracy = float(trainer.callback_metrics["accuracy/test"])
    note(began=began, ended=time.time(), loss=best, accuracy=accuracy)
    return best


if __name__ == "__main__":
    main()
