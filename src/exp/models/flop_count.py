"""Floating-point operations, counted operator by operator while something runs, on the meta device above all.

Relied on, and tested (torch 2.13): `flop_registry` of torch.utils.flop_counter has a formula for each operator's
packet, called with the operator's arguments and `out_val`. torch's FlopCounterMode follows the modules by
hooks in the graph, which refuse a gradient with respect to inputs.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils.flop_counter import flop_registry

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class FlopCount:
    """FLOPs of one sample in one optimizer step: a multiplication and an addition are two.

    Matrix products, convolutions and attention are counted; what is done element by element is not, as in the
    literature (PaLM, arXiv:2204.02311, appendix B).

    forward, backward: of all passes of the step; the forward has the objective in it.
    by_operator: of both together, by the operator's name.
    is_estimated: the backward could not be run, and is taken as twice the forward.
    """

    forward: float
    backward: float
    by_operator: Mapping[str, float]
    is_estimated: bool = False

    @property
    def total(self) -> float:
        return self.forward + self.backward


def counted(call: Callable[[], T]) -> tuple[T, Counter[str]]:
    """What a call returns, and the FLOPs of its operators by their names.

    On the meta device attention runs as plain matrix products, so that a backward has no second forward in it, as that
    of a fused kernel has, and recurrent layers run as those that they consist of.
    """
    counter = _Counter()
    with counter:
        result = call()
    return result, counter.found


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch gives it no types
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:  # whatever the operator gives
        result = func(*args, **(kwargs or {}))
        if flops := flops_of(func, args, kwargs or {}, result):
            self.found[str(func.overloadpacket).removeprefix("aten.")] += flops
        return result


def flops_of(operator: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int:
    """FLOPs of one call of an operator as a CPU runs it, fused kernels included; 0 for what is not counted.

    The backward of fused attention counts without the forward that it computes again, as `counted` has it.
    """
    packet = operator.overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Queries by keys, and weights by values: two products a head."""
    return 2 * prod(query.shape) * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _recurrent(given: Tensor, of_input: Tensor, of_state: Tensor, *_: object) -> int:
    """One layer in one direction: two products a step. given: `[T, B, C]`."""
    return 2 * prod(given.shape[:-1]) * (of_input.numel() + of_state.numel())


def _matrix(matrix: Tensor, *_: object) -> int:
    return 2 * matrix.numel()


# What torch 2.13 does not count, and the operators of a CPU that the meta device runs as the products of which they
# consist. A backward makes two products for each of the forward.
_OWN: dict[object, Callable[..., int]] = {
    torch.ops.aten.mv: _matrix,
    torch.ops.aten.dot: _matrix,
    torch.ops.aten.addmv: lambda added, matrix, *_, **__: _matrix(matrix),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *args: 2 * _attention(*args),
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _recurrent(*args),
}
