"""Which module is being called, and which one made a node of autograd's graph.

The adapter of what torch keeps to itself about nodes, relied on and tested (torch 2.13): a node's `_sequence_nr()`
counts the nodes that one thread makes, and `torch.autograd._get_sequence_nr()` is the number of the next one;
`torch._C._current_autograd_node()` is the node whose backward runs in this thread, None outside a backward.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.autograd.graph import Node


@dataclass(kw_only=True, slots=True)
class Call:
    """One call of a module. first, end: the numbers of the nodes that it made, those of calls within it included."""

    name: str
    first: int
    end: int | None = None
    around: Call | None = None


class ModuleCalls:
    """The calls of a forward, told as they begin and end.

    outside: the name of what no module does.
    """

    def __init__(self, *, outside: str = "") -> None:
        self.outside = outside
        self._open: Call | None = None
        # In the order of their first nodes, because they are told as they begin.
        self._calls: list[Call] = []
        self._firsts: list[int] = []

    def begin(self, name: str) -> Call:
        call = Call(name=name, first=next_number(), around=self._open)
        self._open = call
        self._calls.append(call)
        self._firsts.append(call.first)
        return call

    def end(self, name: str) -> Call | None:
        """Ends the last open call of that name, and those within it that never ended; None where there is none."""
        call = self._open
        while call is not None and call.name != name:
            call = call.around
        if call is not None:
            call.end = next_number()
            self._open = call.around
        return call

    @property
    def current(self) -> str:
        """The name of the innermost module that is being called."""
        return self.outside if self._open is None else self._open.name

    def maker(self, node: Node) -> str:
        """The name of the innermost module in whose forward a node was made."""
        number = number_of(node)
        # The last call that began before: itself, or one of those around it, made the node.
        place = bisect_right(self._firsts, number) - 1
        call = self._calls[place] if place >= 0 else None
        while call is not None and (call.end is not None and call.end <= number):
            call = call.around
        return self.outside if call is None else call.name


def next_number() -> int:
    """The number that the next node of this thread will have."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # private, see above


def number_of(node: Node) -> int:
    """When a node was made, as `next_number` said before. That of a parameter's gradient is larger than any."""
    return node._sequence_nr()


def running_node() -> Node | None:
    """The node whose backward runs."""
    return torch._C._current_autograd_node()


def nodes_behind(tensor: Tensor) -> Iterator[Node]:
    """Every node that a backward from `tensor` may run, each once; those that only take a parameter's gradient, too."""
    waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
    # The nodes themselves: the Python object of one that nobody holds is made anew.
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
