"""Holds a network in parts against the whole one, in one process: a thread stands for each rank.

Private of torch, and tested: a ProcessGroup in Python is asked by the methods `_allgather_base` and
`_reduce_scatter_base` before torch 2.13, which calls them `all_gather_single` and `reduce_scatter_single`.
"""

from __future__ import annotations

import copy
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn

from exp.errors import one_line
from exp.models.inference import network_call
from exp.nested import tensors_in
from exp.strategies.tensor_layers import Cut, carry_out, own
from exp.strategies.tensor_plan import Plan

# Numbers of a network that is compared: about a second of one core.
MOST_NUMBERS = 2**22
# In float64 the order of summation moves the fourteenth digit.
TOLERANCE = 1e-9


class Meeting:
    """Where threads hand each other their tensors."""

    def __init__(self, ranks: int) -> None:
        self._barrier = threading.Barrier(ranks)
        self._given: list[Tensor] = [torch.empty(0)] * ranks

    def exchange(self, rank: int, tensor: Tensor) -> list[Tensor]:
        """Return copies of the tensors of all ranks. Every rank must call it."""
        self._given[rank] = tensor
        self._barrier.wait()
        found = [one.detach().clone() for one in self._given]
        self._barrier.wait()
        return found

    def abort(self) -> None:
        self._barrier.abort()


class ThreadGroup(dist.ProcessGroup):
    """One rank's view of a group of threads."""

    def __init__(self, *rank_and_size: Any, meeting: Meeting) -> None:
        super().__init__(*rank_and_size)
        self._meeting = meeting

    def allreduce(self, *arguments: Any, **_: Any) -> Any:
        (value,) = arguments[0]
        value.copy_(torch.stack(self._meeting.exchange(self.rank(), value)).sum(0))

    def _allgather_base(self, *arguments: Any, **_: Any) -> Any:
        whole, part = arguments[:2]
        whole.copy_(torch.cat(self._meeting.exchange(self.rank(), part)))

    def _reduce_scatter_base(self, *arguments: Any, **_: Any) -> Any:
        part, whole = arguments[:2]
        total = torch.stack(self._meeting.exchange(self.rank(), whole)).sum(0)
        part.copy_(total.chunk(self.size())[self.rank()])

    all_gather_single, reduce_scatter_single = _allgather_base, _reduce_scatter_base


def difference(build: Callable[[], nn.Module], plan: Plan, inputs: Mapping[str, Tensor], *, ranks: int) -> str | None:
    """Return what a network in parts computes otherwise than the whole one, in evaluation; None for nothing.

    Outputs and gradients are compared, in float64 and with random inputs and weights.

    Args:
        build: Makes the network, on the CPU.
        inputs: The entries of a batch by name, of which the shapes and dtypes count.
        ranks: Number of ranks that share each layer.
    """
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        network = build().double().eval()
        for parameter in network.parameters():  # zeros would hide what they are multiplied by
            parameter.data += 0.1 * torch.randn(parameter.shape) if parameter.is_floating_point() else 0
        data = {name: _numbers(one) for name, one in inputs.items()}
        parts = [copy.deepcopy(network) for _ in range(ranks)]
    meeting = Meeting(ranks)
    groups = [ThreadGroup(rank, ranks, meeting=meeting) for rank in range(ranks)]
    cuts = [carry_out(plan, part, group) for part, group in zip(parts, groups, strict=True)]
    try:
        outputs, gradients = _computed(network, data)
    except Exception:  # random inputs are none of the data's, and a network may refuse them
        return None

    def compare(rank: int) -> str | None:
        try:
            found, slopes = _computed(parts[rank], data)
        except threading.BrokenBarrierError:
            return None
        except Exception as error:
            meeting.abort()
            return f"its forward or backward in parts raises {one_line(error)}"
        if len(found) != len(outputs) or not all(map(_is_same, found, outputs)):
            return "its output in parts is another one"
        whole = {name: _own(gradient, cuts[rank].get(name), groups[rank]) for name, gradient in gradients.items()}
        others = [name for name, gradient in whole.items() if not _is_same(slopes[name], gradient)]
        return f"the gradient of {others[0]} in parts is another one" if others else None

    with ThreadPoolExecutor(ranks) as pool:
        return next((one for one in pool.map(compare, range(ranks)) if one is not None), None)


def _computed(network: nn.Module, data: Mapping[str, Tensor]) -> tuple[list[Tensor], dict[str, Tensor]]:
    outputs = [one for one in tensors_in(network_call(network, tuple(data))(network, data)) if one.requires_grad]
    total = sum(((one * _weights(one)).sum() for one in outputs), torch.zeros(()))
    total.backward()
    none = torch.zeros((), dtype=torch.float64)
    return outputs, {
        name: none.expand(one.shape) if one.grad is None else one.grad for name, one in network.named_parameters()
    }


def _weights(output: Tensor) -> Tensor:
    return torch.arange(output.numel(), dtype=output.dtype).cos().view(output.shape)


def _numbers(like: Tensor) -> Tensor:
    if like.is_floating_point():
        return torch.randn(like.shape, dtype=torch.float64)
    return torch.randint(0, 2, like.shape).to(like.dtype)


def _own(gradient: Tensor, cut: Cut | None, group: dist.ProcessGroup) -> Tensor:
    return gradient if cut is None else own(gradient, group, dim=cut.dim)


def _is_same(one: Tensor, other: Tensor) -> bool:
    return one.shape == other.shape and bool(torch.allclose(one, other, rtol=TOLERANCE, atol=TOLERANCE))
