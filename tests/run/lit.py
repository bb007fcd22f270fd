"""LightningModules and LightningDataModules of a user, which test_own_module.py copies next to a conf."""

from __future__ import annotations

import os
import signal
from typing import Any

import lightning.pytorch as pl
import torch
from torch import nn
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import MulticlassAccuracy


def samples(count: int, *, seed: int = 0) -> TensorDataset:
    generator = torch.Generator().manual_seed(seed)
    inputs = torch.randn(count, 6, generator=generator)
    return TensorDataset(inputs, (inputs.sum(1) > 0).long())


class LitNet(pl.LightningModule):
    """Module with one optimizer, dropout, noise on each batch, and a counter in its checkpoints."""

    def __init__(
        self,
        width: int = 8,
        lr: float = 0.1,
        dropout: float = 0.0,
        inputs: int = 6,
        classes: int = 2,
        jitter: float = 0.0,
    ) -> None:
        super().__init__()
        self.save_hyperparameters()
        self.net = nn.Sequential(
            nn.Flatten(), nn.Linear(inputs, width), nn.ReLU(), nn.Dropout(dropout), nn.Linear(width, classes)
        )
        self.batches_seen = 0

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        inputs, target = batch
        return inputs + self.hparams.jitter * torch.randn_like(inputs), target

    def _loss(self, batch: Any) -> torch.Tensor:
        inputs, target = batch
        return nn.functional.cross_entropy(self.net(inputs), target)

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss = self._loss(batch)
        self.batches_seen += 1
        self.log("train/loss", loss, prog_bar=True, on_step=True, on_epoch=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self._loss(batch), sync_dist=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self.log("test/loss", self._loss(batch), sync_dist=True)

    def configure_optimizers(self) -> Any:
        optimizer = torch.optim.SGD(self.parameters(), lr=self.hparams.lr, momentum=0.9)
        schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=7, gamma=0.5)
        return {"optimizer": optimizer, "lr_scheduler": {"scheduler": schedule, "interval": "step"}}

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["batches_seen"] = self.batches_seen

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.batches_seen = checkpoint["batches_seen"]


class LitClassifier(pl.LightningModule):
    """Module with network, optimizer and schedule as arguments, as in lightning-hydra-template."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        stages = ("train", "val", "test")
        self.loss = nn.ModuleDict({f"{stage}_loss": MeanMetric() for stage in stages})
        self.acc = nn.ModuleDict(
            {f"{stage}_acc": MulticlassAccuracy(num_classes=10, average="micro") for stage in stages}
        )
        self.val_acc_best = MaxMetric()

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def _step(self, batch: Any, stage: str) -> torch.Tensor:
        inputs, target = batch
        scores = self.net(inputs)
        loss = nn.functional.cross_entropy(scores, target)
        mean, accuracy = self.loss[f"{stage}_loss"], self.acc[f"{stage}_acc"]
        mean(loss)
        accuracy(scores.argmax(1), target)
        self.log(f"{stage}/loss", mean, on_step=False, on_epoch=True, prog_bar=True)
        self.log(f"{stage}/acc", accuracy, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._step(batch, "train")

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "val")

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.acc["val_acc"].compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        self._step(batch, "test")

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        schedule = {"scheduler": self.hparams.scheduler(optimizer=optimizer), "monitor": "val/loss", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, "interval": "epoch"}}


class SimpleNet(nn.Module):
    def __init__(self, input_size: int = 64, hidden: int = 16, output_size: int = 10) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(input_size, hidden), nn.ReLU(), nn.Linear(hidden, output_size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs.flatten(1))


class LitGan(pl.LightningModule):
    """GAN with manual optimization of two optimizers and schedules; one optimizer steps twice in every second batch."""

    def __init__(self, lr: float = 0.05) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.generator = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Dropout(0.1), nn.Linear(8, 6))
        self.discriminator = nn.Sequential(nn.Linear(6, 8), nn.Tanh(), nn.Linear(8, 1))
        self.lr = lr

    def training_step(self, batch: Any, batch_idx: int) -> None:
        real, first, second = batch[0], *self.optimizers()
        noise = torch.randn(len(real), 3, dtype=real.dtype)
        self.toggle_optimizer(first)
        fooled = nn.functional.softplus(-self.discriminator(self.generator(noise))).mean()
        first.zero_grad()
        self.manual_backward(fooled)
        first.step()
        self.untoggle_optimizer(first)
        self.toggle_optimizer(second)
        for _ in range(1 + batch_idx % 2):
            made = self.generator(noise).detach()
            loss = nn.functional.softplus(-self.discriminator(real)) + nn.functional.softplus(self.discriminator(made))
            second.zero_grad()
            self.manual_backward(loss.mean())
            second.step()
        self.untoggle_optimizer(second)
        for schedule in self.lr_schedulers():
            schedule.step()
        self.log_dict({"generator": fooled, "discriminator": loss.mean()})

    def configure_optimizers(self) -> Any:
        first = torch.optim.Adam(self.generator.parameters(), lr=self.lr, betas=(0.5, 0.9))
        second = torch.optim.SGD(self.discriminator.parameters(), lr=self.lr, momentum=0.9)
        schedules = [torch.optim.lr_scheduler.ExponentialLR(one, 0.99) for one in (first, second)]
        return [first, second], schedules


class LitData(pl.LightningDataModule):
    """Data module that adds noise in its collate function, and shuffles in the loader."""

    def __init__(
        self, batch_size: int = 8, count: int = 50, shuffle: bool = True, workers: int = 0, noise: float = 0.0
    ):
        super().__init__()
        self.save_hyperparameters()
        self.prepared = 0

    def setup(self, stage: str) -> None:
        self.train, self.val = samples(self.hparams.count), samples(20, seed=1)

    def _collate(self, found: Any) -> Any:
        inputs, target = (torch.stack(part) for part in zip(*found, strict=True))
        return inputs + self.hparams.noise * torch.randn_like(inputs), target

    def train_dataloader(self) -> Any:
        return DataLoader(
            self.train,
            batch_size=self.hparams.batch_size,
            shuffle=self.hparams.shuffle,
            num_workers=self.hparams.workers,
            collate_fn=self._collate,
        )

    def val_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)

    def test_dataloader(self) -> Any:
        return DataLoader(self.val, batch_size=self.hparams.batch_size)


class BreakOff(pl.Callback):
    """Callback that raises an error after a number of batches."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("broken off")


class LitRenamed(LitNet):
    """Module that renames its layers in setup, as torch.compile does."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(self.net)


class LitGiven(LitNet):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train/loss", loss := self._loss(batch))
        return loss


class Untrained(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()


class WithLoaders(LitNet):
    def train_dataloader(self) -> Any:
        return LitData().train_dataloader()


class LitDrawing(LitNet):
    """Module that logs with self.log_dict and with the logger's writer, as Lightning's documentation shows."""

    def on_validation_epoch_end(self) -> None:
        self.log_dict({"val/a": 1.0, "val/b": 2.0})
        self.logger.experiment.add_histogram("weights", self.net[1].weight, self.global_step)


class Draws(pl.Callback):
    def on_train_epoch_end(self, trainer: pl.Trainer, pl_module: pl.LightningModule) -> None:
        trainer.logger.experiment.add_image("pixels", torch.rand(3, 4, 4), trainer.global_step)
        pl_module.log("mine", 3.0)


class Interrupt(BreakOff):
    """Callback that sends SIGINT after a number of batches, as Ctrl-C does."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)


class LitEmpty(LitData):
    def train_dataloader(self) -> Any:
        return DataLoader(NoSample(), batch_size=8)


class NoSample(IterableDataset):
    def __iter__(self) -> Any:
        return iter(())


class LitNoOptimizer(LitNet):
    def configure_optimizers(self) -> None:
        return None


class LitNoLoss(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        super().training_step(batch, batch_idx)


class LitNoSuper(LitNet):
    def __init__(self) -> None:
        self.width = 3


class LitNan(LitNet):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return (super().training_step(batch, batch_idx) - 1e6).sqrt()


class LitAdds(LitNet):
    """Module that adds an object to its checkpoints, which cannot be read safely."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"net": self.net}
