"""What the entries of tensors are like: how they are distributed, and how many are zero or not finite.

Of whole tensors, also where each rank has a part of one: what ranks count is added up, in bins that they agree on.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32
from exp.hooks.step import Step
from exp.hooks.values import BINS, Histogram, bin_counts, finite_range
from exp.strategies.whole_state import local


def histograms(tensors: Mapping[str, Tensor], step: Step) -> dict[str, Histogram]:
    """The histogram of each whole tensor's finite entries. Where ranks have parts every one of them must call it."""
    if step.parts is None:
        return {name: Histogram.of(_dense(tensor)) for name, tensor in tensors.items()}
    parts = {name: _flat(tensor) for name, tensor in tensors.items()}
    ranges = {name: finite_range(part) for name, part in parts.items()}
    # Largest and smallest at once: the smallest is the largest of what is on the other side of zero.
    found = step.parts.maxima({name: torch.stack([high, -low]) for name, (low, high) in ranges.items()})
    limits = {name: (-pair[1], pair[0]) for name, pair in found.items()}
    counts = {name: bin_counts(part, *limits[name], bins=BINS) for name, part in parts.items()}
    totals = step.parts.sums(counts, tensors)
    return {name: Histogram.counted(totals[name], *limits[name]) for name in totals}


def shares(tensors: Mapping[str, Tensor], step: Step) -> dict[str, tuple[Tensor, Tensor]]:
    """The share of each whole tensor's entries that are zero, and that are infinite or not a number: 0-d, on its
    device. Where ranks have parts every one of them must call it."""
    counts = {}
    for name, tensor in tensors.items():
        part = local(tensor)
        stored = part.coalesce().values() if part.is_sparse else part
        # What a sparse tensor does not store is zero.
        zeros = part.numel() - torch.count_nonzero(stored)
        finite = torch.count_nonzero(stored.isfinite())
        counts[name] = torch.stack([zeros, stored.numel() - finite, torch.full_like(zeros, part.numel())])
    if step.parts is not None:
        counts = step.parts.sums(counts, tensors)
    return {name: (count[0] / count[2], count[1] / count[2]) for name, count in counts.items()}


def _dense(tensor: Tensor) -> Tensor:
    return tensor.to_dense() if tensor.is_sparse else tensor


def _flat(tensor: Tensor) -> Tensor:
    """This rank's part, `[K]`, in a dtype that has bins."""
    return _dense(local(tensor)).detach().reshape(-1).to(at_least_float32(tensor.dtype))
