"""What of a tensor lies in this process, and what ranks find in their parts of one."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Protocol

from torch import Tensor
from torch.distributed.tensor import DTensor


def local(tensor: Tensor) -> Tensor:
    """The part of a DTensor that lies here; any other tensor as it is."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor


class Parts(Protocol):
    """What ranks find in their parts of tensors, for the whole ones. All that any rank has; every rank must call it."""

    def sums(self, found: Mapping[str, Tensor], tensors: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """What was counted: `[K]` in float64, by the name of the parameter. tensors: in which, this rank's parts."""

    def maxima(self, found: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        """The largest: `[K]` in float64, by the name of the parameter."""
