"""Tests of Lightning's callbacks in whole runs, for test_against_torch.py.

Each class of lightning.pytorch.callbacks becomes a node in `callbacks`. Either the check refuses it with a reason, or
a run must end with the weights of a run of Lightning without exp and with the same callback, bit for bit.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import logging
import sys
import tempfile
import warnings
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch import callbacks as lightnings
from torch import Tensor, nn
from torch.utils.data import DataLoader

import exp
from exp.errors import ConfigError

HERE = Path(__file__).parent
# Arguments of each callback. The other callbacks have no required arguments.
ARGUMENTS: Mapping[str, dict[str, Any]] = {
    "BasePredictionWriter": {"write_interval": "epoch"},
    "EarlyStopping": {"monitor": "loss/train", "patience": 1, "min_delta": 0.05},
    "EMAWeightAveraging": {"decay": 0.9},
    "GradientAccumulationScheduler": {"scheduling": {0: 1, 2: 3}},
    "ModelCheckpoint": {"save_last": True},
    "ModelPruning": {"pruning_fn": "l1_unstructured", "amount": 0.3},
    "OnExceptionCheckpoint": {"dirpath": "rescue"},
    "StochasticWeightAveraging": {"swa_lrs": 0.05, "swa_epoch_start": 2},
    "Timer": {"duration": "00:01:00:00"},
}


def load(name: str) -> Any:
    """Return the module of a file next to this one."""
    spec = importlib.util.spec_from_file_location(name, HERE / f"{name}.py")
    module = sys.modules[name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


steps = load("steps")
operators = steps.operators


class Alone(LightningModule):
    """LightningModule of the run in steps.COMMON, written as in Lightning's documentation."""

    def __init__(self, start: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.net = steps.Network().double()
        self.net.load_state_dict(start)

    def training_step(self, batch: Any) -> Tensor:
        x, target = batch
        loss = nn.functional.mse_loss(self.net(x), target)
        self.log("loss/train", loss, on_step=False, on_epoch=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.net.parameters(), lr=0.1, momentum=0.9, fused=True)


def by_lightning(name: str, arguments: Mapping[str, Any], start: Mapping[str, Tensor]) -> Any:
    """Return the weights in the last checkpoint of a run of Lightning with the callback."""
    module = Alone(start)
    saving = lightnings.ModelCheckpoint(dirpath="alone", save_last=True, monitor="loss/train")
    trainer = Trainer(
        max_epochs=steps.EPOCHS,
        callbacks=[getattr(lightnings, name)(**arguments), saving],
        accelerator="cpu",
        logger=name in ("DeviceStatsMonitor", "LearningRateMonitor"),
        enable_progress_bar=name in ("ProgressBar", "RichProgressBar", "TQDMProgressBar"),
        enable_model_summary=False,
    )
    trainer.fit(module, DataLoader(steps.Rows(), batch_size=steps.SIZE))
    found = torch.load(Path("alone") / "last.ckpt", weights_only=True)["state_dict"]
    return {key.removeprefix("net."): value for key, value in found.items()}


def by_exp(name: str, arguments: Mapping[str, Any], start: Mapping[str, Tensor]) -> Any:
    """Return the weights in the last checkpoint of a run of exp, or raise ConfigError if the check refuses it."""
    node = {"_target_": f"lightning.pytorch.callbacks.{name}", **arguments}
    torch.save(start, "start.pt")
    bar = name in ("ProgressBar", "RichProgressBar", "TQDMProgressBar")
    lines = [line for line in steps.COMMON if not line.startswith("trainer.enable_progress_bar")]
    lines += ["logger=[tensorboard]"] if name in ("DeviceStatsMonitor", "LearningRateMonitor") else []
    lines += [
        "model={_target_: steps.Network}",
        "optimizer={_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9}",
        "weights.from=start.pt",
        f"trainer.enable_progress_bar={str(bar).lower()}",
        f"+callbacks.it={steps.text(node)}",
    ]
    lines = [line for line in lines if line != "logger=[]" or "logger=[tensorboard]" not in lines]
    directory = Path(exp.fit(exp.compose(lines)).directory)
    found = torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"]
    return {key: next(found[one] for one in found if one.endswith(key)) for key in start}


def seen(*, only: Sequence[str] = ()) -> list[Any]:
    """Return the results for all callbacks of Lightning, or for those in `only`."""
    sys.modules.setdefault("steps", steps)
    rows, start = [], steps.start_of("SGD")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    for name in lightnings.__all__:
        if only and name not in only:
            continue
        row = operators.Row(name=f"lightning.pytorch.callbacks.{name}", form="callback")
        rows.append(row)
        arguments = ARGUMENTS.get(name, {})
        with (
            tempfile.TemporaryDirectory() as folder,
            contextlib.chdir(folder),
            warnings.catch_warnings(),
            contextlib.redirect_stdout(io.StringIO()),
            contextlib.redirect_stderr(io.StringIO()),
        ):
            warnings.simplefilter("ignore")
            try:
                found = by_exp(name, arguments, start)
            except ConfigError as error:
                row.refused["; ".join(f"{one.got}; expected {one.expected}" for one in error.errors)] += 1
                continue
            except Exception as error:
                row.wrong.append(f"{name}: {error!r}")
                continue
            wanted = by_lightning(name, arguments, start)
        if all(operators.same(found[key], value) for key, value in wanted.items()):
            row.equal += 1
        else:
            far = max(float((found[key] - value).abs().max()) for key, value in wanted.items())
            row.wrong.append(f"{name}: other weights, by {far:.1e}")
    return rows
