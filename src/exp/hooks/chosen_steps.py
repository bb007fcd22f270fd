"""A hook that looks closely at few steps: those of a list, or every so many."""

from __future__ import annotations

from collections.abc import Sequence

from exp.hooks.hook import Hook


class OnChosenSteps(Hook):
    """Is due at the optimizer steps of a list.

    steps: counted from 1; None is every `every_n_steps`.
    """

    def __init__(
        self, *, steps: Sequence[int] | None = (1,), every_n_steps: int = 1, modules: Sequence[str] = ("*",)
    ) -> None:
        super().__init__(every_n_steps=every_n_steps, modules=modules)
        if steps is not None and (not steps or any(step < 1 for step in steps)):
            expected = "optimizer steps counted from 1, such as [1, 100], or null for every_n_steps"
            raise ValueError(f"steps is {list(steps)}; expected {expected}")
        self.steps = None if steps is None else frozenset(steps)

    def due(self, index: int) -> bool:
        return super().due(index) if self.steps is None else index in self.steps
