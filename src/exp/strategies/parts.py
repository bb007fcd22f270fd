"""What of a tensor lies in this process."""

from __future__ import annotations

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies here; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
