"""Data set with named entries, network with named outputs and loss of a user, for test_losses_by_name.py."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset

CLASSES = 5


def rows(count: int) -> dict[str, Tensor]:
    """Return all samples in float64."""
    draw = torch.Generator().manual_seed(7)

    def normal(*shape: int) -> Tensor:
        return torch.randn(count, *shape, generator=draw, dtype=torch.float64)

    return {
        "x": normal(6),
        "near": normal(6),
        "far": normal(6),
        "target": normal(3),
        "side": normal().sign(),
        "words": torch.randint(1, CLASSES, (count, 4), generator=draw),
        "word_lengths": torch.randint(1, 4, (count,), generator=draw),
        "frame_lengths": torch.full((count,), 8),
    }


class Rows(Dataset):
    def __init__(self, count: int = 24) -> None:
        self.rows = rows(count)

    def __len__(self) -> int:
        return len(self.rows["x"])

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        return {name: values[index] for name, values in self.rows.items()}


class Outputs(nn.Module):
    """Network with named outputs: mean and variance `[B, 3]`, embeddings `[B, 2]`, scores `[B]`, log(p) of 8 frames."""

    def __init__(self) -> None:
        super().__init__()
        self.mean, self.spread = nn.Linear(6, 3), nn.Linear(6, 3)
        self.embed = nn.Linear(6, 2)
        self.frame = nn.Linear(6, 8 * CLASSES)

    def forward(self, x: Tensor, near: Tensor, far: Tensor) -> dict[str, Tensor]:
        first, second, third = (self.embed(one) for one in (x, near, far))
        return {
            "mean": self.mean(x),
            "variance": self.spread(x).exp(),
            "anchor": first,
            "like": second,
            "unlike": third,
            "score": first[:, 0],
            "other": second[:, 0],
            "frames": self.frame(x).unflatten(1, (8, CLASSES)).transpose(0, 1).log_softmax(-1),
        }


class Quantile(nn.Module):
    """Mean pinball loss of a low and a high quantile over the samples with a target that is not negative."""

    def forward(self, target: Tensor, low: Tensor, high: Tensor) -> Tensor:
        counted = (target[:, 0] >= 0).to(low.dtype)
        below, above = target - low, target - high
        loss = torch.maximum(0.1 * below, -0.9 * below) + torch.maximum(0.9 * above, -0.1 * above)
        return (loss.mean(1) * counted).sum() / counted.sum().clamp(min=1)

    def divisor(self, target: Tensor, low: Tensor, high: Tensor) -> Tensor:
        return (target[:, 0] >= 0).sum()
