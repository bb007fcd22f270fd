"""The dtypes in which sums and norms are taken, so that half precision loses no digits and float64 keeps its own."""

from __future__ import annotations

import torch


def at_least_float32(dtype: torch.dtype) -> torch.dtype:
    """float64 for float64, float32 for every other."""
    return torch.float64 if dtype == torch.float64 else torch.float32


def summing_dtype(device: torch.device) -> torch.dtype:
    """For sums over many batches, which lose digits in float32; some devices have nothing else."""
    return torch.float32 if device.type == "mps" else torch.float64
