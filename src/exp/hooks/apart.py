"""What a hook computes beside the step with the step's network and batches, so that nothing of the run is touched."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from exp.data.randomness import generators_kept
from exp.nested import tensors_in

if TYPE_CHECKING:
    from exp.hooks.hook import Step


@dataclass(frozen=True, kw_only=True, slots=True)
class MicroBatch:
    """This rank's share of one global batch.

    data: as the data set gives it. batch_idx: from 0. global_size: samples of all ranks.
    weight: on this rank's mean over its samples, so that the mean over ranks is that over samples; 0.0 where it holds a
        stand-in only.
    """

    data: Any
    batch_idx: int
    global_size: int
    weight: float

    @property
    def size(self) -> int:
        """Samples here, b; 0 where it is a stand-in."""
        return len(next(tensors_in(self.data))) if self.weight else 0


class MicroBatches:
    """Those of the step under way, collected by a hook's `passed`."""

    def __init__(self) -> None:
        self.of_step: list[MicroBatch] = []
        self._index: int | None = None
        self._seen = 0

    def add(self, step: Step) -> None:
        """At the boundary `batch`."""
        if self._index != step.index:
            self.of_step, self._index, self._seen = [], step.index, 0
        size, self._seen = step.batch_size - self._seen, step.batch_size
        self.of_step.append(MicroBatch(data=step.data, batch_idx=step.batch_idx, global_size=size, weight=step.weight))

    def clear(self) -> None:
        """So that their memory is free."""
        self.of_step, self._index = [], None


@contextmanager
def apart(network: nn.Module) -> Iterator[None]:
    """Gives every generator of random numbers back as it was, and takes the kernels that any transform understands."""
    with generators_kept(), ExitStack() as stack:
        for device in {parameter.device for parameter in network.parameters()}:
            stack.enter_context(_generator_kept(device))
        # Fused attention has no rule for torch.func.vmap; the plain one computes the same.
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        yield


@contextmanager
def _generator_kept(device: torch.device) -> Iterator[None]:
    if device.type == "cuda":
        state = torch.cuda.get_rng_state(device)
        try:
            yield
        finally:
            torch.cuda.set_rng_state(state, device)
    elif device.type == "mps":
        state = torch.mps.get_rng_state()
        try:
            yield
        finally:
            torch.mps.set_rng_state(state)
    else:
        yield
