"""Networks and data of a user."""

from __future__ import annotations

from typing import Any

import lightning
import torch
from torch import Tensor, nn
from torch.nn.utils.rnn import pad_sequence
from torch.utils.data import Dataset


class Sentences(Dataset[Any]):
    """Data set of sentences of 3 to 7 words with a row of numbers."""

    def __len__(self) -> int:
        return 48

    def __getitem__(self, index: int) -> dict[str, Any]:
        draws = torch.Generator().manual_seed(index)
        words = torch.randint(1, 30, (3 + index % 5,), generator=draws)
        return {"tokens": words, "numbers": torch.randn(4, generator=draws), "target": index % 3}


class Padded:
    """Collate function that pads the sentences of a batch."""

    def __call__(self, samples: list[dict[str, Any]]) -> dict[str, Tensor]:
        tokens = pad_sequence([one["tokens"] for one in samples], batch_first=True)
        return {
            "tokens": tokens,
            "mask": tokens > 0,
            "numbers": torch.stack([one["numbers"] for one in samples]),
            "target": torch.tensor([one["target"] for one in samples]),
        }


class Reader(nn.Module):
    """Attention over words, with several inputs, nested outputs, and an output that is no tensor."""

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
    """GRU over a variable number of words."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(30, 8)
        self.gru = nn.GRU(8, 6, batch_first=True)
        self.head = nn.Linear(6, 3)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.gru(self.embedding(tokens))[0].mean(1))


class Branching(nn.Module):
    """Network with a branch that depends on the input."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = x.flatten(1)
        if x.sum() > 0:
            x = -x
        return self.head(x)


class Drawing(nn.Module):
    """Network with dropout that is active in evaluation."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.dropout(self.head(x.flatten(1)), 0.5, training=True)


class OwnModule(lightning.LightningModule):
    """LightningModule with its own training and evaluation steps."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(64, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(x.flatten(1))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return nn.functional.cross_entropy(self(batch[0]), batch[1])

    def validation_step(self, batch: Any, batch_idx: int) -> None:
        self.log("val/loss", self.training_step(batch, batch_idx))

    def configure_optimizers(self) -> Any:
        return torch.optim.SGD(self.parameters(), lr=0.1)
