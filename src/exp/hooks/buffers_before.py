"""A network's buffers as they were before a step, for a forward changes some of them.

Relied on, and tested (torch 2.13): `Tensor._version` counts the changes of a tensor in place.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn


class BuffersBefore:
    """Copies of buffers on their device, of those alone that changed since they were copied last.

    Compiled code does not count its changes on every path, so it asks for all of them.
    """

    def __init__(self, *modules: nn.Module) -> None:
        self._modules = modules
        self._copies: dict[int, tuple[Tensor, int, Tensor]] = {}

    def take(self, *, all_of_them: bool) -> list[tuple[Tensor, Tensor]]:
        """Each buffer with a copy of what it holds now, that is not changed any more. Waits for nothing."""
        found = []
        for module in self._modules:
            for buffer in module.buffers():
                key, version = id(buffer), buffer._version
                known = self._copies.get(key)
                if all_of_them or known is None or known[0] is not buffer or known[1] != version:
                    known = self._copies[key] = (buffer, version, buffer.detach().clone())
                found.append((buffer, known[2]))
        return found


@torch.no_grad()
def put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    """The buffers hold again what they held."""
    for buffer, before in copies:
        buffer.copy_(before)
