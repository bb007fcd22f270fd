"""The words of precision.word, and what each one means in torch's dtypes."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch

Word = Literal["fp32", "tf32", "bf16", "fp16", "bf16_true", "fp16_true", "fp64", "fp8"]


@dataclass(frozen=True, kw_only=True)
class Numbers:
    """What a word says.

    parameters: the dtype of the network's parameters, floating buffers, gradients and optimizer state; None leaves
        them as the network made them, which is float32.
    autocast: the dtype in which torch.autocast runs what it allows; None for no autocast.
    loss: the dtype of the loss.
    """

    parameters: torch.dtype | None = None
    autocast: torch.dtype | None = None
    loss: torch.dtype = torch.float32


WORDS: dict[Word, Numbers] = {
    "fp32": Numbers(),
    "tf32": Numbers(),
    "bf16": Numbers(autocast=torch.bfloat16),
    "fp16": Numbers(autocast=torch.float16),
    "bf16_true": Numbers(parameters=torch.bfloat16),
    "fp16_true": Numbers(parameters=torch.float16),
    "fp64": Numbers(parameters=torch.float64, loss=torch.float64),
    "fp8": Numbers(autocast=torch.bfloat16),
}
HALF = (torch.float16, torch.bfloat16)
