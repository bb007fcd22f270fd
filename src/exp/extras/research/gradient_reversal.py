"""The hook `gradient_reversal`: reverses the gradient at chosen modules."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from annotated_types import Ge
from torch import Tensor, nn

from exp.errors import ErrorDetails, RunError
from exp.extras.research.gradient_transform import At, GradientTransform
from exp.functions.at_least_float32 import at_least_float32
from exp.functions.identities import gradient_reversal, progressive_weight
from exp.hooks.hook import Boundary
from exp.hooks.step import Step

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class GradientReversal(GradientTransform):
    """Hook that multiplies the gradient at modules by -lambda, as in Ganin and Lempitsky 2015, arXiv:1409.7495.

    The hook has the same effect as a gradient reversal layer of exp.functions.gradient_layers before each module.

    Args:
        modules: Name patterns of modules, such as the head that classifies domains.
        weight: The factor lambda, at least 0. If the schedule is progressive, lambda increases towards this value.
            Default: 1.
        at: "input": only modules before the matching module in the forward get the reversed gradient. "output": the
            matching module gets it as well. Default: input.
        schedule: "constant": lambda is `weight` in all steps. "progressive": lambda is weight * (2 / (1 + exp(-10 * p))
            - 1), as in the paper, and is logged as `gradient_reversal/weight`. p is the completed fraction of the run's
            optimizer steps, from 0 to 1. Default: constant.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str],
        weight: Annotated[float, Ge(0)] = 1.0,
        at: At = "input",
        schedule: Literal["constant", "progressive"] = "constant",
    ) -> None:
        super().__init__(modules=modules, at=at)
        self.weight, self.schedule = weight, schedule
        self._now: float | Tensor = weight
        self._of_step: int | None = None
        self._logged = 0.0

    def overrides(self, method: str) -> bool:
        if method in ("passed", "after_step"):
            return self.schedule == "progressive"
        return super().overrides(method)

    def errors(self, planned: Blueprint) -> Iterable[ErrorDetails]:
        yield from super().errors(planned)
        trainer = planned.settings.trainer
        endless = all(limit in (None, -1) for limit in (trainer.max_steps, trainer.max_epochs))
        if self.schedule == "progressive" and endless:
            yield self.error(
                "schedule",
                got="progressive in a run without an end in steps",
                expected="a run with a known length: the weight depends on its completed share",
                fix=f"Add trainer.max_steps=..., or write hooks.{self.name}.schedule=constant",
            )

    def setup(self, network: nn.Module) -> None:
        if self.schedule == "progressive":
            parameter = next(network.parameters())
            dtype = at_least_float32(parameter.dtype)
            # Lambda is a tensor, because torch.compile would compile the network again for each new number.
            self._now = torch.zeros((), dtype=dtype, device=parameter.device)
        self._of_step = None

    def passed(self, boundary: Boundary, step: Step) -> None:
        if self._of_step == step.index:
            return
        if step.total_steps is None:
            raise RunError(
                f"hooks.{self.name}.schedule is progressive, and the length of the run is not known. Add "
                f"trainer.max_steps=..., or write hooks.{self.name}.schedule=constant"
            )
        self._of_step = step.index
        done = (step.index - 1) / step.total_steps
        self._logged = self.weight * progressive_weight(done)
        assert isinstance(self._now, Tensor)
        self._now.fill_(self._logged)

    def after_step(self, step: Step) -> dict[str, float]:
        return {"gradient_reversal/weight": self._logged}

    def change(self, tensor: Tensor) -> Tensor:
        return gradient_reversal(tensor, self._now)
