"""A network's buffers as they were before a step, for a forward changes some of them.

Relied on, and tested (torch 2.13): `Tensor._version` counts the changes that Python's operators make in place. Those of
a batch norm's own kernel to its statistics are not counted.
"""

from __future__ import annotations

import torch
from torch import Tensor, nn

# A large buffer is a mask or a queue, and a copy of it at every step would cost.
SMALL_BYTES = 2**16


Copies = list[tuple[nn.Module, str, Tensor]]


class BuffersBefore:
    """Copies of buffers on their device: of small ones always, of large ones where they changed since the last copy.

    Compiled code does not count its changes on every path, so a compiled network has all of them copied. Modules that
    have no buffer when this is made are not looked at.
    """

    def __init__(self, network: nn.Module) -> None:
        self._owners = [one for one in network.modules() if any(True for _ in one.buffers(recurse=False))]
        self._large: dict[tuple[int, str], tuple[Tensor, int, Tensor]] = {}

    def take(self, *, all_of_them: bool) -> Copies:
        """Owner, name and copy of what each buffer holds now; no copy is changed any more. Waits for nothing."""
        return [
            (owner, name, self._copy(owner, name, buffer, anew=all_of_them))
            for owner in self._owners
            for name, buffer in owner.named_buffers(recurse=False)
        ]

    def _copy(self, owner: nn.Module, name: str, buffer: Tensor, *, anew: bool) -> Tensor:
        if anew or buffer.nbytes <= SMALL_BYTES:
            return buffer.detach().clone()
        key, version = (id(owner), name), buffer._version
        known = self._large.get(key)
        if known is None or known[0] is not buffer or known[1] != version:
            known = self._large[key] = (buffer, version, buffer.detach().clone())
        return known[2]


@torch.no_grad()
def put_back(copies: Copies) -> None:
    """The buffers hold again what they held."""
    for owner, name, before in copies:
        owner.get_buffer(name).copy_(before)
