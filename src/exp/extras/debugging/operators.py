"""The hook `operators`: logs the operator calls of selected steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.utils._python_dispatch import TorchDispatchMode

from exp.extras.debugging.chosen_steps import OnChosenSteps
from exp.extras.debugging.module_calls import ModuleCalls, running_node
from exp.hooks.hook import OBSERVING, Boundary, Values
from exp.hooks.panels import Text
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.shared_types import dtype_name

HEADER = "| calls | module | operator | shapes | dtypes |\n|---:|---|---|---|---|"
# Module names for backward operators outside all modules. AUTOGRAD: the gradient of the loss. PARAMETERS: gradients
# that are accumulated in parameters.
AUTOGRAD, PARAMETERS = "(autograd)", "(parameters)"


class Operators(OnChosenSteps):
    """Hook that lists the operator calls of the forward and backward passes of a step.

    A row has the number of equal calls, their module, operator, shapes and dtypes. A cast by autocast is the operator
    `_to_copy`. The list is logged as a text with the tag `operators`. It covers rank 0 and all micro-batches of the
    step. Operators of the optimizer are left out.

    Args:
        steps: Optimizer steps, counted from 1. Default: 1.
        modules: Name patterns of modules. A call in a module that does not match is assigned to the matching module
            that contains it. Default: *.
    """

    needs = frozenset({"whole_parameters", "all_layers", "own_backward", "one_thread"})

    _calls: OperatorCalls | None = None

    def teardown(self) -> None:
        if self._calls is not None:
            self._calls.end_backward()
            self._calls = None

    def around_forward(self, step: Step) -> AbstractContextManager[object] | None:
        if step.rank != 0:
            return None
        if self._calls is None:
            self._calls = OperatorCalls()
        self._calls.end_backward()
        stack = ExitStack()
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(self._calls.forward())
        return stack

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[object, ...]) -> None:
        if self._calls is not None:
            self._calls.modules.begin(name)

    def forward(self, name: str, module: nn.Module, inputs: tuple[object, ...], output: object) -> None:
        if self._calls is not None:
            self._calls.modules.end(name)

    def passed(self, boundary: Boundary, step: Step) -> None:
        if self._calls is None:
            return
        if boundary == "forward":
            self._calls.begin_backward()
        elif boundary == "backward":
            self._calls.end_backward()

    def after_step(self, step: Step) -> Values | None:
        calls, self._calls = self._calls, None
        if calls is None:
            return None
        calls.end_backward()
        return {self.name: Text(table(calls))}


class OperatorCall(NamedTuple):
    """Properties of an operator call. Calls with equal properties are counted together.

    Args:
        direction: forward or backward.
        module: Name of the innermost module of the call. A backward call belongs to the module that created its
            autograd node in the forward. The name is `objective` for the loss.
        operator: Name of the operator in torch, without `aten`.
        shapes: Shapes of the input and output tensors.
        dtypes: Dtypes of the input and output tensors.
    """

    direction: str
    module: str
    operator: str
    shapes: str
    dtypes: str


class OperatorCalls:
    """Counter of operator calls, in the order of their first occurrence.

    Calls of the forward are counted inside the block `forward()`. Calls of the backward are counted between
    `begin_backward` and `end_backward`, in the thread that runs the backward.
    """

    def __init__(self) -> None:
        self.modules = ModuleCalls(outside="objective")
        self.counts: Counter[OperatorCall] = Counter()
        self._dispatch = _Dispatch(self._note)
        self._backward = ExitStack()
        self._in_backward = False

    @contextmanager
    def forward(self) -> Iterator[None]:
        """Return a context that counts the operator calls of the forward and the objective of one micro-batch."""
        self.modules = ModuleCalls(outside="objective")
        with self._dispatch:
            yield

    def begin_backward(self) -> None:
        self.end_backward()
        self._in_backward = True
        self._backward.enter_context(self._dispatch)

    def end_backward(self) -> None:
        """Stop counting calls of the backward. If no backward is running, do nothing."""
        self._in_backward = False
        self._backward.close()

    def _note(self, operator: str, taken: list[Tensor], given: list[Tensor]) -> None:
        # A detach computes nothing, and the number of detaches depends on other hooks.
        if OBSERVING.depth or operator == "aten.detach.default":
            return
        call = OperatorCall(
            direction="backward" if self._in_backward else "forward",
            module=_maker(running_node(), self.modules) if self._in_backward else self.modules.current,
            operator=operator.removeprefix("aten.").removesuffix(".default"),
            shapes=_each(taken, given, lambda tensor: str(list(tensor.shape))),
            dtypes=_each(taken, given, lambda tensor: dtype_name(tensor.dtype)),
        )
        self.counts[call] += 1


def _maker(node: Node | None, modules: ModuleCalls) -> str:
    """Return the name of the module to which a backward call belongs.

    Args:
        node: Autograd node that runs the call. None: the call belongs to no node.
        modules: Calls of modules in the forward.
    """
    if node is None:
        return AUTOGRAD
    return PARAMETERS if node.name().endswith("AccumulateGrad") else modules.maker(node)


def table(calls: OperatorCalls) -> str:
    """Return the counted calls as Markdown tables, one for the forward and one for the backward."""
    text = []
    for direction in ("forward", "backward"):
        own = [(call, count) for call, count in calls.counts.items() if call.direction == direction]
        text += [f"## {direction}: {sum(count for _, count in own)} calls", "", HEADER]
        for call, count in own:
            text.append(f"| {count} | {' | '.join([call.module or '(network)', *call[2:]])} |")
        text.append("")
    return "\n".join(text).rstrip()


class _Dispatch(TorchDispatchMode):
    """Dispatch mode that calls `note` with the name, input tensors and output tensors of each operator call."""

    def __init__(self, note: Callable[[str, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, which has no types
        self.note = note

    def __torch_dispatch__(
        self,
        func: Callable[..., object],
        types: object,
        args: Sequence[object] = (),
        kwargs: Mapping[str, object] | None = None,
    ) -> object:
        kwargs = kwargs or {}
        # The inputs are collected before the call, because an operator may change them in place.
        taken = [*tensors_in(args), *tensors_in(kwargs)]
        result = func(*args, **kwargs)
        self.note(str(func), taken, list(tensors_in(result)))
        return result


def _each(taken: list[Tensor], given: list[Tensor], text: Callable[[Tensor], str]) -> str:
    return f"{' '.join(map(text, taken)) or '-'} → {' '.join(map(text, given)) or '-'}"
