"""Lightning modules and a data module as people write them, for runs of `module`; the tests copy this beside a conf."""

from __future__ import annotations

import os
import signal
from functools import partial
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
    """One optimizer, a dropout, a batch that it changes on its way, and a state of its own in its checkpoints."""

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
    """In the shape of lightning-hydra-template: network, optimizer and schedule are given, metrics are its own."""

    def __init__(self, net: nn.Module, optimizer: Any, scheduler: Any, compile: bool = False) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False, ignore=["net"])
        self.net = net
        self.criterion = nn.CrossEntropyLoss()
        self.train_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.val_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.test_acc = MulticlassAccuracy(num_classes=10, average="micro")
        self.train_loss, self.val_loss, self.test_loss = MeanMetric(), MeanMetric(), MeanMetric()
        self.val_acc_best = MaxMetric()

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.net(inputs)

    def on_train_start(self) -> None:
        self.val_acc_best.reset()

    def _step(self, batch: Any) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        inputs, target = batch
        scores = self.forward(inputs)
        return self.criterion(scores, target), scores.argmax(1), target

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        loss, found, target = self._step(batch)
        self.train_loss(loss)
        self.train_acc(found, target)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, found, target = self._step(batch)
        self.val_loss(loss)
        self.val_acc(found, target)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, found, target = self._step(batch)
        self.test_loss(loss)
        self.test_acc(found, target)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True)

    def setup(self, stage: str) -> None:
        if self.hparams.compile and stage == "fit":
            self.net = torch.compile(self.net)

    def configure_optimizers(self) -> Any:
        optimizer = self.hparams.optimizer(params=self.trainer.model.parameters())
        if self.hparams.scheduler is None:
            return {"optimizer": optimizer}
        schedule = {"scheduler": self.hparams.scheduler(optimizer=optimizer), "monitor": "val/loss", "frequency": 1}
        return {"optimizer": optimizer, "lr_scheduler": {**schedule, "interval": "epoch"}}


class SimpleNet(nn.Module):
    def __init__(self, input_size: int = 64, hidden: int = 16, output_size: int = 10) -> None:
        super().__init__()
        self.model = nn.Sequential(nn.Linear(input_size, hidden), nn.ReLU(), nn.Linear(hidden, output_size))

    def forward(self, inputs: torch.Tensor) -> torch.Tensor:
        return self.model(inputs.flatten(1))


class LitGan(pl.LightningModule):
    """Two optimizers and two schedules, stepped by hand; one of them twice in some batches."""

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
    """Noise is drawn while a sample is read, the order by the loader."""

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
    """Ends a run badly behind so many batches."""

    def __init__(self, after: int = 0) -> None:
        super().__init__()
        self.left = after

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            raise RuntimeError("broken off")


class LitRenamed(LitNet):
    """Whose layers have other names behind its setup, as torch.compile gives them."""

    def setup(self, stage: str) -> None:
        self.net = nn.Sequential(self.net)


class LitGiven(LitNet):
    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        self.log("train/loss", loss := self._loss(batch))
        return loss


class LitTwo(pl.LightningDataModule):
    """Two loaders at once, of which the shorter begins anew within an epoch."""

    def train_dataloader(self) -> Any:
        make = partial(DataLoader, shuffle=True)
        return {"long": make(samples(14), batch_size=2), "short": make(samples(6, seed=1), batch_size=2)}


class LitBoth(LitNet):
    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return batch

    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        return self._loss(batch["long"]) + self._loss(batch["short"])


class Untrained(pl.LightningModule):
    def training_step(self, batch: Any, batch_idx: int) -> Any:
        return batch[0].sum()


class WithLoaders(LitNet):
    def train_dataloader(self) -> Any:
        return LitData().train_dataloader()


class Interrupt(BreakOff):
    """As a Ctrl-C does."""

    def on_train_batch_end(self, *_: Any) -> None:
        self.left -= 1
        if not self.left:
            os.kill(os.getpid(), signal.SIGINT)


class LitPair(pl.LightningModule):
    """Two halves with an optimizer each, stepped by hand in each batch; nothing is drawn."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False
        self.first, self.second = nn.Linear(6, 2), nn.Linear(6, 2)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        inputs, target = batch
        for half, optimizer in zip((self.first, self.second), self.optimizers(), strict=True):
            self.toggle_optimizer(optimizer)
            loss = nn.functional.cross_entropy(half(inputs) + 0.1 * self.second(inputs), target)
            optimizer.zero_grad()
            self.manual_backward(loss)
            optimizer.step()
            self.untoggle_optimizer(optimizer)

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(half.parameters(), lr=0.1, momentum=0.9) for half in (self.first, self.second)]


class LitEmpty(LitData):
    """No sample, known before; or none that comes."""

    def __init__(self, known: bool = True) -> None:
        super().__init__()
        self.known = known

    def train_dataloader(self) -> Any:
        return DataLoader(samples(4) if self.known else NoSample(), batch_size=8, drop_last=True)


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
    """An object in its checkpoints."""

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["mine"] = {"net": self.net}


class LitState(LitNet):
    def get_extra_state(self) -> Any:
        return self.net

    def set_extra_state(self, state: Any) -> None: ...
