"""Sweep with Hydra's basic launcher and a script in the form of lightning-hydra-template.

    python template.py -m data.path=digits.pt model.network=mlp trainer.max_epochs=10
        model.optimizer.lr=1e-3,3e-3 seed=0,1

The script has the parts of the template that take time: all objects are instantiated from the config; the module has
torchmetrics' means, accuracies and maximum; early stopping with a patience of 100; summary and progress bar by rich;
the config is printed as a tree and logged as hyperparameters; a function around the training logs the output folder. It
logs to TensorBoard, as the other programs do. The sanity check is off, which makes it faster.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Iterable
from importlib.util import find_spec
from typing import Any

import hydra
import lightning as L
import rich
import rich.tree
import torch
from hydra.core.config_store import ConfigStore
from hydra.utils import instantiate
from lightning.pytorch.callbacks import Callback
from lightning.pytorch.loggers import Logger
from lightning.pytorch.utilities import rank_zero_only
from omegaconf import DictConfig, OmegaConf
from parts import CLASSES, Batches, loaders, network, note
from torch import Tensor
from torchmetrics import MaxMetric, MeanMetric
from torchmetrics.classification import Accuracy

log = logging.getLogger(__name__)
CALLBACKS = "lightning.pytorch.callbacks"
ConfigStore.instance().store(
    "template",
    {
        "task_name": "train",
        "tags": ["dev"],
        "train": True,
        "test": True,
        "ckpt_path": None,
        "seed": 0,
        "threads": None,
        "optimized_metric": "val/loss_best",
        "data": {"_target_": "template.DigitsData", "path": "???"},
        "model": {
            "_target_": "template.Classifier",
            "network": "mlp",
            "optimizer": {"_target_": "torch.optim.AdamW", "_partial_": True, "lr": 1e-3},
        },
        "callbacks": {
            "model_checkpoint": {
                "_target_": f"{CALLBACKS}.ModelCheckpoint",
                "dirpath": "${paths.output_dir}/checkpoints",
                "filename": "epoch_{epoch:03d}",
                "monitor": "val/loss",
                "mode": "min",
                "save_last": True,
                "auto_insert_metric_name": False,
            },
            "early_stopping": {
                "_target_": f"{CALLBACKS}.EarlyStopping",
                "monitor": "val/loss",
                "patience": 100,
                "mode": "min",
            },
            "model_summary": {"_target_": f"{CALLBACKS}.RichModelSummary", "max_depth": -1},
            "rich_progress_bar": {"_target_": f"{CALLBACKS}.RichProgressBar"},
        },
        "logger": {
            "tensorboard": {
                "_target_": "lightning.pytorch.loggers.tensorboard.TensorBoardLogger",
                "save_dir": "${paths.output_dir}/tensorboard/",
                "name": None,
                "log_graph": False,
                "default_hp_metric": True,
                "prefix": "",
            }
        },
        "trainer": {
            "_target_": "lightning.pytorch.trainer.Trainer",
            "default_root_dir": "${paths.output_dir}",
            "min_epochs": 1,
            "max_epochs": 10,
            "accelerator": "cpu",
            "devices": 1,
            "check_val_every_n_epoch": 1,
            "deterministic": False,
            "num_sanity_val_steps": 0,
        },
        "paths": {"output_dir": "${hydra:runtime.output_dir}"},
        "extras": {"ignore_warnings": False, "enforce_tags": True, "print_config": True},
    },
)


class DigitsData(L.LightningDataModule):
    def __init__(self, *, path: str) -> None:
        super().__init__()
        self.save_hyperparameters(logger=False)
        self.path = path
        self.parts: tuple[Batches, Batches, Batches] | None = None

    def setup(self, stage: str | None = None) -> None:
        if self.parts is None:
            self.parts = loaders(self.path)

    def train_dataloader(self) -> Batches:
        assert self.parts is not None
        return self.parts[0]

    def val_dataloader(self) -> Batches:
        assert self.parts is not None
        return self.parts[1]

    def test_dataloader(self) -> Batches:
        assert self.parts is not None
        return self.parts[2]


class Classifier(L.LightningModule):
    def __init__(self, *, network: str, optimizer: Callable[..., torch.optim.Optimizer]) -> None:
        super().__init__()
        # Hydra 1.3.8 makes a partial of the optimizer, which torch.load with weights_only=True refuses in a checkpoint.
        self.save_hyperparameters(logger=False, ignore=["optimizer"])
        self.net, self.optimizer = made(network), optimizer
        self.criterion = torch.nn.CrossEntropyLoss()
        accuracies = (Accuracy(task="multiclass", num_classes=CLASSES[network]) for _ in range(3))
        self.train_acc, self.val_acc, self.test_acc = accuracies
        self.train_loss, self.val_loss, self.test_loss = (MeanMetric() for _ in range(3))
        self.val_acc_best = MaxMetric()

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.net(x)
        return output

    def on_train_start(self) -> None:
        self.val_loss.reset()
        self.val_acc.reset()
        self.val_acc_best.reset()

    def model_step(self, batch: Any) -> tuple[Tensor, Tensor, Tensor]:
        inputs, target = batch
        output = self.forward(inputs)
        return self.criterion(output, target), output.argmax(dim=1), target

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss, predicted, target = self.model_step(batch)
        self.train_loss(loss)
        self.train_acc(predicted, target)
        self.log("train/loss", self.train_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("train/acc", self.train_acc, on_step=False, on_epoch=True, prog_bar=True)
        return loss

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        loss, predicted, target = self.model_step(batch)
        self.val_loss(loss)
        self.val_acc(predicted, target)
        self.log("val/loss", self.val_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("val/acc", self.val_acc, on_step=False, on_epoch=True, prog_bar=True)

    def on_validation_epoch_end(self) -> None:
        self.val_acc_best(self.val_acc.compute())
        self.log("val/acc_best", self.val_acc_best.compute(), sync_dist=True, prog_bar=True)

    def test_step(self, batch: Any, batch_idx: int) -> None:
        loss, predicted, target = self.model_step(batch)
        self.test_loss(loss)
        self.test_acc(predicted, target)
        self.log("test/loss", self.test_loss, on_step=False, on_epoch=True, prog_bar=True)
        self.log("test/acc", self.test_acc, on_step=False, on_epoch=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.optimizer(params=self.parameters())


def made(name: str) -> torch.nn.Module:
    return network(name)


@rank_zero_only
def print_tree(config: DictConfig) -> None:
    tree = rich.tree.Tree("CONFIG")
    for name in config:
        branch = tree.add(str(name))
        node = config[name]
        branch.add(OmegaConf.to_yaml(node, resolve=True) if isinstance(node, DictConfig) else str(node))
    rich.print(tree)


def several(nodes: DictConfig) -> list[Any]:
    return [instantiate(node) for node in nodes.values() if "_target_" in node]


def log_hyperparameters(
    config: DictConfig, model: L.LightningModule, trainer: L.Trainer, loggers: Iterable[Logger]
) -> None:
    """Log sections of the config and the numbers of parameters with each logger."""
    values: dict[str, Any] = {}
    plain = OmegaConf.to_container(config, resolve=True)
    assert isinstance(plain, dict)
    values["model/params/total"] = sum(one.numel() for one in model.parameters())
    values["model/params/trainable"] = sum(one.numel() for one in model.parameters() if one.requires_grad)
    for name in ("data", "model", "trainer", "callbacks", "extras", "task_name", "tags", "ckpt_path", "seed"):
        values[name] = plain[name]
    for logger in loggers:
        logger.log_hyperparams(values)


def train(config: DictConfig) -> tuple[dict[str, Any], float]:
    L.seed_everything(config.seed, workers=True)
    log.info("the data module")
    data: L.LightningDataModule = instantiate(config.data)
    log.info("the model")
    model: L.LightningModule = instantiate(config.model)
    callbacks: list[Callback] = several(config.callbacks)
    loggers: list[Logger] = several(config.logger)
    log.info("the trainer")
    trainer: L.Trainer = instantiate(config.trainer, callbacks=callbacks, logger=loggers)
    log_hyperparameters(config, model, trainer, loggers)
    if config.train:
        trainer.fit(model=model, datamodule=data, ckpt_path=config.ckpt_path)
    metrics = dict(trainer.callback_metrics)
    best = float(trainer.checkpoint_callback.best_model_score)  # type: ignore[union-attr]
    if config.test:
        trainer.test(model=model, datamodule=data, ckpt_path=trainer.checkpoint_callback.best_model_path)  # type: ignore[union-attr]
    return {**metrics, **trainer.callback_metrics}, best


def as_task(config: DictConfig) -> tuple[dict[str, Any], float]:
    """Train; log an exception and the output folder, as the template does for each job of a sweep."""
    try:
        return train(config)
    except Exception:
        log.exception("")
        raise
    finally:
        log.info(f"Output dir: {config.paths.output_dir}")
        if find_spec("wandb"):
            import wandb

            if wandb.run:
                wandb.finish()


@hydra.main(version_base="1.3", config_path=None, config_name="template")
def main(config: DictConfig) -> float:
    began = time.time()
    if config.threads:
        torch.set_num_threads(config.threads)
    if config.extras.print_config:
        print_tree(config)
    metrics, best = as_task(config)
    note(began=began, ended=time.time(), loss=best, accuracy=float(metrics["test/acc"]))
    return best


if __name__ == "__main__":
    main()
