"""Fixtures of the hook tests: steps without a run, runs in this process, and batches for references."""

from __future__ import annotations

import csv
import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from torch import nn

import exp
from exp.check.resolution import resolve
from exp.construct import build_data, build_network
from exp.errors import ConfigError
from exp.hooks.step import Step

TRAIN_ONLY = [
    *("metrics=[]", "monitor=loss/train", "test=false", "trainer.limit_val_batches=0", "logger=[csv]"),
    *("checkpoint.save_best=false", "trainer.enable_progress_bar=false", "launch.accelerator=cpu"),
]


@dataclass(frozen=True, kw_only=True)
class Fitted:
    """Completed run."""

    directory: Path

    @functools.cached_property
    def values(self) -> dict[str, dict[int, float]]:
        """Return the scalars of metrics.csv by tag and step."""
        found: dict[str, dict[int, float]] = {}
        with (self.directory / "metrics.csv").open() as file:
            for row in csv.DictReader(file):
                for tag in row.keys() - {"step", "epoch"}:
                    if row[tag] not in ("", None):
                        found.setdefault(tag, {})[int(row["step"])] = float(row[tag])
        return found

    def checkpoint(self, name: str = "last") -> dict[str, Any]:
        return torch.load(self.directory / "checkpoints" / f"{name}.ckpt", weights_only=True)


@pytest.fixture
def step() -> Callable[..., Step]:
    """A function that returns the Step of a network on the CPU."""

    def make(network: nn.Module | None = None, **settings: Any) -> Step:
        given = {"index": 1, "optimizers": [], "batch_size": 8, "device": torch.device("cpu"), **settings}
        return Step(network=network or nn.Identity(), **given)

    return make


@pytest.fixture
def in_tmp(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty working directory, from which modules can be imported."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    return tmp_path


@pytest.fixture
def fit(in_tmp: Path) -> Callable[..., Fitted]:
    """A function that trains in this process, without validation and test, and returns the run."""
    count = iter(range(100))

    def run(*overrides: str) -> Fitted:
        directory = in_tmp / f"run{next(count)}"
        exp.fit(exp.compose([*TRAIN_ONLY, f"hydra.run.dir={directory}", *overrides]))
        return Fitted(directory=directory)

    return run


@pytest.fixture
def events() -> Callable[[Path], EventAccumulator]:
    """A function that reads the event file of a run directory."""

    def read(directory: Path) -> EventAccumulator:
        everything = {"scalars": 0, "images": 0, "tensors": 0, "histograms": 0}
        return EventAccumulator(str(directory / "tensorboard"), size_guidance=everything).Reload()

    return read


@pytest.fixture
def reference(in_tmp: Path) -> Callable[..., tuple[nn.Module, Iterator[Any]]]:
    """A function that builds the network of a command line in float64, and its training batches."""

    def build(*overrides: str) -> tuple[nn.Module, Iterator[Any]]:
        settings = resolve(exp.compose([*TRAIN_ONLY, *overrides])).settings
        data = build_data(settings)
        loader = data.loader("train")
        loader.set_position(0, 0)
        return build_network(settings, data.spec).double(), iter(loader)

    return build


@pytest.fixture
def refused(in_tmp: Path) -> Callable[..., list[str]]:
    """A function that returns the errors of a command line."""

    def errors(*overrides: str) -> list[str]:
        with pytest.raises(ConfigError) as caught:
            exp.validate(exp.compose(list(overrides)))
        return [str(error) for error in caught.value.errors]

    return errors
