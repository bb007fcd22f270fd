"""Data sets and networks of a user with several inputs, for a file next to ./conf."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset

SAMPLES = 48


def draws(seed: int, *shape: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


class Twins(Dataset[Any]):
    """Data set of ((left, right), target): two rows, and if they have the same class."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[tuple[Tensor, Tensor], int]:
        left = draws(index, 4)
        is_same = index % 2
        return (left, left + 0.1 * draws(1000 + index, 4) if is_same else draws(2000 + index, 4)), is_same


class Visits(Dataset[Any]):
    """Data set of an image and a row of a table, as named entries."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Any]:
        return {"image": draws(index, 1, 6, 6), "table": draws(1000 + index, 5), "target": index % 3, "number": index}


class ImageAndTable(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.see = nn.Sequential(nn.LazyConv2d(4, 3), nn.ReLU(), nn.Flatten(), nn.LazyLinear(width))
        self.read = nn.LazyLinear(width)
        self.head = nn.Linear(2 * width, 3)

    def forward(self, image: Tensor, table: Tensor) -> Tensor:
        return self.head(torch.cat([self.see(image), self.read(table)], 1).relu())


class Sentences(Dataset[Any]):
    """Data set of sentences of 3 to 6 words, and the same words in reverse order."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> dict[str, Tensor]:
        words = torch.arange(1, 4 + index % 4) + index % 3
        turned = words.flip(0)
        return {"source": words, "previous": torch.cat([turned.new_zeros(1), turned[:-1]]), "target": turned}


class Padded:
    """Collate function that pads to length 6; `mask` is true where a source has a word."""

    def __call__(self, samples: list[dict[str, Tensor]]) -> dict[str, Tensor]:
        batch = {name: self.column(samples, name) for name in ("source", "previous", "target")}
        return {**batch, "mask": batch["source"] > 0}

    def column(self, samples: list[dict[str, Tensor]], name: str) -> Tensor:
        # All batches have the same length, so that each rank divides by the same number of words as one process.
        whole = [*(sample[name] for sample in samples), torch.zeros(6, dtype=torch.int64)]
        return pad_sequence(whole, batch_first=True)[:-1]


class Translator(nn.Module):
    def __init__(self, vocabulary: int = 10, width: int = 8) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocabulary, width)
        self.attend = nn.MultiheadAttention(width, 2, batch_first=True)
        self.head = nn.Linear(width, vocabulary)

    def forward(self, source: Tensor, previous: Tensor, *, mask: Tensor) -> Tensor:
        read, written = self.embed(source), self.embed(previous)
        return self.head(written + self.attend(written, read, read, key_padding_mask=~mask, need_weights=False)[0])


class Molecules(Dataset[Any]):
    """Data set of (nodes, edges, target): features of nodes, and edges as an adjacency matrix."""

    def __len__(self) -> int:
        return SAMPLES

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, Tensor]:
        edges = (draws(1000 + index, 5, 5) > 0).float()
        return draws(index, 5, 3), edges, edges.sum()[None] / 10
