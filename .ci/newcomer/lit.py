"""LightningModule and LightningDataModule in the form of lightning-hydra-template."""

import lightning.pytorch as pl
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.utils.data import DataLoader, TensorDataset, random_split


class Net(nn.Module):
    def __init__(self, hidden: int = 64) -> None:
        super().__init__()
        self.layers = nn.Sequential(nn.Flatten(), nn.Linear(64, hidden), nn.ReLU(), nn.Linear(hidden, 10))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.layers(inputs)


class LitNet(pl.LightningModule):
    def __init__(self, net: nn.Module, optimizer, scheduler=None) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net

    def _step(self, batch, stage: str) -> torch.Tensor:
        inputs, target = batch
        scores = self.net(inputs)
        loss = nn.functional.cross_entropy(scores, target)
        accuracy = (scores.argmax(1) == target).float().mean()
        self.log_dict({f"{stage}/loss": loss, f"{stage}/acc": accuracy}, prog_bar=True, sync_dist=stage != "train")
        return loss

    def training_step(self, batch, batch_idx: int) -> torch.Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch, batch_idx: int) -> None:
        self._step(batch, "val")

    def test_step(self, batch, batch_idx: int) -> None:
        self._step(batch, "test")

    def configure_optimizers(self):
        optimizer = self.hparams.optimizer(params=self.parameters())
        if self.hparams.scheduler is None:
            return optimizer
        return {"optimizer": optimizer, "lr_scheduler": self.hparams.scheduler(optimizer=optimizer)}


class LitDigits(pl.LightningDataModule):
    def __init__(self, batch_size: int = 64, num_workers: int = 0) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)

    def setup(self, stage: str) -> None:
        found = load_digits()
        inputs, target = torch.tensor(found.images, dtype=torch.float32) / 16, torch.tensor(found.target)
        generator = torch.Generator().manual_seed(0)
        self.parts = random_split(TensorDataset(inputs, target), [0.7, 0.15, 0.15], generator=generator)

    def _loader(self, part: int) -> DataLoader:
        options = {"batch_size": self.hparams.batch_size, "num_workers": self.hparams.num_workers}
        return DataLoader(self.parts[part], shuffle=part == 0, **options)

    def train_dataloader(self) -> DataLoader:
        return self._loader(0)

    def val_dataloader(self) -> DataLoader:
        return self._loader(1)

    def test_dataloader(self) -> DataLoader:
        return self._loader(2)
