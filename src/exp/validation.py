"""Is this config right? Every fault at once, before anything is trained or written.

    1 values, keys, rules            config/check, first stage: no torch
    2 the data node                  its target and parameters; then the data fills in what its YAML leaves open
    3 all targets, forward programs  config/check, second stage
    4 placement                      enough devices for the strategy, and the precision on them
    5 shapes                         the network on the meta device, fed a batch of the data's shape; then what its
                                     optimizer and schedule refuse

A later step runs only where the earlier ones left what it needs.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from exp.check.parameters import program_fault
from exp.check.stages import first_stage, located, once, second_stage
from exp.config.reading import UNKNOWN, leaves, read
from exp.errors import ConfigError, ExpError, Fault, RunError
from exp.models.program_error import ProgramError
from exp.types import DataSpec

if TYPE_CHECKING:
    from torch import nn

    from exp.hooks.hook import Hook
    from exp.optim.phase import Phase
    from exp.strategies.placement import Placement
    from exp.strategies.strategy import Planned

# What the network, its objective and its metrics are built from.
SHAPE_KEYS = ("model", "data", "objective", "phases", "metrics", "seed", "security")
DATA_KEYS = ("data", "seed", "security")
DECLARED_KEYS = ("data.input_shape", "data.input_dtype", "data.num_classes", "data.num_outputs")
PLACEMENT_KEYS = ("strategy", "launch")
OPTIMIZATION_KEYS = ("optimizer", "scheduler", "trainer")
# What a strategy may have to refuse.
STRATEGY_KEYS = ("callbacks", "hooks", "metrics", "objective", "phases", "precision", "runtime", "trainer")
HOOK_KEYS = ("hooks", "security")
# What a hook may have to refuse.
KEYS_OF_HOOKS = ("data", "optimizer", "phases", "precision", "runtime", "strategy", "trainer")
ANY_LENGTH = 1_000_000_000


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the check found.

    faults: none where the config can run. notes: what could not be looked at, and why; and what a resume changes.
    placement, parameters: where it will run, and how many numbers the network holds; None where a fault hides it.
    """

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    placement: Placement | None
    parameters: int | None


@dataclass(frozen=True, kw_only=True)
class _Shapes:
    faults: Sequence[Fault] = ()
    notes: tuple[str, ...] = ()
    parameters: int | None = None


def validate(config: DictConfig) -> None:
    """Checks a composed config, and fills in what its data set's YAML leaves to the data.

    Raises: ConfigError with all faults.
    """
    faults = examine(config).faults
    if faults:
        raise ConfigError(faults)


def examine(config: DictConfig) -> Examination:
    """All faults of a composed config, and what will run where there are none.

    Fills in, in place, what the data set's YAML leaves to the data.
    """
    first = first_stage(config)
    faults, has_changed = _data_faults(config, first)
    faults += first_stage(config) if has_changed else first
    faults += second_stage(config)
    placement, more = _placement(config, faults)
    faults += more
    shapes = _shapes(config, faults, placement)
    faults = [*faults, *shapes.faults]
    more, notes = _resume(config, faults)
    faults = located(config, once([*faults, *more]))
    notes = (*shapes.notes, *notes)
    return Examination(faults=tuple(faults), notes=notes, placement=placement, parameters=shapes.parameters)


def compare_with_data(config: DictConfig) -> tuple[list[Fault], tuple[str, ...]]:
    """What the config declares of its data, held against the data, where that is on this machine. A run does it, too.

    Returns: the faults; and why nothing could be compared, where that is so.
    """
    from exp.build import build_data

    plain, _ = read(config)
    try:
        build_data(plain)
    except ExpError as error:
        faults = error.faults if isinstance(error, ConfigError) else ()
        declared = [fault for fault in faults if fault.key in DECLARED_KEYS]
        if declared:
            return located(config, declared), ()
        reason = faults[0] if faults else error
        return [], (f"the data was not compared with what the config declares of it: {reason}",)
    return [], ()


def _resume(config: DictConfig, faults: Sequence[Fault]) -> tuple[Sequence[Fault], Sequence[str]]:
    """Faults and notes of a config that is right by itself: does it go with the checkpoint that it names?"""
    if faults or config.resume is None:
        return [], []
    from exp.plan.resuming import examine_resume

    plain, _ = read(config)
    try:
        resuming = examine_resume(plain)
    except RunError as error:
        return [Fault(key="resume", got=str(error), expected="a checkpoint that exp wrote")], []
    return resuming.faults, resuming.notes


def _data_faults(config: DictConfig, first: Sequence[Fault]) -> tuple[list[Fault], bool]:
    """Before all else, for other nodes interpolate the shape and the classes that it fills in: whether it did."""
    from exp.build import describe

    if _touched(first, DATA_KEYS):
        return [], False  # told with the first stage
    faults = second_stage(config, only="data")
    filled: list[bool] = []
    faults = faults or _faults_raised(lambda: filled.append(describe(config)))
    return faults, any(filled)


def _placement(config: DictConfig, faults: list[Fault]) -> tuple[Placement | None, list[Fault]]:
    from exp.build import place

    plain, _ = read(config)
    if _touched(faults, (*PLACEMENT_KEYS, "security")) or any(_holds_unknown(plain[key]) for key in PLACEMENT_KEYS):
        return None, []
    found: list[Placement] = []
    more = _faults_raised(lambda: found.append(place(plain)))
    if more or _touched(faults, ("precision", "phases")):
        return None, more
    from exp.precision.advice import report_faults
    from exp.precision.words import WORDS

    placed, precision = found[0], plain["precision"]
    parts = max(placed.model_ranks, placed.devices_per_rank)
    more = WORDS[precision["word"]].device_faults(placed.accelerator)
    return placed, more + report_faults(precision, phases=plain["phases"], ranks_of_a_model=parts)


def _shapes(config: DictConfig, faults: list[Fault], placement: Placement | None) -> _Shapes:
    """The network without memory: its shapes, and what is built around it."""
    from exp.build import build_entries, build_network, build_objective, build_phases
    from exp.check.runtime_switches import switch_faults
    from exp.plan.shapes import examine_shapes
    from exp.plan.term_faults import term_faults

    plain, _ = read(config)
    if _touched(faults, SHAPE_KEYS) or any(_holds_unknown(plain[key]) for key in SHAPE_KEYS):
        return _Shapes()
    built: list[Any] = []
    more = _faults_raised(lambda: built.append(build_objective(plain)))
    more += _faults_raised(lambda: build_entries(plain, "metrics"))
    if more:
        return _Shapes(faults=more)
    # Phases may take the optimizer and the schedule at the top.
    phases = [] if _touched(faults, OPTIMIZATION_KEYS) else build_phases(plain)
    spec = DataSpec.of(plain["data"])

    def network() -> nn.Module:
        try:
            built.append(build_network(plain, spec, device="meta"))
        except ProgramError as error:
            raise ConfigError([program_fault(config, error.key or "model.forward", error)]) from error
        return built[-1]

    seen = examine_shapes(network_factory=network, spec=spec, objective=built[0], phases=phases)
    more = list(seen.faults)
    if not more and len(built) == 2:
        more = _around_the_network(plain, built[1], phases, faults)
        if not _touched(faults, ("precision",)):
            more += term_faults(built[0], built[1], spec, word=plain["precision"]["word"])
        planned = None if placement is None else _planned(plain, built, placement)
        if planned is not None:
            more += _phases_placed(plain, planned.placement) if phases else []
            more += _strategy_faults(plain, planned, faults)
            more += switch_faults(planned) if not _touched(faults, ("runtime", "trainer")) else []
        more += _hook_faults(plain, built[1], planned, faults)
    return _Shapes(faults=more, notes=seen.notes, parameters=seen.parameters)


def _phases_placed(plain: Mapping[str, Any], placement: Placement) -> list[Fault]:
    from exp.build import build_strategy
    from exp.plan.phases import strategy_faults

    return list(strategy_faults(build_strategy(plain), placement))


def _around_the_network(
    plain: Mapping[str, Any], network: nn.Module, phases: Sequence[Phase], faults: Sequence[Fault]
) -> list[Fault]:
    """What optimizer and schedule refuse, and patterns that match no parameter of the network."""
    from exp.build import build_optimization
    from exp.plan.phases import phase_faults
    from exp.precision.keep import keep_faults
    from exp.precision.words import WORDS

    more: list[Fault] = []
    made: list[Any] = []
    if not _touched(faults, OPTIMIZATION_KEYS) and not any(_holds_unknown(plain[key]) for key in OPTIMIZATION_KEYS):
        trainer = plain["trainer"]
        # How many steps an epoch has is not known here; a schedule must fit what is.
        lengths = {"total_steps": _limit(trainer, "max_steps"), "total_epochs": _limit(trainer, "max_epochs")}
        if phases:
            more += phase_faults(phases, network, lengths=lengths, made=made)
        else:
            more += _faults_raised(lambda: made.append(build_optimization(plain).make(network, **lengths)[0]))
    if not _touched(faults, ("precision",)):
        word = WORDS[plain["precision"]["word"]]
        more += keep_faults(network, plain["precision"]["keep"], otherwise=word.parameters)
        more += [fault for optimizer in made for fault in word.optimizer_faults(optimizer)]
    return more


def _strategy_faults(plain: Mapping[str, Any], planned: Planned, faults: Sequence[Fault]) -> list[Fault]:
    """What the strategy cannot do with this run."""
    from exp.build import build_strategy
    from exp.strategies.strategy import Strategy

    strategy = build_strategy(plain)
    has_optimizer = "optimizer" in plain and "_target_" in plain["optimizer"]
    hidden = _touched(faults, STRATEGY_KEYS) or not has_optimizer
    return list(strategy.faults(planned)) if isinstance(strategy, Strategy) and not hidden else []


def _hook_faults(
    plain: Mapping[str, Any], network: nn.Module, planned: Planned | None, faults: Sequence[Fault]
) -> list[Fault]:
    """What the hooks cannot do with this run; where what they read is wrong, patterns that match nothing alone."""
    from exp.build import build_entries
    from exp.plan.hook_faults import hook_faults

    if _touched(faults, HOOK_KEYS) or any(_holds_unknown(plain[key]) for key in HOOK_KEYS):
        return []
    more: list[Fault] = []
    hooks: dict[str, Hook] = {}
    more += _faults_raised(lambda: hooks.update(build_entries(plain, "hooks")))
    hidden = _touched(faults, KEYS_OF_HOOKS) or any(_holds_unknown(plain[key]) for key in KEYS_OF_HOOKS)
    more += hook_faults(hooks, network, None if hidden else planned)
    return more


def _planned(plain: Mapping[str, Any], built: Sequence[Any], placement: Placement) -> Planned:
    """built: the run's objective and its network."""
    from exp.build import build_strategy
    from exp.strategies.strategy import Planned, traits_of

    return Planned(
        network=built[1],
        placement=placement,
        batch_size=plain["data"]["batch_size"],
        precision=plain["precision"]["word"],
        config=plain,
        needs=built[0].needs,
        weighed=built[0].weighed,
        traits=traits_of(build_strategy(plain)),
    )


def _limit(trainer: Mapping[str, Any], name: str) -> int:
    limit = trainer.get(name)
    return limit if isinstance(limit, int) and limit > 0 else ANY_LENGTH


def _holds_unknown(value: Any) -> bool:
    return value is UNKNOWN or any(part is UNKNOWN for _, part in leaves(value))


def _faults_raised(call: Callable[[], Any]) -> list[Fault]:
    try:
        call()
    except ConfigError as error:
        return list(error.faults)
    return []


def _touched(faults: list[Fault], keys: tuple[str, ...]) -> bool:
    return any(fault.key.partition(".")[0] in keys for fault in faults)
