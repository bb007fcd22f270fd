"""What the programs that benchmarks/sweep.py measures share: the networks of conf/model by hand, and the data."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batches = DataLoader[tuple[Tensor, ...]]
BATCH_SIZE = 64
# Where a program that has no better place writes a line for each job, in the current folder.
RESULTS = "results.jsonl"


class Block(nn.Module):
    """A block of conf/model/mlp.yaml."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout, self.linear = nn.LayerNorm(width), nn.Dropout(0.1), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(self.dropout(nn.functional.gelu(self.norm(x))))
        return output


def network(name: str) -> nn.Module:
    """conf/model/NAME.yaml for digits by hand: mlp, lenet; or small, the MLP 64-128-10 of benchmarks/loop.py."""
    if name == "small":
        return nn.Sequential(nn.Flatten(), nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    if name == "mlp":
        return nn.Sequential(
            *(nn.Flatten(), nn.Linear(64, 256), Block(256), Block(256), nn.GELU(), nn.Linear(256, 10)),
        )
    if name == "lenet":
        return nn.Sequential(
            *(nn.Conv2d(1, 6, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2)),
            *(nn.Conv2d(6, 16, 5, padding=2), nn.ReLU(), nn.MaxPool2d(2), nn.Flatten()),
            *(nn.Linear(64, 120), nn.ReLU(), nn.Linear(120, 84), nn.ReLU(), nn.Linear(84, 10)),
        )
    raise SystemExit(f"{name} is none of mlp, small, lenet")


def loaders(path: str | Path) -> tuple[Batches, Batches, Batches]:
    """Stock DataLoaders of training, validation and test, from a file that benchmarks/sweep.py has written."""
    parts = torch.load(path, weights_only=True)
    train, val, test = (
        DataLoader(TensorDataset(*parts[stage]), batch_size=BATCH_SIZE, shuffle=stage == "train")
        for stage in ("train", "val", "test")
    )
    return train, val, test


def note(*, began: float, ended: float, loss: float, accuracy: float) -> None:
    """One more job is done. began, ended: by time.time. loss: the best of validation. accuracy: of the test."""
    line = {"began": began, "ended": ended, "loss": loss, "accuracy": accuracy}
    with open(RESULTS, "a") as file:
        print(json.dumps(line), file=file)
