"""The checks of phases against the network: parameters, forwards and optimizers."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from torch import nn
from torch.optim import LBFGS, Optimizer

from exp.check.optimizer_steps import rate_errors, step_errors
from exp.errors import ConfigError, ErrorDetails, unsuitable
from exp.models.containers import ProgramModel, forward_names
from exp.optim.parameter_groups import pattern_errors, trained_parameters, unmatched_parameters
from exp.optim.phase import Phase, turns_of
from exp.spelling import among, did_you_mean

SHOWN = 4


def phase_errors(
    phases: Sequence[Phase], network: nn.Module, *, steps: int, epochs: int, made: list[Optimizer]
) -> list[ErrorDetails]:
    """Return the errors of phases that do not match the network.

    These are wrong parameter patterns, forwards and optimizers, and parameters that no phase trains.

    Args:
        phases: Phases of the run.
        network: Network on the meta device, with the sizes of all layers.
        steps: Number of optimizer steps of the run, for schedules.
        epochs: Number of epochs of the run, for schedules.
        made: List to which this function adds the optimizers without an error.
    """
    errors = [error for phase in phases for error in forward_errors(phase, network)]
    patterns = [
        error
        for phase in phases
        for error in pattern_errors(network, phase.parameters, key=f"phases.{phase.name}.parameters")
    ]
    if patterns:
        return [*errors, *patterns]
    errors += _claimed_twice(phases, network)
    return [*errors, *_untrained_errors(phases, network), *_optimizer_errors(phases, network, steps, epochs, made)]


def forward_errors(phase: Phase, network: nn.Module) -> Iterator[ErrorDetails]:
    """Yield an error if the key `forward` of a phase names a forward that the network does not have."""
    if phase.forward is None or phase.forward in forward_names(network):
        return
    names = forward_names(network)
    kind = "programs of model.programs" if isinstance(network, ProgramModel) else f"methods of {type(network).__name__}"
    expected = f"null, or one of the {kind}: "
    fix = None if names else "Define the program in model.programs, or write null for the network's own forward"
    fix = did_you_mean(phase.forward, names) or fix
    yield unsuitable(
        f"phases.{phase.name}.forward",
        phase.forward,
        "which the network does not have",
        expected + among(names, word=phase.forward),
        fix,
    )


def _untrained_errors(phases: Sequence[Phase], network: nn.Module) -> Iterator[ErrorDetails]:
    """Yield the error of trainable parameters that no phase trains."""
    names = unmatched_parameters(network, [pattern for phase in phases for pattern in phase.parameters])
    if names:
        fix = "Add a pattern to the parameters of a phase, or freeze the parameters with freeze.parameters"
        expected = "each trainable parameter in a phase"
        yield unsuitable("phases", among(names, count=SHOWN), "which no phase trains", expected, fix)


def _claimed_twice(phases: Sequence[Phase], network: nn.Module) -> Iterator[ErrorDetails]:
    """Yield the error of a parameter that two simultaneous phases train, because their gradients would add up."""
    for _, group in turns_of(phases):
        owners: dict[int, str] = {}
        for phase in group:
            own = trained_parameters(network, phase.parameters)
            names = {id(one): name for name, one in network.named_parameters()}
            both = next((one for one in own if id(one) in owners), None)
            if both is not None:
                expected = "different parameters in simultaneous phases"
                fix = f"Or write phases.{phase.name}.simultaneous=false"
                because = f"which the simultaneous phase phases.{owners[id(both)]} also trains"
                yield unsuitable(f"phases.{phase.name}.parameters", names[id(both)], because, expected, fix)
            owners |= {id(one): phase.name for one in own}


def _optimizer_errors(
    phases: Sequence[Phase], network: nn.Module, steps: int, epochs: int, made: list[Optimizer]
) -> Iterator[ErrorDetails]:
    for phase in phases:
        try:
            optimizer, _ = phase.make(network, total_steps=steps, total_epochs=epochs)
        except ConfigError as error:
            yield from error.errors
            continue
        own = f"phases.{phase.name}.optimizer" if phase.owns_optimizer else "optimizer"
        yield from step_errors(phase.optimization, network, optimizer, key=own, has_closure=False)
        key = f"phases.{phase.name}.scheduler" if phase.owns_scheduler else "scheduler"
        yield from rate_errors(phase.optimization, optimizer, key=key, steps=lambda: None, epochs=epochs)
        if isinstance(optimizer, LBFGS):
            expected = "an optimizer that uses the gradients that the phase has computed"
            yield unsuitable(own, "LBFGS", "which runs the forward several times per step", expected)
        else:
            made.append(optimizer)
