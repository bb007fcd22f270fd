"""Matrix products of stacked networks, in the bits of each network's own.

torch's rules for vmap take a linear layer for a batched product and an addition behind it, and a library's batched
product of little matrices sums in another order than its single one: a member would differ from the same job alone in
its last bit (seen on an AMD EPYC: layers of 256 inputs, and of 13 with 3 outputs). Here are other rules for the two
operators.

Private of torch (2.13), and tested: the dispatch key of its vmap, and how a tensor is taken out of a level of it.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import Tensor
from torch._C import _functorch as functorch
from torch._functorch.pyfunctorch import retrieve_current_functorch_interpreter

BATCHED = torch._C.DispatchKeySet(torch._C.DispatchKey.FuncTorchBatched)
# Of results of so few numbers MKL's batched product has other bits (seen on AMD EPYC with AVX-512); and of so few where
# a factor or the result of a member begins within a vector, of 16 numbers at most.
FEW, FEW_UNALIGNED, VECTOR = 400, 4096, 16


@contextmanager
def exact_products() -> Iterator[None]:
    """Let vmap multiply matrices as this module does, within this context."""
    rules = torch.library.Library("aten", "IMPL")
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", "(?s).*Overriding a previously registered kernel", UserWarning)
        rules.impl("addmm", _addmm, "FuncTorchBatched")
        rules.impl("mm", _mm, "FuncTorchBatched")
    try:
        yield
    finally:
        del rules  # and torch's own are back


def _addmm(bias: Tensor, first: Tensor, second: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    def stacked(bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
        # Onto the bias, as one product does it: of long rows the library sums parts, the first of them onto that.
        bias = bias.unsqueeze(1) if bias.dim() == 2 else bias
        return torch.baddbmm(bias, first, second, beta=beta, alpha=alpha)

    def single(bias: Tensor, first: Tensor, second: Tensor) -> Tensor:
        return torch.addmm(bias, first, second, beta=beta, alpha=alpha)

    return _by_member(bias, first, second, stacked=stacked, single=single)


def _mm(first: Tensor, second: Tensor) -> Tensor:
    return _by_member(first, second, stacked=torch.bmm, single=torch.mm)


def _by_member(*tensors: Tensor, stacked: Callable[..., Tensor], single: Callable[..., Tensor]) -> Tensor:
    """A product of the current level of vmap, whose last two tensors are the factors."""
    level = retrieve_current_functorch_interpreter().level()
    with torch._C._ExcludeDispatchKeyGuard(BATCHED):
        inner = [_taken_out(tensor, level) for tensor in tensors]
        sizes = [tensor.shape[place] for tensor, place in inner if place is not None]
        if not sizes:
            return single(*(tensor for tensor, _ in inner))
        members = sizes[0]
        rows = [
            tensor.expand(members, *tensor.shape) if place is None else tensor.movedim(place, 0)
            for tensor, place in inner
        ]
        first, second = rows[-2:]
        result = first.shape[1] * second.shape[2]
        is_aligned = not any(count % VECTOR for count in (first[0].numel(), second[0].numel(), result))
        if result <= (FEW if is_aligned else FEW_UNALIGNED):
            # Each in memory of its own: where it begins decides on the order of sums, too.
            found = torch.stack([single(*map(torch.clone, each)) for each in zip(*rows, strict=True)])
        else:
            found = stacked(*rows)
        return functorch._add_batch_dim(found, 0, level)


def _taken_out(tensor: Tensor, level: int) -> tuple[Tensor, int | None]:
    """A tensor without a level of vmap, and the place of its members there; None where all have the same."""
    if functorch.is_batchedtensor(tensor) and functorch.maybe_get_level(tensor) == level:
        return functorch.get_unwrapped(tensor), functorch.maybe_get_bdim(tensor)
    return tensor, None
