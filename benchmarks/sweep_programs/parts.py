"""Networks of conf/model by hand, data loaders and results of the programs that benchmarks/sweep.py measures."""

from __future__ import annotations

import json
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, TensorDataset

Batches = DataLoader[tuple[Tensor, ...]]
BATCH_SIZE = 64
# File in the current folder to which a program writes one line per job.
RESULTS = "results.jsonl"


# Number of classes: digits, or 64 characters and one class for all others.
CLASSES = {"mlp": 10, "small": 10, "lenet": 10, "gpt": 65}


class Block(nn.Module):
    """Block of conf/model/mlp.yaml."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.norm, self.dropout, self.linear = nn.LayerNorm(width), nn.Dropout(0.1), nn.Linear(width, width)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.linear(self.dropout(nn.functional.gelu(self.norm(x))))
        return output


class AttentionBlock(nn.Module):
    """Block of conf/model/gpt.yaml."""

    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.query, self.key, self.value, self.project = (nn.Linear(width, width) for _ in range(4))
        self.expand, self.contract = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        y = self.norm1(x)
        q, k, v = (
            part(y).unflatten(2, (self.heads, -1)).transpose(1, 2) for part in (self.query, self.key, self.value)
        )
        y = nn.functional.scaled_dot_product_attention(q, k, v, is_causal=True)
        x = x + self.project(y.transpose(1, 2).flatten(2))
        output: Tensor = x + self.contract(nn.functional.gelu(self.expand(self.norm2(x))))
        return output


class GPT(nn.Module):
    """Network of conf/model/gpt.yaml with outputs `[B, C, T]`, the order of axes that torch's cross entropy expects."""

    def __init__(self, *, classes: int, block_size: int = 64, width: int = 64, heads: int = 4, blocks: int = 2) -> None:
        super().__init__()
        self.tokens, self.positions = nn.Embedding(classes, width), nn.Parameter(torch.empty(block_size, width))
        self.blocks = nn.Sequential(*(AttentionBlock(width, heads) for _ in range(blocks)))
        self.norm, self.head = nn.LayerNorm(width), nn.Linear(width, classes, bias=False)
        for name, parameter in self.named_parameters():
            if name.endswith("bias"):
                nn.init.zeros_(parameter)
            elif "norm" not in name:
                is_last = name.endswith(("project.weight", "contract.weight"))
                nn.init.normal_(parameter, std=0.01 if is_last else 0.02)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.head(self.norm(self.blocks(self.tokens(x) + self.positions[: x.shape[1]])))
        return output.transpose(1, 2)


def network(name: str) -> nn.Module:
    """Return the network of conf/model/NAME.yaml for mlp, lenet or gpt, or the MLP 64-128-10 for small."""
    if name == "gpt":
        return GPT(classes=CLASSES[name])
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
    raise SystemExit(f"unknown network {name}; expected: mlp, small, lenet, gpt")


def loaders(path: str | Path) -> tuple[Batches, Batches, Batches]:
    """Return stock DataLoaders of the training, validation and test splits in a file written by benchmarks/sweep.py."""
    parts = torch.load(path, weights_only=True)
    train, val, test = (
        DataLoader(TensorDataset(*parts[stage]), batch_size=BATCH_SIZE, shuffle=stage == "train")
        for stage in ("train", "val", "test")
    )
    return train, val, test


def note(*, began: float, ended: float, loss: float, accuracy: float) -> None:
    """Append the result of a job to RESULTS.

    Args:
        began: time.time() at the start of the job
        ended: time.time() at its end
        loss: best validation loss
        accuracy: accuracy of the test
    """
    line = {"began": began, "ended": ended, "loss": loss, "accuracy": accuracy}
    with open(RESULTS, "a") as file:
        print(json.dumps(line), file=file)
