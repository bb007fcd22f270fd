"""Records the calls of modules in a forward, and finds the module that created a node of autograd's graph.

The module uses private functions of autograd (torch 2.13; tests/hooks/test_operators.py fails if they change).
`_sequence_nr` returns the number of a node. Nodes of one thread are numbered in the order of their creation.
`_get_sequence_nr` returns the number of the next node. `_current_autograd_node` returns the node that computes its
backward in this thread. `torch.utils.module_tracker` is not used, because it does not support in-place operations and
functions between layers.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator
from dataclasses import dataclass
from operator import attrgetter

import torch
from torch import Tensor
from torch.autograd.graph import Node


@dataclass(kw_only=True, slots=True)
class Call:
    """One call of a module in a forward.

    Args:
        name: Name of the module.
        first: Number of the first autograd node that the call may create. Nodes of inner calls count as well.
        end: Number of the call's last autograd node plus 1. None: the call is running.
        around: The call that contains this call. None: this is the outermost call.
    """

    name: str
    first: int
    end: int | None = None
    around: Call | None = None


class ModuleCalls:
    """Record of the calls of modules in a forward.

    Args:
        outside: Name that is returned for operations outside all modules.
    """

    def __init__(self, *, outside: str = "") -> None:
        self.outside = outside
        self._open: Call | None = None
        # The calls, sorted by the number of their first node.
        self._calls: list[Call] = []

    def begin(self, name: str) -> Call:
        call = Call(name=name, first=next_number(), around=self._open)
        self._open = call
        self._calls.append(call)
        return call

    def end(self, name: str) -> Call | None:
        """End the last open call of a module, and return the call; None if the module has no open call.

        Open calls inside the ended call also end.
        """
        call = self._open
        while call is not None and call.name != name:
            call = call.around
        if call is not None:
            call.end = next_number()
            self._open = call.around
        return call

    @property
    def current(self) -> str:
        """The name of the module in the innermost open call, or `outside`."""
        return self.outside if self._open is None else self._open.name

    def maker(self, node: Node) -> str:
        """Return the name of the innermost module that created a node in its forward, or `outside`."""
        number = number_of(node)
        # The node was created by the last call that began before it, or by a call that contains this call.
        place = bisect_right(self._calls, number, key=attrgetter("first")) - 1
        call = self._calls[place] if place >= 0 else None
        while call is not None and (call.end is not None and call.end <= number):
            call = call.around
        return self.outside if call is None else call.name


def next_number() -> int:
    """Return the number of the next autograd node that this thread creates."""
    return int(torch.autograd._get_sequence_nr())  # type: ignore[attr-defined]  # private, see above


def number_of(node: Node) -> int:
    """Return the number of an autograd node. Nodes that accumulate gradients of parameters have the largest numbers."""
    return node._sequence_nr()


def running_node() -> Node | None:
    """Return the autograd node that computes its backward now; None outside a backward."""
    return torch._C._current_autograd_node()


def nodes_of(tensor: Tensor) -> Iterator[Node]:
    """Yield each autograd node that a backward from `tensor` may run.

    The nodes include those that accumulate gradients of parameters.
    """
    waiting = [] if tensor.grad_fn is None else [tensor.grad_fn]
    # The set contains nodes instead of ids, because Python may give the id of a deleted node to a new node.
    seen = set(waiting)
    while waiting:
        node = waiting.pop()
        yield node
        for following, _ in node.next_functions:
            if following is not None and following not in seen:
                seen.add(following)
                waiting.append(following)
