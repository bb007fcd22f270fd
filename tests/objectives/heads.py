"""Data set with several named targets and network with several heads, for tests of metrics."""

from __future__ import annotations

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torch.utils.data import Dataset
from torchmetrics import Metric

DIGITS, KINDS = 10, 3


def rows(count: int) -> dict[str, Tensor]:
    """Return all samples: x `[N, 6]`, digit, kind and side `[N]` int64, age `[N]` float64."""
    draw = torch.Generator().manual_seed(7)
    x = torch.randn(count, 6, generator=draw, dtype=torch.float64)
    return {
        "x": x,
        "digit": torch.randint(DIGITS, (count,), generator=draw),
        "kind": torch.randint(KINDS, (count,), generator=draw),
        "side": torch.randint(2, (count,), generator=draw),
        "age": x.sum(1) + torch.randn(count, generator=draw, dtype=torch.float64),
    }


class Rows(Dataset):
    def __init__(self, count: int = 61) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.rows.items()}


class Heads(nn.Module):
    """Network with the outputs digits `[B, 10]`, kinds `[B, 3]`, sided `[B]` and years `[B]`."""

    def __init__(self) -> None:
        super().__init__()
        self.digit, self.kind = nn.Linear(6, DIGITS), nn.Linear(6, KINDS)
        self.side, self.age = nn.Linear(6, 1), nn.Linear(6, 1)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        return {
            "digits": self.digit(x),
            "kinds": self.kind(x),
            "sided": self.side(x)[:, 0],
            "years": self.age(x)[:, 0],
        }


class Fails(Callback):
    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_batch_end(self, trainer: Trainer, pl_module: LightningModule, *_: object) -> None:
        if trainer.global_step == self.at:
            raise ValueError(f"at step {self.at}")


class Own(Metric):
    """Metric of a user that the check does not call, because it would fail on the generated outputs."""

    def __init__(self, gives: str) -> None:
        super().__init__()
        self.gives = gives
        self.add_state("count", torch.zeros(()), dist_reduce_fx="sum")

    def update(self, output: Tensor, target: Tensor) -> None:
        assert output.requires_grad is False
        self.count += len(target)

    def compute(self) -> object:
        least, most = self.count / self.count, 2 * self.count / self.count
        kinds = {"vector": torch.stack([least, most]), "mapping": {"least": least, "most": most}}
        return kinds.get(self.gives, torch.ones(2, 2))
