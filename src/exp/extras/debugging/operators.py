"""The hook `operators`: every operator call of chosen steps."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd.graph import Node
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from exp.files import write_whole
from exp.hooks.hook import OBSERVING, Boundary, OnChosenSteps, Values
from exp.hooks.module_calls import ModuleCalls, running_node
from exp.hooks.panels import Text
from exp.hooks.step import Step
from exp.nested import tensors_in
from exp.output import tell_not_written
from exp.shared_types import dtype_name

# A panel is read on one page; the file has all of them.
PANEL_ROWS = 300
HEADER = "| calls | module | operator | shapes | dtypes | autocast |\n|---:|---|---|---|---|---|"


class Operators(OnChosenSteps):
    """Lists the operator calls of a step's forward and backward, equal ones counted together.

    Each with the module that called it, shapes and dtypes, and what autocast did: the dtypes that it was given, or that
    the call is a cast of autocast's own. As the text `operators`, and whole in operators/step-<n>.md of the run
    directory. Rank 0's, over all micro-batches of the step; the optimizer's calls are not among them.

    steps: counted from 1.
    modules: patterns of the modules that calls are told by; a call within another counts for the one around it.
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
        if self.directory is not None:
            path = self.directory / self.name / f"step-{step.index}.md"
            try:
                path.parent.mkdir(exist_ok=True)
                write_whole(path, f"# Operators of step {step.index}\n\n{table(calls, rows=None)}\n")
            except OSError as error:
                tell_not_written(str(path), error)
        return {self.name: Text(table(calls, rows=PANEL_ROWS))}


def table(calls: OperatorCalls, *, rows: int | None) -> str:
    """In Markdown, forward first, each kind of call in the order in which it came first. rows: at most; None is all."""
    kinds = list(calls.counts.items())
    text = []
    for direction in ("forward", "backward"):
        own = [(kind, count) for kind, count in kinds if kind.direction == direction]
        shown = own if rows is None else own[:rows]
        text += [f"## {direction}: {sum(count for _, count in own)} calls", "", HEADER]
        text += [_row(kind, count) for kind, count in shown]
        if len(shown) < len(own):
            text.append(f"\n{len(own) - len(shown)} more kinds of calls are in the file.")
        text.append("")
    return "\n".join(text).rstrip()


def _row(kind: OperatorCall, count: int) -> str:
    autocast = "its own cast" if kind.by_autocast else f"given {kind.given}" if kind.given else ""
    module = kind.module or "(network)"
    return f"| {count} | {module} | {kind.operator} | {kind.shapes} | {kind.dtypes} | {autocast} |"


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
        self._backward = ExitStack()
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
        self._backward.enter_context(self._dispatch)

    def end_backward(self) -> None:
        """Safe where no backward is under way."""
        self._in_backward = False
        self._backward.close()

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
    """Tells each operator's name, the tensors that it takes and those that it gives."""

    def __init__(self, note: Callable[[str, list[Tensor], list[Tensor]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]  # torch's, which has no types
        self.note = note

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        # Before it runs: an operator may change its inputs in place.
        taken = [*_tensors(args), *_tensors(kwargs)]
        result = func(*args, **kwargs)
        self.note(str(func), taken, _tensors(result))
        return result


def _tensors(data: object) -> list[Tensor]:
    return list(tensors_in(data))


def _floating(tensors: list[Tensor]) -> frozenset[torch.dtype]:
    return frozenset(tensor.dtype for tensor in tensors if tensor.is_floating_point())


def _each(taken: list[Tensor], given: list[Tensor], text: Callable[[Tensor], str]) -> str:
    return f"{' '.join(map(text, taken)) or '-'} → {' '.join(map(text, given)) or '-'}"
