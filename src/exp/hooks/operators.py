"""The hook `operators`: every operator call of chosen steps."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, ExitStack
from typing import Any

import torch
from torch import nn

from exp.errors import RunError
from exp.files import write_whole
from exp.hooks.chosen_steps import OnChosenSteps
from exp.hooks.hook import Boundary, Values
from exp.hooks.operator_calls import OperatorCall, OperatorCalls
from exp.hooks.step import Step
from exp.hooks.values import Text

# A panel is read on one page; the file has all of them.
PANEL_ROWS = 300
HEADER = "| calls | module | operator | shapes | dtypes | autocast |\n|---:|---|---|---|---|---|"


class Operators(OnChosenSteps):
    """Lists the operator calls of a step's forward and backward, equal ones counted together.

    Each with the module that called it, shapes and dtypes, and what autocast did: the dtypes that it was given, or that
    the call is a cast of autocast's own. As the text `operators`, and whole in operators/step-<n>.md of the run
    directory. Rank 0's, over all micro-batches of the step; the optimizer's calls are not among them.

    steps: counted from 1; None is every `every_n_steps`.
    modules: patterns of the modules that calls are told by; a call within another counts for the one around it.
    """

    needs = frozenset({"whole_parameters", "all_layers", "own_backward", "one_thread", "python_in_step"})

    def __init__(
        self, *, steps: Sequence[int] | None = (1,), every_n_steps: int = 1, modules: Sequence[str] = ("*",)
    ) -> None:
        super().__init__(steps=steps, every_n_steps=every_n_steps, modules=modules)
        self._calls: OperatorCalls | None = None

    def teardown(self) -> None:
        if self._calls is not None:
            self._calls.end_backward()
            self._calls = None

    def around_forward(self, step: Step) -> AbstractContextManager[Any] | None:
        if step.rank != 0:
            return None
        if self._calls is None:
            self._calls = OperatorCalls()
        self._calls.end_backward()
        stack = ExitStack()
        stack.enter_context(torch.compiler.set_stance("force_eager"))
        stack.enter_context(self._calls.forward())
        return stack

    def forward_pre(self, name: str, module: nn.Module, inputs: tuple[Any, ...]) -> None:
        if self._calls is not None:
            self._calls.modules.begin(name)

    def forward(self, name: str, module: nn.Module, inputs: tuple[Any, ...], output: Any) -> None:
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
                raise RunError(
                    f"{path} cannot be written: {error.strerror}. Make room, or leave the hook out"
                ) from error
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
