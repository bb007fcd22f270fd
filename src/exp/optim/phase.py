"""Phases of a training step, such as the steps of a discriminator and a generator.

A phase selects terms of the objective, the parameters that these terms train, and an optimizer.
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
        name: The name of the phase in the config.
        terms: The names of the objective's terms in this phase. The loss of the phase is the weighted sum of these
            terms.
        parameters: Patterns of the parameters to train. Other parameters get no gradient in this phase.
        optimization: The settings of the optimizer and the schedule.
        owns_optimizer: Whether the config has an optimizer for this phase. If false (default), the phase uses the
            top-level `optimizer`.
        owns_scheduler: Whether the config has a schedule for this phase. If false (default), the phase uses the
            top-level `scheduler`.
        gradient_clip_val: Limit of the gradients, as in Lightning's Trainer. None (default): no clipping.
        gradient_clip_algorithm: `norm` (default) or `value`, as in Lightning's Trainer.
        every_n_steps: The interval n between steps with this phase. The phase runs in steps 1, n + 1, 2 n + 1 and so
            on. Default: 1.
        repeats: The number of runs of the phase in a step. The runs have the same batch, but different random numbers.
            Default: 1.
        forward: The forward program or method of the network that the phase calls. None (default): the network's own
            forward.
        simultaneous: Whether the phase shares the forward pass of the previous phase. If true, both phases must have
            the same every_n_steps, repeats and forward, and must train different parameters. The optimizers step after
            the backward passes of both phases. Default: false.
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
        """Return whether the phase runs in the step with this number. The number of the first step is 1."""
        return (step - 1) % self.every_n_steps == 0

    def make(
        self, network: nn.Module, *, total_steps: int | None, total_epochs: int | None = None
    ) -> tuple[Optimizer, LRScheduler | None]:
        """Return the optimizer and the schedule for the parameters of the phase.

        Args:
            network: The network. The parameters must be on their final device.
            total_steps: The number of optimizer steps of the whole run. None if unknown.
            total_epochs: The number of epochs of the whole run. Default: None.

        Raises:
            ConfigError: The settings of the optimizer or the schedule are invalid.
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
    """Return the groups of phases that share a forward pass, in order.

    Returns:
        For each group, the index of the first phase, and the list of phases in the group.
    """
    turns: list[tuple[int, list[Phase]]] = []
    for place, phase in enumerate(phases):
        if phase.simultaneous and turns:
            turns[-1][1].append(phase)
        else:
            turns.append((place, [phase]))
    return turns


class PhaseOptimizers(Optimizer):
    """The optimizers of all phases, combined into a single optimizer for Lightning's Trainer.

    The method `step` must not be called, because each phase steps its own optimizer. `param_groups` contains the same
    group objects as the optimizers of the phases. A parameter may be in several groups.

    Args:
        optimizers: The optimizer of each phase, by name of the phase.
    """

    def __init__(self, optimizers: Mapping[str, Optimizer]) -> None:
        # The base class receives a dummy parameter, because the base class rejects a parameter that is in two groups.
        super().__init__([torch.zeros(0)], {})
        self.optimizers = dict(optimizers)
        self._gather()

    def step(self, closure: Callable[[], float] | None = None) -> NoReturn:
        raise RunError("PhaseOptimizers.step was called; expected a step of each phase's own optimizer")

    def zero_grad(self, set_to_none: bool = True) -> None:
        """Clear the gradients of all phases, so that a phase does not use the gradients of another phase."""
        for optimizer in self.optimizers.values():
            optimizer.zero_grad(set_to_none=set_to_none)

    def state_dict(self) -> State:
        return {"phases": {name: optimizer.state_dict() for name, optimizer in self.optimizers.items()}}

    def load_state_dict(self, state_dict: State) -> None:
        """Load the state of each phase's optimizer.

        Raises:
            RunError: The state is of a run without phases, or with other phases.
        """
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
    """The schedule of a phase, for Lightning.

    The attribute `optimizer` is the PhaseOptimizers object, because Lightning accepts only schedules of that optimizer.
    """

    def __init__(self, *, phase: str, schedule: LRScheduler, optimizer: PhaseOptimizers) -> None:
        self.phase, self.schedule, self.optimizer = phase, schedule, optimizer

    def state_dict(self) -> State:
        return self.schedule.state_dict()

    def load_state_dict(self, state_dict: State) -> None:
        self.schedule.load_state_dict(state_dict)


def each_optimizer(optimizers: Sequence[Optimizer]) -> list[Optimizer]:
    """Return the optimizers that make steps. The optimizers of the phases replace a PhaseOptimizers object."""
    return [
        one
        for optimizer in optimizers
        for one in (optimizer.optimizers.values() if isinstance(optimizer, PhaseOptimizers) else (optimizer,))
    ]


def name_rates(optimizer: Optimizer, rates: Sequence[float], *, phase: str | None = None) -> dict[str, float]:
    """Return the learning rates of an optimizer's groups by TensorBoard tag.

    A tag contains the name of the group, or the number of a group without a name. In a run with phases, the name of the
    phase precedes the name of the group. If the optimizer has only the default group, the tag has only the name of the
    phase.

    Args:
        optimizer: The optimizer.
        rates: The learning rate of each group.
        phase: The name of the phase. None (default) if the run has no phases.
    """
    names = [str(group.get("name", number)) for number, group in enumerate(optimizer.param_groups)]
    if phase is not None:
        names = [phase] if names in ([REST], ["0"]) else [f"{phase}/{name}" for name in names]
    return {f"optimizer/lr/{name}": rate for name, rate in zip(names, rates, strict=True)}
