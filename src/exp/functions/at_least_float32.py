"""Dtypes for sums and norms. Half-precision numbers are summed in float32, because half precision would lose digits."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """Return float64 for float64, and float32 for any other dtype."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def summing_dtype(device: torch.device) -> torch.dtype:
    """Return the dtype of sums over many batches: float64, or float32 on a device without float64."""
    return torch.float32 if device.type == "mps" else torch.float64
