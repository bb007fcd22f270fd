"""Networks and data of a user's own, which the tests of exports copy beside a conf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


def words(index: int) -> Tensor:
    return torch.randint(1, 30, (3 + index % 5,), generator=torch.Generator().manual_seed(index))


class Sentences(Dataset[Any]):
    """Sentences of 3 to 7 words, their mask, and a row of numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        numbers = torch.randn(4, generator=torch.Generator().manual_seed(100 + index))
        return {"tokens": words(index), "numbers": numbers, "target": index % 3}


class Padded:
    """Brings sentences to the length of the longest."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = pad_sequence([one["tokens"] for one in samples], batch_first=True)
        return {
            "tokens": tokens,
            "mask": tokens > 0,
            "numbers": torch.stack([one["numbers"] for one in samples]),
            "target": torch.tensor([one["target"] for one in samples]),
        }


class Reader(nn.Module):
    """Attention over words, several inputs, nested outputs, and one of no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 16)
        self.attention = nn.MultiheadAttention(16, 4, batch_first=True)
        self.head = nn.Linear(20, 3)

    def forward(self, tokens: Tensor, mask: Tensor, numbers: Tensor) -> dict[str, Any]:
        x = self.embedding(tokens)
        x, _ = self.attention(x, x, x, key_padding_mask=~mask)
        pooled = (x * mask[..., None]).sum(1) / mask.sum(1, keepdim=True)
        output = self.head(torch.cat([pooled, numbers], 1))
        return {"output": output, "more": {"words": x, "length": mask.sum(1)}, "note": "text"}


class Recurrent(nn.Module):
    """A GRU over words, whose number may change."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(tokens))[0].mean(1))


class Branching(nn.Module):
    """A branch that depends on the numbers."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if x.sum() > 0:
            x = -x
        return self.head(x)


class Drawing(nn.Module):
    """Dropout in evaluation, too."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.head(x.flatten(1)), 0.5, training=True)


class Tied(nn.Module):
    """Two layers that share a weight, which safetensors refuses as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 10)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.second(self.first(x.flatten(1)).relu()))
