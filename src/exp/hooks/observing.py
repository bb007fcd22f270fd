"""While an observing hook runs: what it computes is not the network's."""

from __future__ import annotations


class Observing:
    """Entered around what a hook computes in the middle of a forward or a backward, so that no other hook takes that
    for the network's own.

    depth: how many are under way.
    """

    __slots__ = ("depth",)

    def __init__(self) -> None:
        self.depth = 0

    def __enter__(self) -> None:
        self.depth += 1

    def __exit__(self, *_: object) -> None:
        self.depth -= 1


# One for the process, as the network that is being observed is.
OBSERVING = Observing()
