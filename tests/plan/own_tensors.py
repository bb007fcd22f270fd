"""Samples of a user's own of any shapes and dtypes."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Tensors(Dataset):
    """values: name to [shape, dtype] of each input; classes: of the target, 0 for a target of `numbers` numbers."""

    def __init__(self, *, values, classes=3, numbers=1):
        self.values, self.classes, self.numbers = values, classes, numbers

    def __len__(self):
        return 40

    def __getitem__(self, index):
        entries = {
            name: torch.ones(*shape, dtype=getattr(torch, dtype)) for name, (shape, dtype) in self.values.items()
        }
        target = index % self.classes if self.classes else torch.zeros(self.numbers)
        return {**entries, "target": target}


class Residual(nn.Module):
    def __init__(self, *, width, inner):
        super().__init__()
        self.first, self.second = nn.Linear(width, inner), nn.Linear(inner, inner)

    def forward(self, x):
        return x + self.second(self.first(x))


class Encoder(nn.Module):
    def __init__(self, *, body, head):
        super().__init__()
        self.body, self.head = body, head

    def forward(self, x):
        return self.head(self.body(x).flatten(1))
