"""Replay the network's forward and backward as two CUDA graphs, which the host starts by one call each.

A small network leaves a GPU waiting for the host, which launches one kernel after the other. A graph is captured once
for the shape of a full batch; the short last batch of an epoch, and evaluation, run as ever. Objective, clipping and
optimizer stay outside. Written by torch's notes on CUDA graphs ("partial-network capture"); not run on a GPU yet.

Relied on (torch 2.13): `torch.cuda.make_graphed_callables` runs a module a few times before it captures, which moves
the statistics of batch norms, so that they are put back; its outputs and gradients lie in buffers that the next call
overwrites; and a replay draws from the generator's present seed, which a step sets.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from exp.engine.forward import Runner
from exp.errors import RunError

KEY = "runtime.cuda_graph"
Capture = Callable[[nn.Module, tuple[Tensor, ...]], Runner]
Shape = tuple[tuple[torch.Size, torch.dtype, torch.device], ...]


class GraphedNetwork:
    """A stand-in for a network that replays its graphs in training, for inputs of the shape that it saw first.

    capture: torch.cuda.make_graphed_callables, or something like it.
    """

    def __init__(self, network: nn.Module, *, capture: Capture = torch.cuda.make_graphed_callables) -> None:
        self.network = network
        self._capture = capture
        self._shape: Shape | None = None
        self._names: tuple[str, ...] = ()
        self._graphed: Runner | None = None

    def __call__(self, *inputs: Any, **named: Any) -> Any:
        if not (self.network.training and torch.is_grad_enabled()):
            return self.network(*inputs, **named)
        tensors = (*inputs, *named.values())
        if self._graphed is None:
            self._begin(tensors, tuple(named), count=len(inputs))
        assert self._graphed is not None
        if tuple(named) != self._names or _shape(tensors) != self._shape:
            return self.network(*inputs, **named)
        return self._graphed(*tensors)

    def _begin(self, tensors: tuple[Tensor, ...], names: tuple[str, ...], *, count: int) -> None:
        """Capture the graphs. Raises: RunError where an input is no tensor, or the capture fails."""
        if not all(isinstance(tensor, Tensor) for tensor in tensors):
            raise RunError(f"{KEY} takes a network whose inputs are tensors; write {KEY}=false")
        before = [buffer.clone() for buffer in self.network.buffers()]
        samples = tuple(tensor.clone() for tensor in tensors)
        try:
            self._graphed = self._capture(_ByPosition(self.network, names, count), samples)
        except RuntimeError as error:
            raise RunError(
                f"the network cannot be captured as a CUDA graph: {error}. It must not read numbers off the device, "
                f"nor take another way from step to step; write {KEY}=false"
            ) from error
        with torch.no_grad():
            for buffer, value in zip(self.network.buffers(), before, strict=True):
                buffer.copy_(value)
        self._names, self._shape = names, _shape(tensors)


class _ByPosition(nn.Module):
    """The network with its named inputs behind the others: a graph's inputs have no names."""

    def __init__(self, network: nn.Module, names: tuple[str, ...], count: int) -> None:
        super().__init__()
        self.network, self._names, self._count = network, names, count

    def forward(self, *tensors: Tensor) -> Any:
        named = dict(zip(self._names, tensors[self._count :], strict=True))
        return self.network(*tensors[: self._count], **named)


def _shape(tensors: tuple[Tensor, ...]) -> Shape:
    return tuple((tensor.shape, tensor.dtype, tensor.device) for tensor in tensors)
