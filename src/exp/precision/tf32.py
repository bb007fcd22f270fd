"""Switches of the process that let CUDA compute float32 products in TensorFloat-32."""

from __future__ import annotations

import torch

# Compute capability of Ampere, the first with TensorFloat-32.
FIRST_CAPABILITY = (8, 0)


class TensorFloat32:
    """Sets the switches of matrix products and of cuDNN (convolutions, recurrent layers) alike.

    By their older names, which set the newer `fp32_precision` ones with them: where only the newer are set, reading
    the older raises, and Lightning and torch.backends.cudnn.flags read them (seen in torch 2.13, Lightning 2.6.6).

    matmul: torch's word for matrix products alone: highest, high or medium; None follows `allowed`.
    """

    def __init__(self, *, allowed: bool, matmul: str | None = None) -> None:
        self.allowed = allowed
        self.matmul = matmul or ("high" if allowed else "highest")
        self._before: tuple[str, bool] | None = None

    def set(self) -> None:
        """torch itself lets convolutions use it and matrix products not; here a word says it for both."""
        if self._before is None:
            self._before = torch.get_float32_matmul_precision(), torch.backends.cudnn.allow_tf32
            torch.set_float32_matmul_precision(self.matmul)
            torch.backends.cudnn.allow_tf32 = self.allowed

    def __enter__(self) -> None:
        self.set()

    def __exit__(self, *_: object) -> None:
        self.put_back()

    def put_back(self) -> None:
        """As they were before `set`. Safe to call twice."""
        if self._before is not None:
            matmul, torch.backends.cudnn.allow_tf32 = self._before
            torch.set_float32_matmul_precision(matmul)
            self._before = None


def why_without_effect(device_type: str) -> str | None:
    """The reason why tf32 changes nothing here; None where it does."""
    if device_type != "cuda":
        return f"{device_type} has no TensorFloat-32"
    capability = torch.cuda.get_device_capability()
    if capability < FIRST_CAPABILITY:
        return f"the GPU has compute capability {capability[0]}.{capability[1]}, TensorFloat-32 begins with 8.0"
    return None
