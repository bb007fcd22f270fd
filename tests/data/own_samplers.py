"""Samplers, data and a network of a user, for test_samplers.py."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import nn
from torch.utils.data import Dataset, Sampler


class Growing(Sampler[int]):
    """Random sampler with state: each pass adds `stride` to the drawn indices. It draws from torch's generator."""

    def __init__(self, data_source: Any, stride: int = 1) -> None:
        self.count, self.stride, self.passes = len(data_source), stride, 0

    def __len__(self) -> int:
        return self.count

    def __iter__(self) -> Iterator[int]:
        first, self.passes = self.passes * self.stride, self.passes + 1
        order = torch.randperm(self.count)
        yield from [(first + index) % self.count for index in order.tolist()]


class Shrinking(Growing):
    """Sampler with one sample less in each pass."""

    def __iter__(self) -> Iterator[int]:
        yield from list(super().__iter__())[self.passes :]


class Words(Dataset[Any]):
    """Data set of sequences of 3 to 11 tokens with a class for each token."""

    def __init__(self, samples: int = 48) -> None:
        self.samples = samples

    def __len__(self) -> int:
        return self.samples

    def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
        tokens = torch.arange(3 + index * 5 % 9) + index
        return tokens % 7, tokens * 3 % 5


class Tagger(nn.Module):
    """Network that predicts a class for each token from the token and from the mean of all tokens except padding."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(7, 6), nn.Linear(6, 5)

    def forward(self, input: torch.Tensor, mask: torch.Tensor) -> torch.Tensor:
        found = self.embed(input)
        mean = (found * mask[..., None]).sum(1, keepdim=True) / mask.sum(1)[:, None, None]
        return self.head(found + mean.tanh())
