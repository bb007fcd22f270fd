"""Runs of conf/experiment/NAME.yaml in this process, and loops by hand over the same batches."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn.functional import cross_entropy

import exp
from exp.check.resolution import resolve
from exp.construct import build_data

Batch = Any
Loss = Callable[[nn.Module, Batch], Tensor]
START = "start.pt"
STEPS, RATE = 3, 0.05
# Overrides for three steps of plain gradient descent in float64.
DESCENT = (
    *("precision=fp64", "optimizer=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0"),
    *(f"optimizer.lr={RATE}", "scheduler=constant"),
)
SHORT = (
    *("trainer.max_epochs=1", "trainer.max_steps=-1", f"trainer.limit_train_batches={STEPS}"),
    *("trainer.limit_val_batches=1", "test=false", "trainer.val_check_interval=null"),
)


@dataclass(frozen=True, kw_only=True)
class Ran:
    """Results of a run."""

    directory: Path

    @property
    def checkpoint(self) -> dict[str, Any]:
        return torch.load(self.directory / "checkpoints" / "last.ckpt", weights_only=True)

    @property
    def weights(self) -> dict[str, Tensor]:
        """Return the weights of the last checkpoint by their names in the network."""
        return {name.removeprefix("network."): value for name, value in self.checkpoint["state_dict"].items()}

    @property
    def report(self) -> dict[str, Any]:
        return json.loads((self.directory / "report.json").read_text())

    @property
    def metrics(self) -> dict[str, float]:
        return self.report["metrics"]

    def column(self, tag: str) -> list[float]:
        """Return the values of a tag in the order of steps; the run needs logger=[csv]."""
        with (self.directory / "metrics.csv").open() as file:
            return [float(row[tag]) for row in csv.DictReader(file) if row[tag]]


class Gallery:
    """Runner of the gallery's experiments, each in a new run directory in `place`."""

    def __init__(self, place: Path) -> None:
        self.place = place
        self._count = itertools.count()

    def command(self, name: str, *overrides: str) -> list[str]:
        quiet = ["trainer.enable_progress_bar=false", "launch.accelerator=cpu", "logger=[]"]
        return [f"experiment={name}", *quiet, *overrides]

    def run(self, name: str, *overrides: str) -> Ran:
        directory = self.place / f"run{next(self._count)}"
        exp.fit(exp.compose([f"hydra.run.dir={directory}", *self.command(name, *overrides)]))
        return Ran(directory=directory)

    def data(self, name: str, *overrides: str) -> Any:
        return build_data(resolve(exp.compose(self.command(name, *overrides))).settings)

    def batches(self, name: str, *overrides: str, part: str = "train", count: int | None = STEPS) -> list[Batch]:
        """Return the first batches of an epoch, as (input, target) or by name, with floating-point data in float64."""
        loader = self.data(name, *overrides).loader(part)
        loader.set_position(0, 0)
        return [doubled(batch.data) for batch in itertools.islice(loader, count)]

    def descend(self, name: str, network: nn.Module, *overrides: str, loss: Loss | None = None) -> Ran:
        """Run three steps from the weights of a network, make the same steps by hand, and compare the weights.

        Args:
            name: experiment
            network: network with the same names of parameters as that of the run; this method converts it to float64
            overrides: further overrides of the run
            loss: function of network and batch that returns the loss; None for cross entropy
        """
        network.double()
        torch.save(network.state_dict(), self.place / START)
        ran = self.run(name, *DESCENT, *SHORT, f"weights.from={self.place / START}", *overrides)
        by_hand(network, self.batches(name, *overrides), loss=loss or classification)
        assert_equal(ran.weights, network.state_dict())
        return ran


def classification(network: nn.Module, batch: Batch) -> Tensor:
    x, target = batch
    return cross_entropy(network(x), target)


def by_hand(network: nn.Module, batches: Iterable[Batch], *, loss: Loss = classification, lr: float = RATE) -> None:
    """Train a network with one step of plain gradient descent per batch."""
    learning = [parameter for parameter in network.parameters() if parameter.requires_grad]
    optimizer = torch.optim.SGD(learning, lr=lr)
    for batch in batches:
        optimizer.zero_grad()
        loss(network, batch).backward()
        optimizer.step()


def assert_equal(
    found: dict[str, Tensor], wanted: dict[str, Tensor], *, rtol: float = 1e-9, atol: float = 1e-11
) -> None:
    assert found.keys() == wanted.keys()
    for name, tensor in wanted.items():
        torch.testing.assert_close(
            found[name], tensor, rtol=rtol, atol=atol, msg=lambda text, name=name: f"{name}: {text}"
        )


def doubled(data: Batch) -> Batch:
    if isinstance(data, Tensor):
        return data.double() if data.is_floating_point() else data
    if isinstance(data, dict):
        return {name: doubled(value) for name, value in data.items()}
    return tuple(doubled(value) for value in data)


@pytest.fixture
def gallery(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Gallery:
    monkeypatch.chdir(tmp_path)
    torch.manual_seed(0)
    return Gallery(tmp_path)


@pytest.fixture(scope="session")
def hand() -> Any:
    """This module, so that tests can call its functions; its folder is not on the import path."""
    import sys

    return sys.modules[__name__]
