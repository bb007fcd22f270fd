"""Count floating-point operations by operator while a function runs, usually on the meta device.

`flop_registry` of torch.utils.flop_counter has a formula for each operator's packet, called with the operator's
arguments and `out_val` (torch 2.13, tested). torch's FlopCounterMode follows the modules by hooks in the graph, which
refuse a gradient with respect to inputs.
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
    """FLOPs of one sample in one optimizer step. A multiplication and an addition are two.

    Matrix products, convolutions and attention are counted. Elementwise operations are not, as in the literature (PaLM,
    arXiv:2204.02311, appendix B).

    Args:
        forward: FLOPs of all forward passes of the step, with the objective.
        backward: FLOPs of all backward passes.
        by_operator: FLOPs of both by the operator's name.
        is_estimated: The backward could not be run and is estimated as twice the forward.
    """

    forward: float
    backward: float
    by_operator: Mapping[str, float]
    is_estimated: bool = False

    @property
    def total(self) -> float:
        return self.forward + self.backward


def count_flops(call: Callable[[], T]) -> tuple[T, Counter[str]]:
    """Return the result of a call, and the FLOPs of its operators by name.

    On the meta device attention runs as plain matrix products, so that its backward does not repeat the forward as that
    of a fused kernel does. Recurrent layers run as matrix products, too.
    """
    counter = _Counter()
    with counter:
        result = call()
    return result, counter.found


class _Counter(TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # untyped in torch
        self.found: Counter[str] = Counter()

    def __torch_dispatch__(
        self, func: Any, types: object, args: Sequence[object] = (), kwargs: Mapping[str, object] | None = None
    ) -> object:
        result = func(*args, **(kwargs or {}))
        if flops := flops_of(func, args, kwargs or {}, result):
            self.found[str(func.overloadpacket).removeprefix("aten.")] += flops
        return result


def flops_of(operator: Any, args: Sequence[object], kwargs: Mapping[str, object], result: object) -> int:
    """Return the FLOPs of one call of an operator, including fused kernels of a CPU. 0 if it is not counted.

    The backward of fused attention counts without the repeated forward, as in `count_flops`.
    """
    packet = operator.overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Return the FLOPs of two products per head: queries by keys, and weights by values."""
    return 2 * prod(query.shape) * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _recurrent(given: Tensor, of_input: Tensor, of_state: Tensor, *_: object) -> int:
    """Return the FLOPs of one layer in one direction: two products per step. given: `[T, B, C]`."""
    return 2 * prod(given.shape[:-1]) * (of_input.numel() + of_state.numel())


def _matrix(matrix: Tensor, *_: object) -> int:
    return 2 * matrix.numel()


# Operators that torch 2.13 does not count, and operators of a CPU that the meta device runs as matrix products. A
# backward has two products for each product of the forward.
_OWN: dict[object, Callable[..., int]] = {
    torch.ops.aten.mv: _matrix,
    torch.ops.aten.dot: _matrix,
    torch.ops.aten.addmv: lambda added, matrix, *_, **__: _matrix(matrix),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *args: 2 * _attention(*args),
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _recurrent(*args),
}
