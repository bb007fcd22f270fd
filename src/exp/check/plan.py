"""Decide a run: `resolve` fills in what the data says, `plan` decides the rest, or tells every fault that forbids it.

    1 values, keys, rules            stages.first_stage: no torch
    2 the data node                  its target and parameters; then the data fills in what its YAML leaves open
    3 all targets, forward programs  stages.second_stage
    4 placement                      enough devices for the strategy, and the precision on them
    5 shapes                         the network on the meta device, fed a batch of the data's shape
    6 parts                          what optimizer, schedule, precision, strategy, switches and hooks refuse
    7 resume                         whether the run goes with the checkpoint that it names
    8 samples                        of data of the user's own the first ones, against the objective: refuse_other_data

A later step runs only where the earlier ones left what it needs. Nothing here changes the config that it is given.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, TypeVar, cast

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.check.parameters import program_fault, target_faults
from exp.check.rules import monitors, weights_of_run
from exp.check.stages import allowed, first_stage, located, once, second_stage
from exp.config.copying import copied
from exp.config.freeze import COMPOSITION, frozen_yaml, read_frozen
from exp.config.hydra_adapter import packages_allowed_by
from exp.config.module_key import brings_data
from exp.config.plain_tree import KeyPath, are_referred, changes, is_node, leaves, with_changes
from exp.config.reading import ACCELERATOR, GPU, UNKNOWN, Values, is_open, read
from exp.config.resolvers import use_resolvers
from exp.config.targets import resolve as resolve_target
from exp.data.faults import SampleError
from exp.errors import LIBRARIES, ConfigError, ExpError, Fault, MissingExtraError, RunError
from exp.shared_types import DataSpec, Stage

if TYPE_CHECKING:
    from lightning.pytorch import Callback, LightningDataModule, Trainer
    from lightning.pytorch.strategies import Strategy as LightningStrategy
    from torch import nn
    from torch.optim import Optimizer

    from exp.check.continuation import Resuming
    from exp.check.own_training import OwnTraining
    from exp.check.shapes import ShapeExamination
    from exp.data.data import Data
    from exp.hooks.hook import Hook
    from exp.models.flop_count import FlopCount
    from exp.models.forward_trace import Arithmetic
    from exp.models.weights import Matching
    from exp.objectives.measures import Measure
    from exp.objectives.objective import Objective
    from exp.optim.phase import Phase
    from exp.strategies.placement import Machine, Placement
    from exp.strategies.rank import Rank
    from exp.strategies.strategy import Blueprint, Strategy

Value = TypeVar("Value")

# What the network, its objective and its metrics are built from.
SHAPE_KEYS = (
    "module", "model", "data", "objective", "phases", "metrics", "seed", "security", "initialisation", "freeze", "lora",
)  # fmt: skip
DATA_KEYS = ("data", "seed", "security")
START_KEYS = ("resume", "runtime", "name", "train")
# What holds the samples, and may be on another machine.
DATA_SETS = ("data.dataset.", "data.train.", "data.val.", "data.test.")
PLACEMENT_KEYS = ("strategy", "launch", "security")
OPTIMIZATION_KEYS = ("optimizer", "scheduler", "trainer")
# Of whose numbers nothing follows for the network, its data and what runs beside it.
NUMBERS = ("optimizer", "scheduler")
# Of what is no concern of the job's own run.
FREE = "sweep"
# What a strategy may have to refuse.
STRATEGY_KEYS = ("callbacks", "hooks", "metrics", "objective", "phases", "precision", "runtime", "trainer")
HOOK_KEYS = ("hooks", "security")
# What a hook may have to refuse.
KEYS_OF_HOOKS = ("data", "optimizer", "phases", "precision", "runtime", "strategy", "trainer")
ANY_LENGTH = 1_000_000_000
# What null means in Lightning's Trainer.
LENGTHS = {
    "max_epochs": None,
    "limit_train_batches": 1.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": None,
    "accumulate_grad_batches": 1,
}


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
    """The decided run: made once a process, never changed. Each part is decided when it is asked for first.

    Nothing is placed, and of the network nothing allocated.

    resolved: the config that everything follows from.
    rank: what a launcher made of this process; None where the config alone decides.
    machine: what the run will have; None is this machine.
    """

    resolved: Resolved
    rank: Rank | None = None
    machine: Machine | None = None

    @property
    def plain(self) -> Mapping[str, Any]:
        """The config's values as dicts and lists."""
        return self.resolved.plain

    @functools.cached_property
    def strategy(self) -> Strategy | LightningStrategy:
        """The one object of this process."""
        from exp.construct import build_strategy

        return build_strategy(self.plain)

    @functools.cached_property
    def placement(self) -> Placement:
        """Where the strategy puts the ranks."""
        return place(self.plain, self.strategy, rank=self.rank, machine=self.machine)

    @functools.cached_property
    def own(self) -> OwnTraining | None:
        """The LightningModule that is trained in the place of exp's own; None where there is none.

        Objective, phases and metrics are empty then, and shapes are not known.
        """
        if self.plain["module"] is None:
            return None
        from exp.check.own_training import OwnTraining

        return OwnTraining(plain=self.plain)

    @functools.cached_property
    def spec(self) -> DataSpec:
        """What goes into the network, and how many numbers come out for a sample."""
        return DataSpec.of(self.plain["data"])

    @functools.cached_property
    def data(self) -> Data:
        """The data set with its parts; no rank has read of it what it trains on."""
        from exp.construct import build_data

        return build_data(self.plain)

    @functools.cached_property
    def data_module(self) -> LightningDataModule | None:
        """The loaders that a module of the user's own has of the user's own; None where `data` is exp's."""
        from exp.construct import build_data_module

        return None if self.own is None or self.own.data_kind is None else build_data_module(self.plain)

    @property
    def network(self) -> nn.Module | None:
        """What is trained, without memory; None where it cannot be built so."""
        return self.shapes.network if self.own is None else self.own.network

    @functools.cached_property
    def objective(self) -> Objective:
        from exp.construct import build_objective

        return build_objective(self.plain)

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        from exp.construct import build_phases

        return tuple(build_phases(self.plain))

    @functools.cached_property
    def metrics(self) -> Mapping[str, Measure]:
        from exp.construct import build_measures

        return build_measures(self.plain)

    @functools.cached_property
    def shapes(self) -> ShapeExamination:
        """The network on the meta device and its one traced forward."""
        return _examine_shapes(self, self.phases)

    @functools.cached_property
    def operator(self) -> float | None:
        """The multiply-adds of an operator in the forward of a rank's batch, in the mean over multiply-adds.

        Of a module of the user's own, and of what cannot be traced, a bound; None where nobody knows the network, or
        how large the batches of loaders of the user's own are.
        """
        network = self.network
        if network is None or self.data_module is not None:
            return None
        samples: int = -(-self.plain["data"]["batch_size"] // self.placement.data_ranks)
        traces = self.shapes.traces.values() if self.own is None else ()
        sizes = [size for trace in traces for size in trace.multiply_adds]
        if sizes:
            return samples * sum(size**2 for size in sizes) / sum(sizes)
        from exp.engine.runtime import operator_at_most

        return samples * operator_at_most(network, positions=self.spec.positions)

    @functools.cached_property
    def hooks(self) -> Mapping[str, Hook]:
        """By name, each with what it may ask of the run: the FLOPs of a step."""
        from exp.construct import build_entries
        from exp.hooks.hook import Workload

        plain, placement = self.plain, self.placement
        devices = placement.world_size * placement.layers
        workload = Workload(precision=plain["precision"]["word"], devices=devices, flops=self._flops)
        return build_entries(plain, "hooks", workload=workload)

    def _flops(self, data: object) -> FlopCount:
        from exp.check.step_flops import flops_of_a_sample
        from exp.construct import build_objective, build_phases

        if self.own is not None:
            raise RunError("nobody knows what the training_step of a module of your own computes")
        # An objective of its own: the run's may lie on another device by then.
        objective, phases, network = build_objective(self.plain), build_phases(self.plain), self.shapes.network
        if network is None:
            raise RunError("the network cannot be built without numbers, and so its FLOPs are not counted")
        inputs = tuple(self.spec.inputs)
        return flops_of_a_sample(data, network=network, objective=objective, phases=phases, inputs=inputs)

    @functools.cached_property
    def resuming(self) -> Resuming:
        """What the checkpoint comes to that the config names."""
        from exp.check.continuation import Resuming, examine_resume
        from exp.construct import build_network

        if self.plain["resume"] is None:
            return Resuming()
        if self.own is None:
            build = functools.partial(build_network, self.plain, self.spec, device="meta")
            return examine_resume(self.plain, network=self.network, build=build)
        # Its setup may give layers other names, as torch.compile does.
        return examine_resume(self.plain, network=self.network if self.own.is_complete else None, prefix="")

    @functools.cached_property
    def weights(self) -> Matching | None:
        """What of the network starts from the weights that the config names; None where it names none.

        Raises: RunError, MissingExtraError where they cannot be read; ConfigError for names that clash.
        """
        from exp.engine.weight_files import read_weights
        from exp.models.weights import match_weights

        node, network = self.plain["weights"], self.shapes.network
        if node["from"] is None or self.plain["resume"] is not None or network is None:
            return None
        weights = read_weights(Path(node["from"]), averaged=node["averaged"])
        return match_weights(weights, network, keys=node["keys"])

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """What could not be looked at, and why; what would train badly without a fault; and what a resume changes."""
        from exp.check.training_notes import training_notes

        if self.own is not None:
            return (*self.resolved.notes, *self.own.notes(), *self.resuming.notes)
        seen, notes = self.shapes, [*self.resolved.notes, *self.shapes.notes, *self.resuming.notes]
        if seen.network is not None:
            notes += training_notes(
                self.plain,
                network=seen.network,
                traces=seen.traces,
                objective=self.objective,
                phases=self.phases,
                placement=self.placement,
                place=self._place,
            )
        source = self.plain["weights"]["from"]
        if self.weights is not None:
            notes.append(self.weights.table(source))
        elif source is not None and self.plain["resume"] is not None:
            notes.append(f"weights.from={source} is not read: the run goes on from {self.plain['resume']}")
        return tuple(notes)

    def _place(self, key: str, at: tuple[int, int] | None) -> str | None:
        """The file and line of a key; of a program at it those of a place in its text."""
        (found,) = located(self.resolved.config, [Fault(key=key, got="", expected="", at=at)])
        return found.source


@dataclass(frozen=True, kw_only=True)
class Examination:
    """What the check found: all faults, or the plan."""

    faults: tuple[Fault, ...]
    plan: Plan | None


def resolve(config: DictConfig) -> Resolved:
    """Fill in, in a copy, what the data set's YAML leaves to the data, and look at all that needs no network."""
    config = copied(config)
    use_resolvers(config, allow=sorted(packages_allowed_by(_overrides(config))))
    reading = read(config)
    if Values(reading[0])[ACCELERATOR] == GPU:
        OmegaConf.update(config, ACCELERATOR, GPU)  # an interpolation may lead to Lightning's word
    first = first_stage(reading)
    asked = _beginnings(config, first)
    faults: list[Fault] = []
    start_faults, notes = _find_start(config) if not _touched(first, START_KEYS) else ([], ())
    if not _touched(first, ("weights",)):
        _find_weights(config)
    held = not _touched(first, ("data", "trainer")) and _hold_batches(config)
    if held or _beginnings(config, first) != asked:
        reading = read(config)
        first = first_stage(reading)
    if not _touched(first, DATA_KEYS):  # else told with the first stage
        faults = second_stage(config, reading, only="data")
        if not faults:
            try:
                if _fill_in(config):
                    # Other nodes interpolate the shape and the classes.
                    reading = read(config, is_data_read=True)
                    first = first_stage(reading)
            except ConfigError as error:
                faults += error.faults
            except SampleError as error:
                faults.append(error.fault)
    faults += [*first, *start_faults, *second_stage(config, reading)]
    plain = {name: value for name, value in reading[0].items() if name != COMPOSITION}
    return Resolved(config=config, plain=plain, faults=tuple(faults), notes=notes)


def _overrides(config: DictConfig) -> list[str]:
    """Those that a config was composed with; none of one that was made otherwise."""
    return [str(text) for text in config[COMPOSITION].overrides] if COMPOSITION in config else []


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
    decided = Plan(resolved=resolved, rank=rank)
    parts = ("placement", "hooks") if decided.own else ("placement", "objective", "phases", "metrics", "hooks")
    for part in parts:
        getattr(decided, part)  # in the order in which the check asks for them: some are drawn at random
    return decided


def validate(config: DictConfig) -> None:
    """Check a composed config, which stays as it is.

    Raises: ConfigError with all faults.
    """
    validated(config)


def validated(config: DictConfig) -> Plan:
    """Return the plan of a config that agrees with the first samples of its data.

    Raises:
        ConfigError: With all errors.
    """
    decided = plan(resolve(config))
    faults, _ = compare_with_data(decided)
    if faults:
        raise ConfigError(faults)
    return decided


# --- jobs of a sweep: a check builds the network and runs it once, 40 ms of a job that may train for 60 ---


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A config without a fault. raw: its unresolved values."""

    raw: Mapping[str, Any]
    decided: Plan


def check_job(config: DictConfig, before: Checked | None) -> Checked:
    """Check a job of a sweep: of one that differs from a checked one in its seed and in numbers of its optimizer alone,
    these alone.

    before: what this returned for another job; the first stage of the check has passed both.
    Raises: ConfigError with all faults.
    """
    raw = cast(dict[str, Any], OmegaConf.to_container(config, resolve=False))
    del raw[COMPOSITION]
    if before is not None:
        changed = changes(before.raw, raw)
        if changed is not None and _changes_the_optimizer_alone(before, changed, raw):
            refuse_changed(config, changed, checked=before.decided)
            return before
    return Checked(raw=raw, decided=validated(config))


def _changes_the_optimizer_alone(before: Checked, changed: Mapping[KeyPath, Any], raw: Mapping[str, Any]) -> bool:
    """Whether nothing but the optimizer, the schedule and random draws follows from what has changed."""
    decided = before.decided
    if decided.own is not None or decided.network is None or decided.plain["phases"]:
        return False
    kept = {path: value for path, value in changed.items() if path[0] != FREE}
    return not are_referred(changed, raw) and all(
        path == ("seed",) or (path[0] in NUMBERS and _are_numbers(value)) for path, value in kept.items()
    )


def _are_numbers(value: Any) -> bool:
    return all(type(one) in (int, float) for one in (value if isinstance(value, list) else [value]))


def refuse_changed(config: DictConfig, changed: Mapping[KeyPath, Any], *, checked: Plan) -> None:
    """Look at what of a config has changed against that of a checked plan: its seed, numbers of optimizer and schedule.

    changed: by path.
    Raises: ConfigError with all faults of these.
    """
    plain = with_changes(checked.plain, changed)
    groups = {path[0] for path in changed} & set(OPTIMIZATION_KEYS)
    faults = target_faults({name: plain[name] for name in sorted(groups)}, allow=allowed(plain), has_module=False)
    decided = Plan(resolved=Resolved(config=config, plain=plain, faults=tuple(faults)))
    # Nothing of these follows from what has changed.
    vars(decided).update(
        {part: getattr(checked, part) for part in ("spec", "objective", "phases", "metrics", "shapes")}
    )
    found = _Findings(decided)
    found.look_at_the_optimizer()
    if found.faults:
        raise ConfigError(located(config, once(found.faults)))


# --- all faults of a run ---


def examine(resolved: Resolved, *, machine: Machine | None = None) -> Examination:
    """All faults of a config, or the plan of its run.

    machine: what the run will have; None is this machine.
    """
    found = _Findings(Plan(resolved=resolved, machine=machine))
    found.look_at_the_placement()
    found.look_at_the_network()
    found.look_at_the_length()
    found.look_at_the_weights()
    found.look_at_the_checkpoint()
    faults = tuple(located(resolved.config, once(found.faults)))
    return Examination(faults=faults, plan=None if faults else found.decided)


def config_faults(config: DictConfig) -> tuple[Fault, ...]:
    """Return all errors of a composed config, each with the file that it came from."""
    return examine(resolve(config)).faults


def compare_with_data(decided: Plan) -> tuple[list[Fault], tuple[str, ...]]:
    """What the config says of its data, held against the data, where that is on this machine.

    Returns: the faults; and notes: of the samples, or why nothing could be compared, where that is so.
    """
    try:
        return [], refuse_other_data(decided)
    except ConfigError as error:
        faults = [fault for fault in error.faults if not f"{fault.key}.".startswith(DATA_SETS)]
        if faults:
            return faults, ()
        return [], (f"the data was not compared with what the config declares of it: {error.faults[0]}",)


def refuse_other_data(decided: Plan) -> tuple[str, ...]:
    """Raise ConfigError where the data set cannot be built, is not what the config says of it, or no loss takes it.

    Returns: what to say of its first samples that is no fault.
    """
    from exp.check.first_samples import Subject, look_at_samples
    from exp.check.metric_faults import mode_faults, monitor_faults

    plain = decided.plain
    try:
        if plain["predict"]:
            return decided.data.notes  # it has no answers that anything could be held against
        if decided.own is not None:
            # Built, for what its constructor refuses; what the module's steps take, nobody knows before the first.
            return decided.data.notes if decided.data_module is None else ()
        data = decided.data
        at_work: dict[Stage, bool] = {
            "train": plain["train"],
            "val": plain["train"] or plain["validate"],
            "test": plain["test"],
        }
        stages = [stage for stage in data.stages if at_work[stage]]
        subject = Subject(
            data=data,
            traces=decided.shapes.traces,
            phases=decided.phases,
            objective=decided.objective,
            measures=decided.metrics,
            metric_stages=[stage for stage in stages if stage in plain["metric_stages"]],
            accumulates=plain["trainer"]["accumulate_grad_batches"] > 1,
        )
        found = look_at_samples(subject, stages)
    except ConfigError as error:
        raise ConfigError(located(decided.resolved.config, error.faults)) from error
    except SampleError as error:
        raise ConfigError(located(decided.resolved.config, [error.fault])) from error
    except RunError:
        return ()  # what the user's own code raises: the run meets it, and keeps it in its report
    tags = monitors(dict(plain)) if plain["train"] else {}
    faults = [*found.faults, *monitor_faults(tags, found.entries, plain["metric_stages"])]
    if "monitor" in tags and not any(fault.key == "monitor" for fault in faults):
        faults += mode_faults(tags["monitor"], plain["mode"], decided.metrics)
    if faults:
        raise ConfigError(located(decided.resolved.config, once(faults)))
    return (*data.notes, *found.notes)


def place(
    plain: Mapping[str, Any],
    strategy: Strategy | LightningStrategy,
    *,
    rank: Rank | None = None,
    machine: Machine | None = None,
) -> Placement:
    """Where a run goes; with a rank, what the launcher that started it made.

    machine: what it will have; None is this one.
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
    if rank is None:
        return placement(name, **where, machine=machine)
    return adopted(rank, name, **where, machine=machine)


class _Findings:
    """The faults of a plan, found by asking for its parts one by one.

    decided: an attribute, the plan; without a fault all of it is decided.
    """

    def __init__(self, decided: Plan) -> None:
        self.decided, self.plain = decided, decided.plain
        self.faults = list(decided.resolved.faults)
        self._is_placed = False

    def look_at_the_placement(self) -> None:
        """Where the strategy puts the ranks; then whether the precision is at home there."""
        from exp.precision.words import WORDS

        if not self._is_known(PLACEMENT_KEYS):
            return
        placement = self._try(lambda: self.decided.placement)
        if placement is None or _touched(self.faults, ("precision", "phases")):
            return
        self._is_placed, precision = True, self.plain["precision"]
        word = WORDS[precision["word"]]
        self.faults += [*word.device_faults(placement.accelerator), *word.scaler_faults(precision["scaler"])]

    def look_at_the_network(self) -> None:
        """Build what is trained without memory, run it once, and ask every part what it refuses."""
        if not self._is_known(SHAPE_KEYS):
            return
        if self.decided.own is not None:
            self._look_at_the_module(self.decided.own)
            return
        objective, metrics = self._try(lambda: self.decided.objective), self._try(lambda: self.decided.metrics)
        if objective is None or metrics is None:
            return
        # Faults that are found here hide nothing from each other.
        known = tuple(self.faults)
        # Phases may take the optimizer and the schedule at the top.
        has_phases = not _touched(known, OPTIMIZATION_KEYS)
        seen = self.decided.shapes if has_phases else _examine_shapes(self.decided, ())
        # A network that does not fit what the config says of its data may fit the data.
        declared = compare_with_data(self.decided)[0] if seen.faults else []
        # What metrics and losses refuse may be the network's fault, but for the names that a refused term looks for.
        names = [f"{fault.key}.{name}" for fault in seen.faults for name in ("output", "target", "inputs")]
        declared = [fault for fault in declared if fault.key.startswith(("data.", *names))]
        self.faults += declared or seen.faults
        if not seen.faults and seen.network is not None:
            self._look_at_the_parts(known, objective, seen, seen.network)

    def _look_at_the_module(self, own: OwnTraining) -> None:
        """Build a LightningModule of the user's own, and ask every part what it cannot do with it."""
        known = tuple(self.faults)
        network = self._try(lambda: own.network)
        if network is None:
            return
        self._try(lambda: self.decided.data_module)
        self.faults += own.faults()
        planned = self._planned(None, None, network)
        self._look_at_the_callbacks(known)
        hooks = self._look_at_the_hooks(known, network, planned)
        if not own.is_complete:
            # Of layers that its setup makes, the run says whether a pattern matches any.
            self.faults = [fault for fault in self.faults if not _is_pattern(fault)]
        if planned is not None:
            self._look_at_the_strategy(known, dataclasses.replace(planned, hooks=hooks))

    def look_at_the_weights(self) -> None:
        """Whether the network fits the weights that it is to start from."""
        if _touched(self.faults, (*SHAPE_KEYS, "weights", "resume")) or self._holds_unknown(("weights",)):
            return
        if self._holds_unknown(SHAPE_KEYS) or self.decided.own is not None:
            return
        if self.plain["phases"] and _touched(self.faults, OPTIMIZATION_KEYS):  # which they may take from the top
            return
        node = self.plain["weights"]
        try:
            matching = self._try(lambda: self.decided.weights)
        except (RunError, MissingExtraError) as error:
            expected = "weights, as exp, torch or safetensors write them"
            self.faults.append(Fault(key="weights.from", got=str(error), expected=expected))
            return
        if matching is not None:
            self.faults += matching.faults(node["from"], is_strict=node["strict"])

    def look_at_the_checkpoint(self) -> None:
        """Whether a config that is right by itself goes with the checkpoint that it names."""
        if self.faults:
            return
        try:
            self.faults += self.decided.resuming.faults
        except RunError as error:
            self.faults.append(Fault(key="resume", got=str(error), expected="a checkpoint that exp wrote"))

    def _look_at_the_parts(
        self, known: Iterable[Fault], objective: Objective, seen: ShapeExamination, network: nn.Module
    ) -> None:
        from exp.check.metric_faults import call_faults
        from exp.check.runtime_switches import switch_faults
        from exp.check.shapes import double_backward_faults, objectives_by_forward, term_faults
        from exp.construct import build_freezing
        from exp.engine.unfreezing import unfreezing_faults
        from exp.precision.keep import keep_faults
        from exp.precision.words import WORDS

        self.faults += unfreezing_faults(network, build_freezing(network, self.plain))
        made = self._look_at_the_optimizers(known, network)
        if not _touched(known, ("precision",)):
            precision = self.plain["precision"]
            word = WORDS[precision["word"]]
            self.faults += keep_faults(network, precision["keep"], otherwise=word.parameters)
            self.faults += [fault for optimizer in made for fault in word.optimizer_faults(optimizer)]
            self.faults += term_faults(objective, network, self.decided.spec, word=precision["word"])
        self.faults += call_faults(self.decided.metrics.values())
        phases = () if _touched(known, OPTIMIZATION_KEYS) else self.decided.phases
        for forward, part in objectives_by_forward(phases, objective).items():
            if forward in seen.traces:
                self.faults += double_backward_faults(seen.traces[forward], part)
        planned = self._planned(objective, seen, network)
        if planned is not None and not _touched(known, ("runtime", "trainer")):
            self.faults += switch_faults(planned)
        self._look_at_the_callbacks(known)
        hooks = self._look_at_the_hooks(known, network, planned)
        if planned is not None:
            self._look_at_the_strategy(known, dataclasses.replace(planned, hooks=hooks))

    def look_at_the_optimizer(self) -> None:
        """What optimizer and schedule refuse, and the precision of the optimizer, where all else was looked at."""
        from exp.precision.words import WORDS

        network = self.decided.network
        assert network is not None
        word = WORDS[self.plain["precision"]["word"]]
        for optimizer in self._look_at_the_optimizers(tuple(self.faults), network):
            self.faults += word.optimizer_faults(optimizer)

    def _look_at_the_optimizers(self, known: Iterable[Fault], network: nn.Module) -> list[Optimizer]:
        """What optimizer and schedule refuse, and patterns that match no parameter; gives those that can be made."""
        from exp.check.optimizer_steps import rate_faults, step_faults
        from exp.check.phases import phase_faults
        from exp.construct import build_optimization

        made: list[Optimizer] = []
        if _touched(known, OPTIMIZATION_KEYS) or self._holds_unknown(OPTIMIZATION_KEYS):
            return made
        # How many steps an epoch has the data alone knows, which is asked where a schedule may end too soon.
        trainer = self.plain["trainer"]
        steps, epochs = _limit(trainer, "max_steps"), _limit(trainer, "max_epochs")
        if phases := self.decided.phases:
            self.faults += phase_faults(phases, network, steps=steps, epochs=epochs, made=made)
            return made
        optimization = build_optimization(self.plain)
        found = self._try(lambda: optimization.make(network, total_steps=steps, total_epochs=epochs))
        if found is not None:
            made.append(found[0])
            self.faults += step_faults(optimization, network, found[0], key="optimizer")
            self.faults += rate_faults(
                optimization, found[0], key="scheduler", steps=lambda: self._steps(self._batches), epochs=epochs
            )
        return made

    def _planned(
        self, objective: Objective | None, seen: ShapeExamination | None, network: nn.Module
    ) -> Blueprint | None:
        """What parts may know of the run; None where nobody knows where it goes."""
        from exp.construct import build_network
        from exp.strategies.strategy import Blueprint, Strategy, traits_of

        if not self._is_placed:
            return None
        strategy = self.decided.strategy
        return Blueprint(
            network=network,
            trace=None if seen is None else seen.traces.get(None),
            build=None if seen is None else functools.partial(build_network, self.plain, self.decided.spec),
            placement=self.decided.placement,
            batch_size=self._batch_size,
            precision=self.plain["precision"]["word"],
            config=self.plain,
            needs=frozenset() if objective is None else objective.needs,
            meets=strategy.meets if isinstance(strategy, Strategy) else frozenset(),
            weighed=() if objective is None else objective.weighed,
            traits=traits_of(strategy),
            callbacks=self._classes_of(self.plain.get("callbacks")),
            optimizers=tuple(self._optimizer_classes()),
        )

    @property
    def _batch_size(self) -> int:
        """Of the global batch; 1 where loaders of the user's own do not say."""
        size = self.plain["data"].get("batch_size")
        return size if isinstance(size, int) else 1

    def _look_at_the_callbacks(self, known: Iterable[Fault]) -> None:
        """What no run can have, and what the libraries' own refuse when they are made. A user's wait for the run."""
        from exp.check.compatibility import callback_faults
        from exp.construct import construct

        if _touched(known, ("callbacks", "security")) or self._holds_unknown(("callbacks", "security")):
            return
        kinds = self._classes_of(self.plain["callbacks"])
        if not _touched(known, ("trainer",)):
            shows_bar = bool(self.plain["trainer"]["enable_progress_bar"])
            self.faults += callback_faults(kinds, nodes=self.plain["callbacks"], shows_bar=shows_bar)
        for name, kind in kinds.items():
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

        has_optimizer = self.decided.own is not None or is_node(self.plain.get("optimizer"))
        if _touched(known, STRATEGY_KEYS) or not has_optimizer:
            return
        found = list(compatibility_faults(other_parts(planned), planned))
        self.faults += found
        strategy = self.decided.strategy
        # What a strategy says of a model of exp's is nothing to a module that it cannot have.
        if isinstance(strategy, Strategy) and not (self.decided.own is not None and found):
            self.faults += strategy.faults(planned)

    def _look_at_the_hooks(
        self, known: Iterable[Fault], network: nn.Module, planned: Blueprint | None
    ) -> Mapping[str, Hook]:
        """What the hooks cannot do with this run; where what they read is wrong, patterns that match nothing alone."""
        from exp.check.compatibility import compatibility_faults, hook_parts
        from exp.construct import build_entries
        from exp.models.matching import matching

        if _touched(known, HOOK_KEYS) or self._holds_unknown(HOOK_KEYS):
            return {}
        is_hidden = _touched(known, KEYS_OF_HOOKS) or self._holds_unknown(KEYS_OF_HOOKS)
        if planned is None or is_hidden:
            hooks: Mapping[str, Hook] = self._try(lambda: build_entries(self.plain, "hooks")) or {}
            for name, hook in hooks.items():
                self._try(functools.partial(matching, network, hook.modules, key=f"hooks.{name}.modules"))
            return hooks
        hooks = self._try(lambda: self.decided.hooks) or {}
        planned = dataclasses.replace(planned, hooks=hooks)
        self.faults += compatibility_faults(hook_parts(hooks), planned)
        for name, hook in hooks.items():
            hook.name = name
            self.faults += hook.faults(planned)
        return hooks

    def look_at_the_length(self) -> None:
        """Whether an epoch is long enough for the validation in it."""
        from exp.engine.progress import refuse_late_validation

        if self.faults or not self.plain["train"]:
            return
        if isinstance(self.plain["trainer"]["val_check_interval"], int):
            self._try(lambda: refuse_late_validation(self._lengths, self._batches))

    @functools.cached_property
    def _batches(self) -> int | None:
        """Global batches of an epoch of training; None where the data do not say, or are not on this machine."""
        if self.decided.data_module is not None:
            return None
        try:
            return len(self.decided.data.loader("train"))
        except (ExpError, TypeError):
            return None

    @property
    def _lengths(self) -> Trainer:
        """The attributes of a Trainer that decide the length of the run."""
        trainer = self.plain["trainer"]
        values = {name: default if trainer[name] is None else trainer[name] for name, default in LENGTHS.items()}
        return cast("Trainer", SimpleNamespace(**values, max_steps=None, callbacks=list(self._accumulating())))

    def _accumulating(self) -> Iterator[Callback]:
        """The callbacks that say how many batches make a step."""
        from lightning.pytorch.callbacks import GradientAccumulationScheduler

        from exp.construct import construct

        for name, kind in self._classes_of(self.plain["callbacks"]).items():
            if issubclass(kind, GradientAccumulationScheduler):
                node, allow = self.plain["callbacks"][name], self.plain["security"]["allow"]
                with contextlib.suppress(ConfigError):  # which is told with the callbacks
                    yield construct(node, key=f"callbacks.{name}", allow=allow)

    def _steps(self, batches: int | None) -> int | None:
        from exp.engine.progress import Limits, total_steps

        steps = self.plain["trainer"]["max_steps"]
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


def _beginnings(config: DictConfig, known: Iterable[Fault]) -> tuple[object, object]:
    """Return `resume` and `weights.from`, which `_find_start` and `_find_weights` may change; None for a faulty one."""
    resume = None if _touched(known, ("resume",)) else config.resume
    return resume, None if _touched(known, ("weights",)) else config.weights["from"]


def _find_start(config: DictConfig) -> tuple[list[Fault], tuple[str, ...]]:
    """Fill in the checkpoint that `resume=auto` or `runtime.autoresume` finds: the faults, and what there is to say."""
    if config.resume != "auto" and config.runtime.autoresume is not True:
        return [], ()  # without an import of torch
    from exp.check.starting_point import find_start

    try:
        found = find_start(config)
    except ConfigError as error:
        return list(error.faults), ()
    config.resume = None if found.path is None else str(found.path)
    return [], found.notes


def _find_weights(config: DictConfig) -> None:
    """Fill in the file that a run directory stands for, so that every rank and every restart reads the same."""
    source = config.weights["from"]
    if source is not None and Path(source).is_dir():
        found = weights_of_run(Path(source))
        config.weights["from"] = None if found is None else str(found)


def _hold_batches(config: DictConfig) -> bool:
    """Set `data.shuffle` to false in a run that overfits a few batches, unless the config sets it.

    Shuffled batches differ in each epoch. Lightning disables the shuffling of its own loaders for the same reason.

    Returns:
        Whether the config was changed.
    """
    if not config.trainer.overfit_batches or brings_data(_raw(config)) or "shuffle" in config.data:
        return False
    with open_dict(config.data):
        config.data.shuffle = False
    return True


def _fill_in(config: DictConfig) -> bool:
    """Fill in the shape, dtype, number of outputs and classes that the data set knows, if one of them is null.

    Returns:
        Whether the config was changed.

    Raises:
        ConfigError, RunError: The data set cannot be built.
    """
    from exp.construct import build_data, plain_config

    raw = _raw(config)
    if brings_data(raw) or not is_open(config.data):
        return False
    # Resolved separately, because other nodes may interpolate what is filled in here.
    given = {"seed": config.seed, **{name: plain_config(config[name]) for name in ("data", "security")}}
    # These may have faults: each is read raw, and UNKNOWN stands for a missing key.
    values = Values(raw)
    others = {name: values[name] for name in ("objective", "metrics", "resume")}
    precision = {"word": values["precision.word"]}
    spec = build_data({**given, **others, "precision": precision}).spec
    if list(spec.inputs) != ["input"]:
        config.data.inputs = {name: {"shape": list(one.shape), "dtype": one.dtype} for name, one in spec.inputs.items()}
    config.data.input_shape = None if spec.input_shape is None else list(spec.input_shape)
    config.data.input_dtype = spec.input_dtype
    config.data.num_outputs = spec.num_outputs
    config.data.num_classes = spec.num_classes
    return True


def _raw(config: DictConfig) -> dict[str, Any]:
    """Return the values as they are written, interpolations included."""
    return cast("dict[str, Any]", OmegaConf.to_container(config, resolve=False, throw_on_missing=False))


def _examine_shapes(decided: Plan, phases: tuple[Phase, ...]) -> ShapeExamination:
    from exp.check.shapes import examine_shapes
    from exp.construct import build_unsized_network, prepare
    from exp.models.syntax import ProgramError

    def network() -> nn.Module:
        try:
            return build_unsized_network(decided.plain, device="meta")
        except ProgramError as error:
            key = error.key or "model.forward"
            raise ConfigError([program_fault(key, one) for one in (error, *error.others)]) from error

    return examine_shapes(
        network_factory=network,
        spec=decided.spec,
        objective=decided.objective,
        phases=phases,
        prepare=functools.partial(prepare, plain=decided.plain),
        arithmetic=_arithmetic(decided.plain.get("precision")),
    )


def _arithmetic(precision: Any) -> Arithmetic:
    """The dtypes of a run; what a fault hides, or makes a layer's own, is not judged."""
    from exp.models.forward_trace import Arithmetic
    from exp.precision.words import WORDS

    named = precision.get("word") if isinstance(precision, Mapping) else None
    word = WORDS.get(named) if isinstance(named, str) else None
    is_plain = word is not None and word.parameters is None and precision.get("keep") == {}
    return Arithmetic(autocast=word.autocast if word else None, mixes=is_plain)


def _limit(trainer: Mapping[str, Any], name: str) -> int:
    limit = trainer[name]
    return limit if isinstance(limit, int) and limit > 0 else ANY_LENGTH


def _is_pattern(fault: Fault) -> bool:
    return fault.key.startswith("hooks.") and fault.key.endswith(".modules")


def _touched(faults: Iterable[Fault], keys: Iterable[str]) -> bool:
    """Whether a fault is of one of these nodes, or of the config as a whole."""
    return any(fault.key.partition(".")[0] in (*keys, "config") for fault in faults)
