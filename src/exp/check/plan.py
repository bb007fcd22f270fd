"""Decide a run: `resolve` fills in what the data says, `plan` decides the rest, or tells every fault that forbids it.

    1 values, keys, rules            stages.first_stage: no torch
    2 the data node                  its target and parameters; then the data fills in what its YAML leaves open
    3 all targets, forward programs  stages.second_stage
    4 placement                      enough devices for the strategy, and the precision on them
    5 shapes                         the network on the meta device, fed a batch of the data's shape
    6 parts                          what optimizer, schedule, precision, strategy, switches and hooks refuse
    7 resume                         whether the run goes with the checkpoint that it names

A later step runs only where the earlier ones left what it needs. Nothing here changes the config that it is given.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf

from exp.check.parameters import program_fault
from exp.check.stages import first_stage, located, once, second_stage
from exp.config.freeze import COMPOSITION, frozen_yaml, read_frozen
from exp.config.reading import UNKNOWN, is_node, leaves, read
from exp.config.targets import resolve as resolve_target
from exp.errors import LIBRARIES, ConfigError, ExpError, Fault, MissingExtraError, RunError
from exp.types import DataSpec

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from lightning.pytorch.strategies import Strategy as LightningStrategy
    from torch import nn
    from torch.optim import Optimizer
    from torchmetrics import Metric

    from exp.check.shapes import ShapeExamination
    from exp.hooks.hook import Hook
    from exp.models.flop_count import FlopCount
    from exp.objectives.objective import Objective
    from exp.optim.phase import Phase
    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank
    from exp.strategies.strategy import Blueprint, Strategy

Value = TypeVar("Value")

# What the network, its objective and its metrics are built from.
SHAPE_KEYS = ("model", "data", "objective", "phases", "metrics", "seed", "security")
DATA_KEYS = ("data", "seed", "security")
START_KEYS = ("resume", "runtime", "name", "train")
SPEC_KEYS = ("input_shape", "input_dtype", "num_outputs")
DECLARED_KEYS = ("data.input_shape", "data.input_dtype", "data.num_classes", "data.num_outputs")
PLACEMENT_KEYS = ("strategy", "launch", "security")
OPTIMIZATION_KEYS = ("optimizer", "scheduler", "trainer")
# What a strategy may have to refuse.
STRATEGY_KEYS = ("callbacks", "hooks", "metrics", "objective", "phases", "precision", "runtime", "trainer")
HOOK_KEYS = ("hooks", "security")
# What a hook may have to refuse.
KEYS_OF_HOOKS = ("data", "optimizer", "phases", "precision", "runtime", "strategy", "trainer")
ANY_LENGTH = 1_000_000_000
LENGTHS = {
    "max_epochs": None,
    "limit_train_batches": 1.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": 1,
    "accumulate_grad_batches": 1,
}
WITH_NULL = ("check_val_every_n_epoch",)


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config with nothing left open.

    config: a copy of its own, in which the data's shape, dtype, outputs and classes are filled in: what is frozen.
    plain: its values as dicts and lists, interpolations resolved; UNKNOWN where a fault hides a value.
    faults: of values, keys, rules, targets, parameters and forward programs.
    notes: on the checkpoint that a config leaves to be found.
    """

    config: DictConfig
    plain: Mapping[str, Any]
    faults: tuple[Fault, ...] = ()
    notes: tuple[str, ...] = ()

    @functools.cached_property
    def yaml(self) -> str:
        """The text of config.yaml."""
        return frozen_yaml(self.config)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The decided run: made once a process, never changed, with nothing placed or allocated.

    resolved: the config that it follows from.
    strategy: the one object of this process; placement: where it puts the ranks.
    spec: what goes into the network, and how many numbers come out for a sample.
    objective, phases, metrics, hooks: as the run will use them.
    shapes: the network on the meta device and its one traced forward, when somebody asks for the first time.
    notes: what could not be looked at, and why; what would train badly without a fault; and what a resume changes.
    """

    resolved: Resolved
    placement: Placement
    strategy: Strategy | LightningStrategy
    spec: DataSpec
    objective: Objective
    phases: tuple[Phase, ...]
    metrics: Mapping[str, Metric]
    hooks: Mapping[str, Hook]
    shapes: Callable[[], ShapeExamination]
    notes: tuple[str, ...] = ()

    @property
    def plain(self) -> Mapping[str, Any]:
        """The config's values as dicts and lists."""
        return self.resolved.plain


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the check found: all faults, or the plan. notes: as the Plan's."""

    faults: tuple[Fault, ...]
    notes: tuple[str, ...]
    plan: Plan | None


def resolve(config: DictConfig) -> Resolved:
    """Fill in, in a copy, what the data set's YAML leaves to the data, and look at all that needs no network."""
    config = copy.deepcopy(config)
    first = first_stage(config)
    faults: list[Fault] = []
    start_faults, notes = _find_start(config) if not _touched(first, START_KEYS) else ([], ())
    is_filled = False
    if not _touched(first, DATA_KEYS):  # else told with the first stage
        faults = second_stage(config, only="data")
        if not faults:
            try:
                is_filled = _fill_in(config)
            except ConfigError as error:
                faults += error.faults
    # Before all else, for other nodes interpolate the shape and the classes.
    faults += first_stage(config) if is_filled else first
    faults += [*start_faults, *second_stage(config)]
    plain, _ = read(config)
    plain.pop(COMPOSITION, None)
    return Resolved(config=config, plain=plain, faults=tuple(faults), notes=notes)


def frozen(directory: Path | str) -> Resolved:
    """The config of a run directory, which was resolved and checked before it was frozen."""
    from exp.construct import plain_config

    config = read_frozen(directory)
    return Resolved(config=config, plain=plain_config(config))


def plan(resolved: Resolved) -> Plan:
    """Decide the run.

    Raises: ConfigError with every fault of the config.
    """
    examination = examine(resolved)
    if examination.plan is None:
        raise ConfigError(examination.faults)
    return examination.plan


def adopt(resolved: Resolved, *, rank: Rank) -> Plan:
    """The same plan in a rank that its launcher has started, from a frozen config.

    Raises: ConfigError where the launcher started other ranks than the config asks for.
    """
    from exp.construct import build_entries, build_objective, build_phases, build_strategy

    plain = resolved.plain
    strategy = build_strategy(plain)
    placement = place(plain, strategy, rank=rank)
    spec, objective, phases = DataSpec.of(plain["data"]), build_objective(plain), tuple(build_phases(plain))
    shapes = functools.cache(lambda: _examine_shapes(resolved, spec, objective, phases))
    return Plan(
        resolved=resolved,
        placement=placement,
        strategy=strategy,
        spec=spec,
        objective=objective,
        phases=phases,
        metrics=build_entries(plain, "metrics"),
        hooks=_hooks(resolved, placement, shapes),
        shapes=shapes,
    )


def validate(config: DictConfig) -> None:
    """Check a composed config, which stays as it is.

    Raises: ConfigError with all faults.
    """
    plan(resolve(config))


def examine(resolved: Resolved) -> Examination:
    """All faults of a config, or the plan of its run."""
    draft = _Draft(resolved)
    draft.place()
    draft.look_at_the_network()
    draft.look_at_the_length()
    draft.look_at_the_checkpoint()
    draft.note_what_is_in_vain()
    faults = tuple(located(resolved.config, once(draft.faults)))
    return Examination(faults=faults, notes=tuple(draft.notes), plan=None if faults else draft.plan())


def compare_with_data(resolved: Resolved) -> tuple[list[Fault], tuple[str, ...]]:
    """What the config declares of its data, held against the data, where that is on this machine. A run does it, too.

    Returns: the faults; and why nothing could be compared, where that is so.
    """
    from exp.construct import build_data

    try:
        build_data(resolved.plain)
    except ExpError as error:
        faults = error.faults if isinstance(error, ConfigError) else ()
        declared = [fault for fault in faults if fault.key in DECLARED_KEYS]
        if declared:
            return located(resolved.config, declared), ()
        reason = faults[0] if faults else error
        return [], (f"the data was not compared with what the config declares of it: {reason}",)
    return [], ()


def place(plain: Mapping[str, Any], strategy: Strategy | LightningStrategy, *, rank: Rank | None = None) -> Placement:
    """Where a run goes; with a rank, what the launcher that started it made.

    Raises: ConfigError.
    """
    from exp.strategies.placement import adopted, placement
    from exp.strategies.strategy import Strategy, demand_of_lightning

    launch = plain["launch"]
    where = {
        "devices": launch["devices"],
        "nodes": launch["nodes"],
        "accelerator": launch["accelerator"],
        "backend": launch["backend"],
        "demand": strategy.demand if isinstance(strategy, Strategy) else demand_of_lightning(strategy),
    }
    name = plain["strategy"]["name"]
    return placement(name, **where) if rank is None else adopted(rank, name, **where)


class _Draft:
    """A plan in the making: what is decided so far, and the faults that were found."""

    def __init__(self, resolved: Resolved) -> None:
        self.resolved, self.plain = resolved, resolved.plain
        self.faults = list(resolved.faults)
        self.notes = list(resolved.notes)
        self.strategy: Strategy | LightningStrategy | None = None
        self.placement: Placement | None = None
        self.objective: Objective | None = None
        self.phases: tuple[Phase, ...] = ()
        self.metrics: Mapping[str, Metric] = {}
        self.hooks: Mapping[str, Hook] = {}
        self.seen: ShapeExamination | None = None

    def plan(self) -> Plan:
        """The plan of a draft without faults."""
        if self.strategy is None or self.placement is None or self.objective is None or self.seen is None:
            raise RuntimeError("a draft without faults has decided everything")
        seen = self.seen
        return Plan(
            resolved=self.resolved,
            placement=self.placement,
            strategy=self.strategy,
            spec=DataSpec.of(self.plain["data"]),
            objective=self.objective,
            phases=self.phases,
            metrics=self.metrics,
            hooks=self.hooks,
            shapes=lambda: seen,
            notes=tuple(self.notes),
        )

    def place(self) -> None:
        """Decide the strategy and where it puts the ranks; then whether the precision is at home there."""
        from exp.construct import build_strategy
        from exp.precision.words import WORDS

        if not self._is_known(PLACEMENT_KEYS):
            return
        try:
            self.strategy = build_strategy(self.plain)
            placement = place(self.plain, self.strategy)
        except ConfigError as error:
            self.faults += error.faults
            return
        if _touched(self.faults, ("precision", "phases")):
            return
        self.placement, precision = placement, self.plain["precision"]
        word = WORDS[precision["word"]]
        self.faults += [*word.device_faults(placement.accelerator), *word.scaler_faults(precision["scaler"])]

    def look_at_the_network(self) -> None:
        """Build what is trained without memory, run it once, and ask every part what it refuses."""
        from exp.construct import build_entries, build_objective, build_phases

        if not self._is_known(SHAPE_KEYS):
            return
        found = len(self.faults)
        self.objective = self._try(lambda: build_objective(self.plain))
        self.metrics = self._try(lambda: build_entries(self.plain, "metrics")) or {}
        if len(self.faults) > found or self.objective is None:
            return
        # Phases may take the optimizer and the schedule at the top.
        if not _touched(self.faults, OPTIMIZATION_KEYS):
            self.phases = tuple(build_phases(self.plain))
        # Faults that are found here hide nothing from each other.
        known = tuple(self.faults)
        self.seen = _examine_shapes(self.resolved, DataSpec.of(self.plain["data"]), self.objective, self.phases)
        # A network that does not fit what the config says of its data may fit the data.
        declared = compare_with_data(self.resolved)[0] if self.seen.faults else []
        self.faults += declared or self.seen.faults
        self.notes += self.seen.notes
        if not self.seen.faults and self.seen.network is not None:
            self._look_at_the_parts(known, self.objective, self.seen, self.seen.network)

    def look_at_the_checkpoint(self) -> None:
        """Whether a config that is right by itself goes with the checkpoint that it names."""
        from exp.check.continuation import examine_resume

        if self.faults or self.plain["resume"] is None:
            return
        try:
            resuming = examine_resume(self.plain, network=None if self.seen is None else self.seen.network)
        except RunError as error:
            self.faults.append(Fault(key="resume", got=str(error), expected="a checkpoint that exp wrote"))
            return
        self.faults += resuming.faults
        self.notes += resuming.notes

    def note_what_is_in_vain(self) -> None:
        """Note what a run without a fault would train badly by."""
        from exp.check.training_notes import training_notes

        seen = self.seen
        if self.faults or self.objective is None or seen is None or seen.network is None:
            return
        self.notes += training_notes(
            self.plain, network=seen.network, traces=seen.traces, objective=self.objective, phases=self.phases
        )

    def _look_at_the_parts(
        self, known: Iterable[Fault], objective: Objective, seen: ShapeExamination, network: nn.Module
    ) -> None:
        from exp.check.runtime_switches import switch_faults
        from exp.check.shapes import double_backward_faults, objectives_by_forward, term_faults
        from exp.precision.keep import keep_faults
        from exp.precision.words import WORDS

        made = self._look_at_the_optimizers(known, network)
        if not _touched(known, ("precision",)):
            precision = self.plain["precision"]
            word = WORDS[precision["word"]]
            self.faults += keep_faults(network, precision["keep"], otherwise=word.parameters)
            self.faults += [fault for optimizer in made for fault in word.optimizer_faults(optimizer)]
            self.faults += term_faults(objective, network, DataSpec.of(self.plain["data"]), word=precision["word"])
        for forward, part in objectives_by_forward(self.phases, objective).items():
            if forward in seen.traces:
                self.faults += double_backward_faults(seen.traces[forward], part)
        planned = self._planned(objective, seen, network)
        if planned is not None and not _touched(known, ("runtime", "trainer")):
            self.faults += switch_faults(planned)
        self._look_at_the_callbacks(known)
        self._look_at_the_hooks(known, seen, network, planned)
        if planned is not None:
            self._look_at_the_strategy(known, dataclasses.replace(planned, hooks=self.hooks))

    def _look_at_the_optimizers(self, known: Iterable[Fault], network: nn.Module) -> list[Optimizer]:
        """What optimizer and schedule refuse, and patterns that match no parameter; gives those that can be made."""
        from exp.check.phases import phase_faults
        from exp.check.rates import rate_faults
        from exp.construct import build_optimization

        made: list[Optimizer] = []
        if _touched(known, OPTIMIZATION_KEYS) or self._holds_unknown(OPTIMIZATION_KEYS):
            return made
        # How many steps an epoch has the data alone knows, which is asked where a schedule may end too soon.
        trainer = self.plain["trainer"]
        steps, epochs = _limit(trainer, "max_steps"), _limit(trainer, "max_epochs")
        if self.phases:
            self.faults += phase_faults(self.phases, network, steps=steps, epochs=epochs, made=made)
            return made
        optimization = build_optimization(self.plain)
        found = self._try(lambda: optimization.make(network, total_steps=steps, total_epochs=epochs))
        if found is not None:
            made.append(found[0])
            self.faults += rate_faults(
                optimization, found[0], key="scheduler", steps=lambda: self._steps(self._batches), epochs=epochs
            )
        return made

    def _planned(self, objective: Objective, seen: ShapeExamination, network: nn.Module) -> Blueprint | None:
        """What parts may know of the run; None where nobody knows where it goes."""
        from exp.strategies.strategy import Blueprint, Strategy, traits_of

        if self.strategy is None or self.placement is None:
            return None
        return Blueprint(
            network=network,
            trace=seen.traces.get(None),
            placement=self.placement,
            batch_size=self.plain["data"]["batch_size"],
            precision=self.plain["precision"]["word"],
            config=self.plain,
            needs=objective.needs,
            meets=self.strategy.meets if isinstance(self.strategy, Strategy) else frozenset(),
            weighed=objective.weighed,
            traits=traits_of(self.strategy),
            callbacks=self._classes_of(self.plain.get("callbacks")),
            optimizers=tuple(self._optimizer_classes()),
        )

    def _look_at_the_callbacks(self, known: Iterable[Fault]) -> None:
        """What the libraries' own callbacks refuse when they are made. Code of the user's own is left for the run."""
        from exp.construct import construct

        if _touched(known, ("callbacks", "security")) or self._holds_unknown(("callbacks", "security")):
            return
        for name, kind in self._classes_of(self.plain["callbacks"]).items():
            if kind.__module__.partition(".")[0] in LIBRARIES:
                node, allow = self.plain["callbacks"][name], self.plain["security"]["allow"]
                self._try(functools.partial(construct, node, key=f"callbacks.{name}", allow=allow))

    def _optimizer_classes(self) -> Iterable[type[Optimizer]]:
        """Of the optimizer at the top, and of those that phases have of their own."""
        nodes = {name: phase["optimizer"] for name, phase in self.plain["phases"].items() if phase.get("optimizer")}
        return self._classes_of({**nodes, "": self.plain.get("optimizer")}).values()

    def _classes_of(self, nodes: Any) -> dict[str, Any]:
        """The class that each node names; without those that have a fault of their own."""
        found: dict[str, Any] = {}
        for name, node in nodes.items() if isinstance(nodes, dict) else ():
            with contextlib.suppress(ConfigError, MissingExtraError):
                if is_node(node) and isinstance(node["_target_"], str):
                    found[name] = resolve_target(node["_target_"], allow=self.plain["security"]["allow"])
        return found

    def _look_at_the_strategy(self, known: Iterable[Fault], planned: Blueprint) -> None:
        """What the strategy cannot do, and what excludes what."""
        from exp.check.compatibility import compatibility_faults, other_parts
        from exp.strategies.strategy import Strategy

        has_optimizer = "optimizer" in self.plain and "_target_" in self.plain["optimizer"]
        if _touched(known, STRATEGY_KEYS) or not has_optimizer:
            return
        self.faults += compatibility_faults(other_parts(planned), planned)
        if isinstance(self.strategy, Strategy):
            self.faults += self.strategy.faults(planned)

    def _look_at_the_hooks(
        self, known: Iterable[Fault], seen: ShapeExamination, network: nn.Module, planned: Blueprint | None
    ) -> None:
        """What the hooks cannot do with this run; where what they read is wrong, patterns that match nothing alone."""
        from exp.check.compatibility import compatibility_faults, hook_parts
        from exp.construct import build_entries
        from exp.models.matching import matching

        if _touched(known, HOOK_KEYS) or self._holds_unknown(HOOK_KEYS):
            return
        is_hidden = _touched(known, KEYS_OF_HOOKS) or self._holds_unknown(KEYS_OF_HOOKS)
        if planned is None or is_hidden:
            self.hooks = self._try(lambda: build_entries(self.plain, "hooks")) or {}
            for name, hook in self.hooks.items():
                self._try(functools.partial(matching, network, hook.modules, key=f"hooks.{name}.modules"))
            return
        placement = planned.placement
        self.hooks = self._try(lambda: _hooks(self.resolved, placement, lambda: seen)) or {}
        planned = dataclasses.replace(planned, hooks=self.hooks)
        self.faults += compatibility_faults(hook_parts(self.hooks), planned)
        for name, hook in self.hooks.items():
            hook.name = name
            self.faults += hook.faults(planned)

    def look_at_the_length(self) -> None:
        """Whether an epoch is long enough for the validation in it."""
        from exp.engine.progress import refuse_late_validation

        if self.faults or not self.plain["train"]:
            return
        if isinstance(self.plain["trainer"].get("val_check_interval"), int):
            self._try(lambda: refuse_late_validation(self._lengths, self._batches))

    @functools.cached_property
    def _batches(self) -> int | None:
        """Global batches of an epoch of training; None where the data do not say, or are not on this machine."""
        from exp.construct import build_data

        try:
            return len(build_data(self.plain).loader("train"))
        except (ExpError, TypeError):
            return None

    @property
    def _lengths(self) -> Trainer:
        """What a Trainer says of the length of the run; Lightning's own default for what the config leaves out."""
        trainer = self.plain["trainer"]
        # Null is a value of one of them: validation does not follow the epochs.
        values = {name: trainer[name] for name in LENGTHS if name in trainer}
        values = {name: value for name, value in values.items() if value is not None or name in WITH_NULL}
        return cast("Trainer", SimpleNamespace(**{**LENGTHS, **values, "max_steps": None}))

    def _steps(self, batches: int | None) -> int | None:
        from exp.engine.progress import Limits, total_steps

        steps = self.plain["trainer"].get("max_steps")
        limits = Limits(max_steps=steps if isinstance(steps, int) and steps > 0 else None)
        return total_steps(self._lengths, limits, batches)

    def _is_known(self, keys: Iterable[str]) -> bool:
        return not _touched(self.faults, keys) and not self._holds_unknown(keys)

    def _holds_unknown(self, keys: Iterable[str]) -> bool:
        values = [self.plain[key] for key in keys]
        return any(value is UNKNOWN or any(part is UNKNOWN for _, part in leaves(value)) for value in values)

    def _try(self, call: Callable[[], Value]) -> Value | None:
        """What a call gives; None where it finds faults, which are kept."""
        try:
            return call()
        except ConfigError as error:
            self.faults += error.faults
            return None


def _find_start(config: DictConfig) -> tuple[list[Fault], tuple[str, ...]]:
    """Fill in the checkpoint that `resume=auto` or `runtime.autoresume` finds: the faults, and what there is to say."""
    if config.resume != "auto" and config.runtime.autoresume is not True:
        return [], ()  # without an import of torch
    from exp.check.starting_point import find_start

    try:
        found = find_start(config)
    except ConfigError as error:
        return list(error.faults), ()
    if found is None:
        return [], ()
    config.resume = None if found.path is None else str(found.path)
    return first_stage(config), found.notes


def _fill_in(config: DictConfig) -> bool:
    """Fill in what the data says of itself: shape and dtype, outputs, classes. Built only where one of them is null.

    Returns: whether there was anything to fill in.
    Raises: ConfigError, RunError where the data set cannot be built.
    """
    from exp.construct import build_data, plain_config

    if all(config.data[key] is not None for key in SPEC_KEYS):
        return False
    # Resolved alone: other nodes may interpolate what is filled in here.
    given = {name: plain_config(config[name]) for name in ("data", "security")}
    left = {name: OmegaConf.to_container(config[name], resolve=False) for name in ("objective", "metrics")}
    spec = build_data({**given, **left, "seed": config.seed}).spec
    config.data.input_shape = list(spec.input_shape)
    config.data.input_dtype = spec.input_dtype
    config.data.num_outputs = spec.num_outputs
    config.data.num_classes = spec.num_classes
    return True


def _examine_shapes(
    resolved: Resolved, spec: DataSpec, objective: Objective, phases: tuple[Phase, ...]
) -> ShapeExamination:
    from exp.check.shapes import examine_shapes
    from exp.construct import build_unsized_network
    from exp.models.syntax import ProgramError

    def network() -> nn.Module:
        try:
            return build_unsized_network(resolved.plain, device="meta")
        except ProgramError as error:
            key = error.key or "model.forward"
            raise ConfigError([program_fault(resolved.config, key, error)]) from error

    return examine_shapes(network_factory=network, spec=spec, objective=objective, phases=phases)


def _hooks(
    resolved: Resolved,
    placement: Placement,
    shapes: Callable[[], ShapeExamination],
) -> Mapping[str, Hook]:
    """The hooks by name, each with what it may ask of the run: the FLOPs of a step, and what the run was made from."""
    from exp.check.step_flops import flops_of_a_sample
    from exp.construct import build_entries, build_objective, build_phases
    from exp.hooks.hook import Origin, Workload

    plain = resolved.plain

    def flops(data: object) -> FlopCount:
        # An objective of its own: the run's may lie on another device by then.
        objective, phases, network = build_objective(plain), build_phases(plain), shapes().network
        if network is None:
            raise RunError("the network cannot be built without numbers, and so its FLOPs are not counted")
        return flops_of_a_sample(data, network=network, objective=objective, phases=phases)

    devices = placement.world_size * placement.devices_per_rank
    workload = Workload(precision=plain["precision"]["word"], devices=devices, flops=flops)
    origin = Origin(read=lambda: resolved.yaml, allow=tuple(plain["security"]["allow"]))
    return build_entries(plain, "hooks", workload=workload, origin=origin)


def _limit(trainer: Mapping[str, Any], name: str) -> int:
    limit = trainer.get(name)
    return limit if isinstance(limit, int) and limit > 0 else ANY_LENGTH


def _touched(faults: Iterable[Fault], keys: Iterable[str]) -> bool:
    return any(fault.key.partition(".")[0] in keys for fault in faults)
