"""The hook `gradient_reversal`: what lies before a module learns the opposite of what the module does."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Annotated, Literal

import torch
from annotated_types import Ge, Gt
from torch import Tensor, nn

from exp.errors import Fault, RunError
from exp.extras.research.gradient_transform import At, GradientTransform
from exp.functions.at_least_float32 import at_least_float32
from exp.functions.identities import gradient_reversal, progressive_weight
from exp.hooks.hook import Boundary
from exp.hooks.step import Step

if TYPE_CHECKING:
    from exp.strategies.strategy import Blueprint


class GradientReversal(GradientTransform):
    """The gradient reversal of functions/identities.py at modules, with the weight of the paper's schedule by choice.

    Ganin and Lempitsky 2015, arXiv:1409.7495. As the layer exp.models.layers.GradientReversal before each module.

    modules: such as the head that tells domains apart.
    weight: lambda, the factor on the reversed gradient, 0 or more; with a schedule the one that it grows to.
    at: input: the module learns, what lies before it unlearns. output: the module unlearns, too.
    schedule: constant; or progressive, weight * (2 / (1 + exp(-steepness * p)) - 1) with p the share of the run's
        optimizer steps that are done, which is logged as `gradient_reversal/weight`.
    """

    def __init__(
        self,
        *,
        modules: Sequence[str],
        weight: Annotated[float, Ge(0)] = 1.0,
        at: At = "input",
        schedule: Literal["constant", "progressive"] = "constant",
        steepness: Annotated[float, Gt(0)] = 10.0,
    ) -> None:
        super().__init__(modules=modules, at=at)
        self.weight, self.schedule, self.steepness = weight, schedule, steepness
        self._now: float | Tensor = weight
        self._of_step: int | None = None
        self._logged = 0.0

    def overrides(self, method: str) -> bool:
        if method in ("passed", "after_step"):
            return self.schedule == "progressive"
        return super().overrides(method)

    def faults(self, planned: Blueprint) -> Iterable[Fault]:
        yield from super().faults(planned)
        trainer = planned.config["trainer"]
        endless = all(trainer[name] in (None, -1) for name in ("max_steps", "max_epochs"))
        if self.schedule == "progressive" and endless:
            yield self.fault(
                "schedule",
                got="progressive in a run without an end in steps",
                expected="a run whose length is known: the weight follows the share of it that is done",
                cure="Add trainer.max_steps=... or trainer.max_epochs=..., or write "
                f"hooks.{self.name}.schedule=constant",
            )

    def setup(self, network: nn.Module) -> None:
        if self.schedule == "progressive":
            parameter = next(network.parameters())
            dtype = at_least_float32(parameter.dtype)
            # In a tensor: a compiled network would be compiled anew for every number.
            self._now = torch.zeros((), dtype=dtype, device=parameter.device)
        self._of_step = None

    def passed(self, boundary: Boundary, step: Step) -> None:
        if self._of_step == step.index:
            return
        if step.total_steps is None:
            raise RunError(
                f"hooks.{self.name}.schedule is progressive, and the length of the run is not known; the weight "
                f"follows the share of it that is done. Add trainer.max_steps=..., or write "
                f"hooks.{self.name}.schedule=constant"
            )
        self._of_step = step.index
        done = (step.index - 1) / step.total_steps
        self._logged = self.weight * progressive_weight(done, steepness=self.steepness)
        assert isinstance(self._now, Tensor)
        self._now.fill_(self._logged)

    def after_step(self, step: Step) -> dict[str, float]:
        return {"gradient_reversal/weight": self._logged}

    def change(self, tensor: Tensor) -> Tensor:
        return gradient_reversal(tensor, self._now)
