"""The adapter of what torch keeps to itself about autograd's nodes: the order in which they were made, and which runs.

Relied on, and tested (torch 2.13): a node's `_sequence_nr()` counts the nodes that one thread makes, and
`torch.autograd._get_sequence_nr()` is the number of the next one; `torch._C._current_autograd_node()` is the node whose
backward runs in this thread, None outside a backward.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor
from torch.autograd.graph import Node


def next_number() -> int:
    """The number that the next node of this thread will have."""
    return torch.autograd._get_sequence_nr()


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
