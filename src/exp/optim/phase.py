"""A phase of a step: some terms of the objective, the parameters that they train, and their optimizer."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.errors import ConfigError, ErrorDetails, RunError
from exp.optim.optimizer import Optimization
from exp.optim.parameter_groups import REST

ClipAlgorithm = Literal["norm", "value"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """One backward and one optimizer of a step that has several.

    terms: names of the objective's terms, of which this phase's loss is the weighted sum.
    parameters: patterns of the names of the parameters that it trains; others get no gradient from it.
    optimization: its optimizer and schedule.
    owns_optimizer, owns_scheduler: whether they are its own in the config, or made from those at the top.
    gradient_clip_val, gradient_clip_algorithm: as the Trainer's; None does not clip.
    every_n_steps: it runs at the steps 1, n + 1, 2 n + 1, ...
    repeats: how often it runs in a step, over the same batch, with fresh randomness each time.
    forward: the network's program or method that it runs; None is the network's own forward.
    simultaneous: whether it takes its gradients from the same forward as the phase before it, and before that one's
        optimizer steps. The two have the same every_n_steps, repeats and forward, and train other parameters.
    """

    name: str
    terms: Sequence[str]
    parameters: Sequence[str]
    optimization: Optimization
    owns_optimizer: bool = False
    owns_scheduler: bool = False
    gradient_clip_val: float | None = None
    gradient_clip_algorithm: ClipAlgorithm = "norm"
    every_n_steps: int = 1
    repeats: int = 1
    forward: str | None = None
    simultaneous: bool = False

    def due(self, step: int) -> bool:
        """Whether it runs in a step, counted from 1."""
        return (step - 1) % self.every_n_steps == 0

    def make(
        self, network: nn.Module, *, total_steps: int | None, total_epochs: int | None = None
    ) -> tuple[Optimizer, LRScheduler | None]:
        """Its optimizer and schedule, as Optimization.make has them, for its own parameters.

        Raises: ConfigError, with the keys of the phase where optimizer or schedule are its own.
        """
        try:
            return self.optimization.make(
                network,
                total_steps=total_steps,
                total_epochs=total_epochs,
                parameters=self.parameters,
                shared=not self.owns_optimizer,
            )
        except ConfigError as error:
            raise ConfigError([self._placed(error) for error in error.errors]) from error

    def _placed(self, error: ErrorDetails) -> ErrorDetails:
        node = error.key.partition(".")[0]
        if (node == "optimizer" and self.owns_optimizer) or (node == "scheduler" and self.owns_scheduler):
            return dataclasses.replace(error, key=f"phases.{self.name}.{error.key}")
        return error


def turns_of(phases: Sequence[Phase]) -> list[tuple[int, list[Phase]]]:
    """Return the phases that run together, in order, each with the place of the first of them."""
    turns: list[tuple[int, list[Phase]]] = []
    for place, phase in enumerate(phases):
        if phase.simultaneous and turns:
            turns[-1][1].append(phase)
        else:
            turns.append((place, [phase]))
    return turns


class PhaseOptimizers(Optimizer):
    """The optimizers of all phases, as the one that a Trainer knows. It never steps: each phase steps its own.

    Its groups are those of the phases, the same objects, and a parameter may be in several of them.

    optimizers: by the phase's name.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # The base refuses a parameter in two groups, which two phases may well train.
        super().__init__([torch.zeros(0)], {})
        self.optimizers = dict(optimizers)
        self._gather()

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise RunError("the optimizers of phases were stepped together; each phase steps its own")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clears the gradients of all phases, due or not, so that no phase sees another's."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> dict[str, Any]:
        return {"phases": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}}

    def load_state_dict(self, state_dict: Mapping[str, Any]) -> None:
        """Raises: RunError where the state is not of these phases."""
        if "phases" not in state_dict:
            raise RunError("the checkpoint is of a run without phases; expected one of this run's phases")
        states = state_dict["phases"]
        if states.keys() != self.optimizers.keys():
            raise RunError(
                f"the checkpoint has the optimizers of the phases [{', '.join(states)}]; expected those of "
                f"[{', '.join(self.optimizers)}]. Repeat the overrides of that run"
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(states[name])
        self._gather()  # they have new ones now

    def _gather(self) -> None:
        self.param_groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


class PhaseSchedule:
    """A phase's schedule, in the form in which Lightning keeps it: attached to the optimizer that it knows."""

    def __init__(self, *, phase: str, schedule: LRScheduler, optimizer: PhaseOptimizers) -> None:
        self.phase, self.schedule, self.optimizer = phase, schedule, optimizer

    def state_dict(self) -> dict[str, Any]:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.schedule.load_state_dict(state_dict)


def each_optimizer(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """The optimizers that step: those of the phases in the place of the one that the Trainer knows."""
    return [
        one
        for optimizer in optimizers
        for one in (optimizer.optimizers.values() if isinstance(optimizer, PhaseOptimizers) else (optimizer,))
    ]


def name_rates(optimizer: Optimizer, rates: Sequence[float], *, phase: str | None = None) -> dict[str, float]:
    """Return the learning rates of an optimizer's groups by tag. The only group of a phase has the phase's name.

    Args:
        optimizer: Optimizer that has the groups.
        rates: Learning rate of each group.
        phase: Name of the phase. None if the steps have no phases.
    """
    names = [str(group.get("name", number)) for number, group in enumerate(optimizer.param_groups)]
    if phase is not None:
        names = [phase] if names in ([REST], ["0"]) else [f"{phase}/{name}" for name in names]
    return {f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
