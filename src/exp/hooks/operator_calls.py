"""Every operator call of a forward and a backward: a dispatch mode, below autocast, and a function mode above it.

    network calls F.linear(float32, float32)        the function mode: what autocast was given
        autocast casts to bfloat16                  a call of _to_copy of its own
        aten.addmm(bfloat16, bfloat16)              the dispatch mode: what runs

A dispatch mode of this thread is taken along to the threads in which torch runs a backward on a GPU.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exp.hooks.observing import OBSERVING
from exp.hooks.replaying.autograd_nodes import running_node
from exp.hooks.replaying.module_calls import ModuleCalls
from exp.nested import tensors_in
from exp.types import dtype_name

# Functions that a network calls to cast; what they cast is not autocast's choice.
CASTS = ("to", "type", "float", "half", "bfloat16", "double", "type_as", "_to_copy")
CAST_OPERATOR = "aten._to_copy.default"
# In a backward, what no module's operator does: the loss's own gradient; gradients that arrive at parameters.
AUTOGRAD, PARAMETERS = "(autograd)", "(parameters)"


@dataclass(frozen=True, order=True, slots=True)
class OperatorCall:
    """What calls that are counted together have in common.

    direction: forward or backward. module: the innermost in whose forward it ran, or whose backward it is; the loss is
        `objective`. shapes, dtypes: of its tensors, in -> out. given: of a call that autocast changed, the dtypes that
        the network gave; empty otherwise. by_autocast: whether it is a cast that autocast put in.
    """

    direction: str
    module: str
    operator: str
    shapes: str
    dtypes: str
    given: str = ""
    by_autocast: bool = False


class OperatorCalls:
    """Counts calls, in the order in which each kind came first.

    Of a forward inside `forward()`; of what runs between `begin_backward` and `end_backward`, in the thread that
    calls backward.
    """

    def __init__(self) -> None:
        self.modules = ModuleCalls(outside="objective")
        self.counts: Counter[OperatorCall] = Counter()
        self._functions = _Functions()
        self._dispatch = _Dispatch(self._note)
        self._in_backward = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Around the forward and the objective of a micro-batch."""
        self.modules = ModuleCalls(outside="objective")
        with self._functions, self._dispatch:
            yield

    def begin_backward(self) -> None:
        self.end_backward()
        self._in_backward = True
        self._dispatch.__enter__()

    def end_backward(self) -> None:
        """Safe where no backward is under way."""
        if self._in_backward:
            self._in_backward = False
            self._dispatch.__exit__(None, None, None)

    def _note(self, operator: str, taken: list[Tensor], given: list[Tensor]) -> None:
        # A detach computes nothing, and how many autograd makes depends on who looks at what it keeps.
        if OBSERVING.depth or operator == "aten.detach.default":
            return
        casts, chosen = False, ""
        called = None if self._in_backward else self._functions.current
        if called is not None and called.is_under_autocast and called.name not in CASTS:
            casts = operator == CAST_OPERATOR
            if not casts and not _floating(taken) <= called.dtypes:
                chosen = ", ".join(sorted(map(dtype_name, called.dtypes)))
        self.counts[
            OperatorCall(
                direction="backward" if self._in_backward else "forward",
                module=self._behind(running_node()) if self._in_backward else self.modules.current,
                operator=operator.removeprefix("aten.").removesuffix(".default"),
                shapes=_each(taken, given, lambda tensor: str(list(tensor.shape))),
                dtypes=_each(taken, given, lambda tensor: dtype_name(tensor.dtype)),
                given=chosen,
                by_autocast=casts,
            )
        ] += 1

    def _behind(self, node: Node | None) -> str:
        """What a call in the backward belongs to."""
        if node is None:
            return AUTOGRAD
        return PARAMETERS if node.name().endswith("AccumulateGrad") else self.modules.maker(node)


@dataclass(frozen=True, slots=True)
class _Called:
    name: str
    dtypes: frozenset[torch.dtype]
    is_under_autocast: bool


class _Functions(TorchFunctionMode):
    """Knows the torch function that the network is calling, and the floating dtypes that it gave to it.

    And whether autocast acts on it, which below autocast nobody can say.
    """

    def __init__(self) -> None:
        super().__init__()
        self._stack: list[_Called] = []

    @property
    def current(self) -> _Called | None:
        return self._stack[-1] if self._stack else None

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        given = [*_tensors(args), *_tensors(kwargs)]
        is_under = bool(given) and torch.is_autocast_enabled(given[0].device.type)
        self._stack.append(_Called(getattr(func, "__name__", str(func)), _floating(given), is_under))
        try:
            return func(*args, **kwargs)
        finally:
            self._stack.pop()


class _Dispatch(TorchDispatchMode):
    def __init__(self, note: Callable[[str, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()
        self._note_call = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before it runs: an operator may change its inputs in place.
        taken = [*_tensors(args), *_tensors(kwargs)]
        result = func(*args, **kwargs)
        self._note_call(str(func), taken, _tensors(result))
        return result


def _tensors(data: Any) -> list[Tensor]:
    return list(tensors_in(data))


def _floating(tensors: list[Tensor]) -> frozenset[torch.dtype]:
    return frozenset(tensor.dtype for tensor in tensors if tensor.is_floating_point())


def _each(taken: list[Tensor], given: list[Tensor], text: Callable[[Tensor], str]) -> str:
    return f"{' '.join(map(text, taken)) or '-'} → {' '.join(map(text, given)) or '-'}"
