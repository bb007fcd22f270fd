"""Clipping of gradients that is right wherever they lie: whole, in shards, or in parts on several ranks."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal

import torch
from lightning.pytorch.strategies import Strategy
from torch import Tensor, nn

from exp.strategies.model_parallel import ModelParallel
from exp.strategies.parts import local

Algorithm = Literal["norm", "value"]


@torch.no_grad()
def clip(
    parameters: Iterable[nn.Parameter], *, value: float | None, algorithm: Algorithm | None, strategy: Strategy
) -> Tensor | None:
    """Clips the gradients of parameters in place. Where parts lie in several ranks, every one of those must call it.

    value: the largest 2-norm of all gradients together, or the largest absolute value of each number; None or 0 clips
        nothing.
    algorithm: None is "norm".
    Returns: the 2-norm before clipping, 0-d; None where no norm was needed.
    """
    if not value:
        return None
    parameters = list(parameters)
    if not isinstance(strategy, ModelParallel):
        if algorithm == "value":
            nn.utils.clip_grad_value_(parameters, value)
            return None
        return nn.utils.clip_grad_norm_(parameters, value)
    # One by one: torch's kernels for many refuse lists that mix DTensors and others.
    parts = [local(parameter.grad) for parameter in parameters if parameter.grad is not None]
    if algorithm == "value":
        for part in parts:
            part.clamp_(min=-value, max=value)
        return None
    norm = strategy.total_norm(parameters)
    # As torch.nn.utils.clip_grad_norm_ has it.
    factor = torch.clamp(value / (norm + 1e-6), max=1.0)
    for part in parts:
        part.mul_(factor.to(device=part.device, dtype=part.dtype))
    return norm
