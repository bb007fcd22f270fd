"""Norms of many tensors in one call of torch's private function `_foreach_norm`.

`torch.nn.utils.get_total_norm` returns only the total norm, and overflows for float16. It takes 14 us for 4 tensors and
298 us for 200 tensors. `_foreach_norm` takes 4 us and 184 us (torch 2.13, one thread).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from exp.functions.at_least_float32 import at_least_float32

SINGLE = {torch.float32}


def norms(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Return the 2-norm of each tensor, 0-d, on the device of the first tensor.

    The norms are float32, or float64 for tensors of float64.
    """
    dense = [tensor.coalesce().values() if tensor.is_sparse else tensor for tensor in tensors]
    if not dense:
        return []
    # A dtype is passed only if needed, because the argument takes a third of the time of the whole call.
    dtype = [] if {tensor.dtype for tensor in dense} == SINGLE else [at_least_float32(dense[0].dtype)]
    found = torch._foreach_norm(dense, 2, *dtype)
    if len({tensor.device for tensor in dense}) > 1:  # the layers are split over several devices
        return [norm.to(found[0].device) for norm in found]
    return list(found)


def norms_by_name(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the 2-norms by name, for tensors that are not sharded."""
    return dict(zip(tensors, norms(list(tensors.values())), strict=True))


def with_total(each: Sequence[Tensor]) -> tuple[Sequence[Any], Any]:
    """Return the norms, and the 2-norm of all tensors together.

    On the CPU the results are floats, because `.item()` takes a tenth of the time of an operator. On other devices they
    are 0-d tensors.

    Args:
        each: 2-norms of tensors, 0-d.
    """
    if not each:
        return [], 0.0
    if each[0].is_cpu:
        numbers = [norm.item() for norm in each]
        # math.hypot is not used, because it returns infinity for an infinity and a nan.
        return numbers, math.sqrt(sum([number * number for number in numbers]))
    return each, torch.linalg.vector_norm(torch.stack(list(each)))
