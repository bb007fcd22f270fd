"""Counting of the floating-point operations (FLOPs) of each operator while a function runs, usually on the meta device.

`flop_registry` of torch.utils.flop_counter has a formula for each operator packet. A formula receives the operator's
arguments and `out_val`, the operator's result (tested with torch 2.13). FlopCounterMode of torch is not used, because
its hooks in the graph do not support gradients with respect to inputs.
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
    """The FLOPs of one sample in one optimizer step. A multiplication and an addition count as two FLOPs.

    Matrix products, convolutions and attention are counted. Elementwise operations are not counted, as in the
    literature (PaLM, arXiv:2204.02311, appendix B).

    Args:
        forward: The FLOPs of all forward passes in the step, including the objective.
        backward: The FLOPs of all backward passes in the step.
        by_operator: The FLOPs of forward and backward passes, by operator name.
        is_estimated: Whether `backward` is estimated as twice `forward`, because the backward pass could not run.
    """

    forward: float
    backward: float
    by_operator: Mapping[str, float]
    is_estimated: bool = False

    @property
    def total(self) -> float:
        return self.forward + self.backward


def count_flops(call: Callable[[], T]) -> tuple[T, Counter[str]]:
    """Run a function and count the FLOPs of the operators that it calls.

    On the meta device, attention runs as plain matrix products. Its backward pass therefore does not repeat the forward
    pass, unlike the backward pass of a fused kernel. Recurrent layers also run as matrix products.

    Returns:
        The result of the function, and the FLOPs by operator name.
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
    """Return the FLOPs of one call of an operator. The result is 0 for an operator that is not counted.

    Fused CPU kernels are included. For the backward pass of fused attention, the repeated forward pass is not counted,
    as in `count_flops`.
    """
    packet = operator.overloadpacket
    if packet in _OWN:
        return _OWN[packet](*args)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Return the FLOPs of the two matrix products of attention: queries by keys, and attention weights by values."""
    return 2 * prod(query.shape) * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _recurrent(given: Tensor, of_input: Tensor, of_state: Tensor, *_: object) -> int:
    """Return the FLOPs of one recurrent layer in one direction. Each time step has two matrix products.

    Args:
        given: The inputs, `[T, B, C]`.
        of_input: The weight matrix of the inputs.
        of_state: The weight matrix of the state.
    """
    return 2 * prod(given.shape[:-1]) * (of_input.numel() + of_state.numel())


def _matrix(matrix: Tensor, *_: object) -> int:
    return 2 * matrix.numel()


# Formulas for operators that torch 2.13 does not count, and for CPU operators that run as matrix products on the meta
# device. A backward pass has two products for each product of the forward pass.
_OWN: dict[object, Callable[..., int]] = {
    torch.ops.aten.mv: _matrix,
    torch.ops.aten.dot: _matrix,
    torch.ops.aten.addmv: lambda added, matrix, *_, **__: _matrix(matrix),
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: lambda _, *args: 2 * _attention(*args),
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: lambda *args: 2 * _recurrent(*args),
}
