"""Do the phases fit the network and the strategy? Each parameter is trained by one at least, each forward is there."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from torch import nn
from torch.optim import LBFGS, Optimizer

from exp.errors import ConfigError, Fault
from exp.models.containers import ProgramModel, forward_names
from exp.objectives.objective import Objective
from exp.optim.parameter_groups import pattern_faults, unmatched_parameters
from exp.optim.phase import Phase
from exp.spelling import among, did_you_mean
from exp.strategies.auto import Auto
from exp.strategies.ddp import DDP
from exp.strategies.placement import Placement
from exp.strategies.single import Single

SHOWN = 4
# Options of ddp that tell DistributedDataParallel's reducer what to do, and their defaults.
OF_THE_REDUCER = {
    "find_unused_parameters": False,
    "gradient_as_bucket_view": True,
    "static_graph": False,
    "bucket_cap_mb": None,
}


def phase_faults(
    phases: Sequence[Phase], network: nn.Module, *, lengths: Mapping[str, int | None], made: list[Optimizer]
) -> list[Fault]:
    """The faults between phases and network: patterns, forwards, parameters that none trains, optimizers.

    network: on the meta device, every layer sized. lengths: total_steps and total_epochs, for schedules. made: takes
        the optimizers that have no fault here.
    """
    faults = [fault for phase in phases for fault in forward_faults(phase, network)]
    patterns = [
        fault
        for phase in phases
        for fault in pattern_faults(network, phase.parameters, key=f"phases.{phase.name}.parameters")
    ]
    if patterns:
        return [*faults, *patterns]
    return [*faults, *_untrained(phases, network), *_optimizer_faults(phases, network, lengths, made)]


def forward_faults(phase: Phase, network: nn.Module) -> Iterator[Fault]:
    """A forward that the network does not have."""
    if phase.forward is None or phase.forward in forward_names(network):
        return
    names = forward_names(network)
    kind = "programs of model.programs" if isinstance(network, ProgramModel) else f"methods of {type(network).__name__}"
    cure = None if names else "Write the program below model.programs, or null for the network's own forward"
    yield Fault(
        key=f"phases.{phase.name}.forward",
        got=f"{phase.forward!r}, which the network does not have",
        expected=f"null, or one of the {kind}: {among(names, word=phase.forward)}",
        cure=did_you_mean(phase.forward, names) or cure,
    )


def _untrained(phases: Sequence[Phase], network: nn.Module) -> Iterator[Fault]:
    """Parameters that learn nothing are a mistake, unless the model says that they are frozen."""
    names = unmatched_parameters(network, [pattern for phase in phases for pattern in phase.parameters])
    if names:
        more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
        yield Fault(
            key="phases",
            got=f"no phase trains {', '.join(names[:SHOWN])}{more}",
            expected="each parameter in a phase",
            cure="Add a pattern to the parameters of one, or freeze them: model.freeze, with a container of exp's",
        )


def _optimizer_faults(
    phases: Sequence[Phase], network: nn.Module, lengths: Mapping[str, int | None], made: list[Optimizer]
) -> Iterator[Fault]:
    for phase in phases:
        try:
            optimizer, _ = phase.make(network, **lengths)
        except ConfigError as error:
            yield from error.faults
            continue
        if isinstance(optimizer, LBFGS):
            yield Fault(
                key=f"phases.{phase.name}.optimizer" if phase.owns_optimizer else "optimizer",
                got="LBFGS, which runs the forward several times in a step",
                expected="an optimizer that steps once: a phase has its gradients by then",
            )
        else:
            made.append(optimizer)


def strategy_faults(strategy: Any, placement: Placement) -> Iterator[Fault]:
    """Phases run on one device, or as copies whose gradients they average themselves."""
    if placement.world_size == 1 and placement.devices_per_rank == 1:
        return
    if not isinstance(strategy, Auto | Single | DDP):
        got = f"phases with strategy={placement_word(strategy)}"
        yield Fault(key="strategy", got=got, expected="ddp, single or auto", cure="Write strategy=ddp")
    if isinstance(strategy, DDP):
        taken = {
            "communication_hook": strategy.communication_hook is not None,
            "local_sgd.every_n_steps": strategy.local_sgd.every_n_steps is not None,
            "sync_batchnorm": strategy.sync_batchnorm,
        }
        for key, is_set in taken.items():
            if is_set:
                yield Fault(
                    key=f"strategy.{key}",
                    got="set, with phases, which average their gradients after each backward themselves",
                    expected="false" if key == "sync_batchnorm" else "null",
                )
        for key, default in OF_THE_REDUCER.items():
            if strategy.options[key] != default:
                yield Fault(
                    key=f"strategy.{key}",
                    got=f"{_word(strategy.options[key])}, with phases, which run without ddp's reducer",
                    expected=f"{_word(default)}: it would do nothing",
                )


def _word(value: Any) -> str:
    return "null" if value is None else str(value).lower()


def placement_word(strategy: Any) -> str:
    """What a strategy is called on the command line."""
    return str(strategy.name) if hasattr(strategy, "name") else type(strategy).__name__


def objectives_by_forward(phases: Sequence[Phase], objective: Objective) -> dict[str | None, Objective]:
    """The terms that look at what each forward gives: all at the network's own where there are no phases."""
    if not phases:
        return {None: objective}
    names: dict[str | None, list[str]] = {}
    for phase in phases:
        names.setdefault(phase.forward, []).extend(phase.terms)
    return {forward: objective.only(terms) for forward, terms in names.items()}
