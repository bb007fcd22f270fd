"""Base class of the hooks `operators` and `dtypes`, which run at a list of optimizer steps."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated

from annotated_types import Ge, MinLen

from exp.hooks.hook import Hook

StepNumbers = Annotated[Sequence[Annotated[int, Ge(1)]], "optimizer steps counted from 1, such as [1, 100]", MinLen(1)]


class OnChosenSteps(Hook):
    """Base class of hooks that run at a list of optimizer steps.

    Args:
        steps: Optimizer steps, counted from 1. Default: 1.
        modules: Name patterns of modules; see Hook. Default: *.
    """

    def __init__(self, *, steps: StepNumbers = (1,), modules: Sequence[str] = ("*",)) -> None:
        super().__init__(modules=modules)
        self.steps = frozenset(steps)

    def due(self, index: int) -> bool:
        return index in self.steps
