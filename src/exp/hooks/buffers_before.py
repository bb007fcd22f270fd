"""A network's buffers as they were before a step, for a forward changes some of them.

Relied on, and tested (torch 2.13): `Tensor._version` counts the changes that Python's operators make in place. Those of
a batch norm's own kernel to its statistics are not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# A large buffer is a mask or a queue, and a copy of it at every step would cost.
SMALL_BYTES = 2**16


class BuffersBefore:
    """Copies of buffers on their device: of small ones always, of large ones where they changed since the last copy.

    Compiled code does not count its changes on every path, so a compiled network has all of them copied.
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
                same = known is not None and known[0] is buffer and known[1] == version
                if all_of_them or not same or buffer.nbytes <= SMALL_BYTES:
                    known = self._copies[key] = (buffer, version, buffer.detach().clone())
                found.append((buffer, known[2]))
        return found


@torch.no_grad()
def put_back(copies: list[tuple[Tensor, Tensor]]) -> None:
    """The buffers hold again what they held."""
    for buffer, before in copies:
        buffer.copy_(before)
