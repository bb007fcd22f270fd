"""Floating-point operations, counted operator by operator while something runs, on the meta device above all.

Relied on, and tested (torch 2.13): `mod_tracker` of FlopCounterMode, its `parents`, and that they are all it is asked
for. torch's own follows the modules by hooks in the graph, which refuse a gradient with respect to inputs.
`flop_registry` has a formula for each operator's packet, called with the operator's arguments and `out_val`.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from math import prod
from typing import Any, TypeVar

import torch
from torch import Tensor
from torch._ops import OpOverload
from torch.utils.flop_counter import FlopCounterMode, flop_registry

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
    counter = FlopCounterMode(display=False, custom_mapping=_VECTORS)
    counter.mod_tracker = _NoModules()  # type: ignore[assignment]  # torch asks it for `parents` alone, see above
    with counter:
        result = call()
    found = counter.get_flop_counts().get("Global", {})
    return result, Counter({str(operator).removeprefix("aten."): flops for operator, flops in found.items()})


def flops_of(operator: OpOverload, args: Sequence[Any], kwargs: Mapping[str, Any], result: object) -> int:
    """FLOPs of one call of an operator as a CPU runs it, fused kernels included; 0 for what is not counted.

    The backward of fused attention counts without the forward that it computes again, as `counted` has it.
    """
    packet = operator.overloadpacket
    if packet in _VECTORS:
        return int(_VECTORS[packet](*(one.shape for one in args if isinstance(one, Tensor))))
    if packet in _FUSED:
        return _FUSED[packet](*args)
    formula: Callable[..., int] | None = flop_registry.get(packet)
    return 0 if formula is None else int(formula(*args, **kwargs, out_val=result))


def _attention(query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    """Queries by keys, and weights by values: two products a head."""
    return 2 * prod(query.shape) * key.shape[-2] + 2 * prod(query.shape[:-1]) * key.shape[-2] * value.shape[-1]


def _attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor, *_: object) -> int:
    return 2 * _attention(query, key, value)


def _recurrent(given: Tensor, of_input: Tensor, of_state: Tensor, *_: object) -> int:
    """One layer in one direction: two products a step. given: `[T, B, C]`."""
    return 2 * prod(given.shape[:-1]) * (of_input.numel() + of_state.numel())


def _recurrent_backward(given: Tensor, of_input: Tensor, of_state: Tensor, *_: object) -> int:
    return 2 * _recurrent(given, of_input, of_state)


class _NoModules(nullcontext[None]):
    """In the place of what tells which module an operator is called in."""

    parents = frozenset({"Global"})


def _matrix_vector(matrix: Sequence[int], vector: Sequence[int], **_: object) -> int:
    return 2 * prod(matrix)


def _added_matrix_vector(added: Sequence[int], matrix: Sequence[int], vector: Sequence[int], **_: object) -> int:
    return 2 * prod(matrix)


# Which torch 2.13 does not count.
_VECTORS: dict[object, Callable[..., int]] = {
    torch.ops.aten.mv: _matrix_vector,
    torch.ops.aten.dot: _matrix_vector,
    torch.ops.aten.addmv: _added_matrix_vector,
}
# Of a CPU, that the meta device runs as the products of which they consist.
_FUSED: dict[object, Callable[..., int]] = {
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu: _attention,
    torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward: _attention_backward,
    torch.ops.aten.mkldnn_rnn_layer: _recurrent,
    torch.ops.aten.mkldnn_rnn_layer_backward: _recurrent_backward,
}
