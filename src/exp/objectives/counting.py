"""How a loss counts: by the mean over samples, or by weights of its own that all ranks must add up together.

A cross entropy with class weights or ignored targets divides by the weights of the targets at hand. Each rank dividing
by its own would give another loss than one process, so that such a loss is summed, and divided by what all ranks hold.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed
from torch import Tensor, nn

from exp.objectives.terms import NLL, NOTHING, CrossEntropy
from exp.types import Batch


def reduction_fault(loss: nn.Module) -> str | None:
    """What is wrong with the reduction of a loss; None where its value is a mean over samples."""
    reduction = getattr(loss, "reduction", "mean")
    # KLDivLoss calls the mean over samples batchmean.
    if reduction == "mean" or (reduction == "batchmean" and isinstance(loss, nn.KLDivLoss)):
        return None
    return f"{type(loss).__name__} has reduction {reduction!r}, so that its value depends on the batch size"


def counts_by_weight(loss: nn.Module) -> bool:
    """Whether the loss may divide by something else than the number of its targets."""
    if isinstance(loss, (CrossEntropy, NLL)):
        return loss.class_weights is not None or loss.ignore_index != NOTHING
    # torch's own ignore -100 unless told otherwise, and a batch does not say whether it has any.
    return isinstance(loss, (nn.CrossEntropyLoss, nn.NLLLoss))


def shared_mean(loss: Any, output: Tensor, target: Tensor, batch: Batch) -> Tensor:
    """The loss of this rank's share such that the mean over ranks, weighted by samples, is the loss of the batch.

    One sum over the ranks, of one number. 0-d.
    """
    loss.reduction = "sum"
    try:
        total = loss(output, target)
    finally:
        loss.reduction = "mean"
    # A stand-in takes part in the sum, and adds nothing to it.
    held = _weight(loss, target) if batch.size else torch.zeros((), device=target.device)
    torch.distributed.all_reduce(held)
    # Several ranks hold each share where a model is split over ranks.
    held = held * (batch.world_size / torch.distributed.get_world_size())
    return total / held * (batch.global_size / batch.size) if batch.size else total * 0.0


def _weight(loss: Any, target: Tensor) -> Tensor:
    """What the loss divides its sum by, 0-d, float32."""
    if target.is_floating_point():  # torch divides the loss of probabilities by their number, whatever the weights
        return torch.tensor(float(target.numel() // target.shape[1] if target.dim() > 1 else 1), device=target.device)
    weights = loss.class_weights if isinstance(loss, (CrossEntropy, NLL)) else loss.weight
    counted = target != loss.ignore_index
    if weights is None:
        return counted.sum().float()
    return torch.where(counted, weights.float()[torch.where(counted, target, 0)], 0.0).sum()
