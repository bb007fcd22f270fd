"""Phases of a training step.

Each phase has terms of the objective, the parameters that they train, and an optimizer.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, NoReturn

import torch
from torch import nn
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from exp.errors import ConfigError, ErrorDetails, RunError
from exp.optim.optimizer import Optimization
from exp.optim.parameter_groups import REST
from exp.optim.schedules import State

ClipAlgorithm = Literal["norm", "value"]


@dataclass(frozen=True, kw_only=True)
class Phase:
    """The settings of a phase of a training step: a backward pass and an optimizer step.

    Args:
        name: The name.
        terms: The names of the objective's terms in this phase. Their weighted sum is the loss.
        parameters: Patterns of the parameters to train. Other parameters get no gradient in this phase.
        optimization: The optimizer and schedule.
        owns_optimizer: Whether the config has an optimizer for this phase. If False, it uses the top-level `optimizer`.
        owns_scheduler: Whether the config has a schedule for this phase. If False, it uses the top-level `scheduler`.
        gradient_clip_val: See the argument of Lightning's Trainer. None for no clipping.
        gradient_clip_algorithm: See the argument of Lightning's Trainer.
        every_n_steps: The phase runs in steps 1, n + 1, 2 n + 1 and so on.
        repeats: The number of times the phase runs in a step, on the same batch but with new random numbers.
        forward: The network's forward program or method that the phase calls; None for the network's forward.
        simultaneous: Whether the phase uses the forward pass of the previous phase, before that phase's optimizer
            steps. Both phases must have the same every_n_steps, repeats and forward, and train different parameters.
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
        """Return whether the phase runs in a step. Steps are counted from 1."""
        return (step - 1) % self.every_n_steps == 0

    def make(
        self, network: nn.Module, *, total_steps: int | None, total_epochs: int | None = None
    ) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimizer and schedule of the phase's parameters; see Optimization.make.

        Raises:
            ConfigError: The settings are invalid. If the phase has its own optimizer or schedule, errors have the
                phase's keys.
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
            raise ConfigError([self._at_phase(one) for one in error.errors]) from error

    def _at_phase(self, error: ErrorDetails) -> ErrorDetails:
        node = error.key.partition(".")[0]
        if (node == "optimizer" and self.owns_optimizer) or (node == "scheduler" and self.owns_scheduler):
            return dataclasses.replace(error, key=f"phases.{self.name}.{error.key}")
        return error


def turns_of(phases: Sequence[Phase]) -> list[tuple[int, list[Phase]]]:
    """Return the lists of phases that share a forward pass, in order, each with the index of its first phase."""
    turns: list[tuple[int, list[Phase]]] = []
    for place, phase in enumerate(phases):
        if phase.simultaneous and turns:
            turns[-1][1].append(phase)
        else:
            turns.append((place, [phase]))
    return turns


class PhaseOptimizers(Optimizer):
    """The optimizers of all phases, combined to one optimizer for the Trainer. Its `step` must not be called.

    Each phase steps its own optimizer. The group objects are the same as those of the phases. A parameter may be in
    several groups.

    Args:
        optimizers: The optimizers by name of the phase.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # The base class receives a dummy parameter, because it rejects a parameter that two phases train.
        super().__init__([torch.zeros(0)], {})
        self.optimizers = dict(optimizers)
        self._gather()

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise RunError("PhaseOptimizers.step was called; expected a step of each phase's own optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all phases, so that no phase uses the gradients of another phase."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> State:
        return {"phases": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}}

    def load_state_dict(self, state_dict: State) -> None:
        """Load the state of each phase's optimizer. Raise RunError if the state has different phases."""
        if "phases" not in state_dict:
            raise RunError("the checkpoint is of a run without phases; expected one of a run with the same phases")
        states = state_dict["phases"]
        if states.keys() != self.optimizers.keys():
            raise RunError(
                f"the checkpoint has the optimizers of the phases [{', '.join(states)}]; expected those of "
                f"[{', '.join(self.optimizers)}]. Repeat the overrides of the run that wrote the checkpoint"
            )
        for name, optimizer in self.optimizers.items():
            optimizer.load_state_dict(states[name])
        self._gather()  # load_state_dict has replaced the groups

    def _gather(self) -> None:
        self.param_groups = [group for optimizer in self.optimizers.values() for group in optimizer.param_groups]


class PhaseSchedule:
    """A phase's schedule, attached to PhaseOptimizers, which is the only optimizer that Lightning has."""

    def __init__(self, *, phase: str, schedule: LRScheduler, optimizer: PhaseOptimizers) -> None:
        self.phase, self.schedule, self.optimizer = phase, schedule, optimizer

    def state_dict(self) -> State:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.schedule.load_state_dict(state_dict)


def each_optimizer(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that are stepped. A PhaseOptimizers is replaced by the optimizers of its phases."""
    return [
        one
        for optimizer in optimizers
        for one in (optimizer.optimizers.values() if isinstance(optimizer, PhaseOptimizers) else (optimizer,))
    ]


def name_rates(optimizer: Optimizer, rates: Sequence[float], *, phase: str | None = None) -> dict[str, float]:
    """Return the learning rates of an optimizer's groups by TensorBoard tag.

    If a phase has a single group without a name, the tag has the name of the phase.

    Args:
        optimizer: The optimizer.
        rates: The learning rate of each group.
        phase: The name of the phase; None if the run has no phases.
    """
    names = [str(group.get("name", number)) for number, group in enumerate(optimizer.param_groups)]
    if phase is not None:
        names = [phase] if names in ([REST], ["0"]) else [f"{phase}/{name}" for name in names]
    return {f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
