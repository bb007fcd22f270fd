"""Data set and networks of a user, with inputs of any shape and dtype."""

import torch
from torch import nn
from torch.utils.data import Dataset


class Tensors(Dataset):
    """Data set of ones.

    Args:
        values: [shape, dtype] of each input
        classes: number of classes of the target; 0 for targets of numbers
        numbers: numbers per target
    """

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
