"""The complete check of a config, as a list of stages in a fixed order.

Each stage declares the config keys that it reads, and the earlier stages that it needs. First, `resolve` of
exp.check.resolution finds the errors of values, keys, rules and targets. After that, the stages in this module compute
the parts of the plan. A stage is skipped if one of its keys has an error, or if an earlier stage that it needs failed.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, cast

from omegaconf import DictConfig

from exp.check.compatibility import callback_errors, compatibility_errors, hook_parts, other_parts
from exp.check.continuation import Resuming, examine_resume
from exp.check.first_samples import compare_with_data
from exp.check.metric_errors import call_errors, mode_errors
from exp.check.optimizer_steps import rate_errors, step_errors
from exp.check.own_training import module_errors, module_notes
from exp.check.parameters import target_errors
from exp.check.phases import phase_errors
from exp.check.plan import Plan, Resolved
from exp.check.resolution import resolve
from exp.check.runtime_switches import switch_errors
from exp.check.shapes import double_backward_errors, objectives_by_forward, shape_errors, term_errors
from exp.check.stages import allowed_packages, concern_keys, locate_errors, unique_errors
from exp.check.training_notes import training_notes
from exp.config.frozen import COMPOSITION
from exp.config.module_key import has_module
from exp.config.plain_tree import KeyPath, are_referred, changes, is_node, leaves, with_changes
from exp.config.reading import UNKNOWN, raw_values
from exp.config.targets import resolve as resolve_target
from exp.construct import build_entries, build_freezing, build_network, build_optimization, construct
from exp.engine.checkpoint import read_weights
from exp.engine.progress import epoch_batches, take_limits, total_steps
from exp.engine.unfreezing import unfreezing_errors
from exp.errors import (
    LIBRARIES,
    ConfigError,
    ErrorDetails,
    ExpError,
    MissingExtraError,
    RunError,
    config_error,
    raise_errors,
)
from exp.models.matching import find_modules
from exp.models.weights import Matching, match_weights
from exp.precision.keep import keep_errors
from exp.precision.words import WORDS
from exp.strategies.strategy import Blueprint, Strategy, traits_of

if TYPE_CHECKING:
    from lightning.pytorch import Trainer
    from torch import nn
    from torch.optim import Optimizer

    from exp.strategies.placement import Machine

OPTIMIZATION_KEYS = ("optimizer", "scheduler", "trainer")
# Keys from which a network, its objective and its metrics are built.
SHAPE_KEYS = (
    "module", "model", "data", "objective", "phases", "metrics", "seed", "security", "initialisation", "freeze", "lora",
)  # fmt: skip
# Keys that the check of a strategy reads, and keys that the check of a hook reads.
STRATEGY_KEYS = ("callbacks", "hooks", "metrics", "objective", "phases", "precision", "runtime", "trainer")
KEYS_OF_HOOKS = ("data", "optimizer", "phases", "precision", "runtime", "strategy", "trainer")
# Top-level keys that contain only numbers of the optimizer and its schedule.
NUMBERS = ("optimizer", "scheduler")
# Number of steps or epochs of a run without a limit, for schedules.
ANY_LENGTH = 1_000_000_000
# Defaults of Lightning's Trainer for arguments that are null in the config.
LENGTHS = {
    "max_epochs": None,
    "limit_train_batches": 1.0,
    "val_check_interval": 1.0,
    "check_val_every_n_epoch": None,
    "accumulate_grad_batches": 1,
}


class Check:
    """The state and the results of the check of one config.

    Attributes:
        decided: Plan of the run. If the check finds no error, all parts of the plan are computed.
        settings: Config as typed objects.
        found: Errors found so far.
        hidden: Errors that disable later stages. A stage is skipped if one of its keys has such an error.
        passed: Names of the stages that found no error. The set also contains `module` if the config trains a user's
            LightningModule, and otherwise `model`.
        matching: Match of the network's parameters with the weights in `weights.from`. The stage `weights` sets it.
        resuming: Differences from the checkpoint in `resume`. The stage `resume` sets them.
    """

    def __init__(self, plan: Plan, *, passed: Iterable[str] = ()) -> None:
        self.decided, self.settings = plan, plan.settings
        self.found = list(plan.resolved.errors)
        self.hidden = tuple(self.found)
        self.passed = {"module" if has_module(dict(plan.plain)) else "model", *passed}
        self.matching: Matching | None = None
        self.resuming = Resuming()

    def run(self, stages: Iterable[Stage]) -> None:
        """Run the stages in order, and collect their errors.

        A stage is skipped if one of its keys or one of its needed stages has an error.
        """
        for stage in stages:
            if not self.passed.issuperset(stage.needs) or not self.knows(stage.keys):
                continue
            found: list[ErrorDetails] = []
            try:
                result = stage.run(self)
                found += result or ()
                if result is not None and not found:
                    self.passed.add(stage.name)
            except ConfigError as error:
                found += error.errors
            self.found += found
            if found and stage.hides:
                self.hidden = tuple(self.found)

    def knows(self, keys: Sequence[str]) -> bool:
        """Return whether all values in the given top-level keys are known and have no error."""
        return not concern_keys(self.hidden, keys) and not any(
            value is UNKNOWN or any(part is UNKNOWN for _, part in leaves(value))
            for value in (self.decided.plain[key] for key in keys)
        )

    @property
    def network(self) -> nn.Module:
        """The network on the meta device. It exists only after the stage `network` has passed."""
        assert self.decided.network is not None
        return self.decided.network

    @functools.cached_property
    def blueprint(self) -> Blueprint:
        """Description of the run that hooks and strategies check."""
        plan, settings, strategy = self.decided, self.settings, self.decided.strategy
        objective = plan.objective if plan.own is None else None
        phases = {name: phase["optimizer"] for name, phase in settings.phases.items() if phase.get("optimizer")}
        return Blueprint(
            network=self.network,
            trace=None if plan.own is not None else plan.shapes.traces.get(None),
            build=None if plan.own is not None else functools.partial(build_network, settings, plan.spec),
            placement=plan.placement,
            batch_size=settings.batch_size or 1,
            precision=settings.precision.word,
            settings=settings,
            needs=frozenset() if objective is None else objective.needs,
            meets=strategy.meets if isinstance(strategy, Strategy) else frozenset(),
            weighed=() if objective is None else objective.weighed,
            traits=traits_of(strategy),
            callbacks=self.classes_of(settings.callbacks),
            optimizers=tuple(self.classes_of({**phases, "": settings.optimizer}).values()),
        )

    @functools.cached_property
    def errors(self) -> tuple[ErrorDetails, ...]:
        """All errors, each with its file and line. The list is cached, so read it only after all stages have run."""
        return tuple(locate_errors(self.decided.resolved.config, unique_errors(self.found)))

    def plan(self) -> Plan:
        """Return the plan of the run.

        Raises:
            ConfigError: The config has errors. The exception lists all of them.
        """
        raise_errors(self.errors)
        return self.decided

    @functools.cached_property
    def notes(self) -> tuple[str, ...]:
        """Remarks that are not errors.

        They report parts that were not checked, settings that train badly, and changes in a resumed run.
        """
        decided, settings = self.decided, self.decided.settings
        if decided.own is not None:
            return (*decided.resolved.notes, *module_notes(decided.own), *self.resuming.notes)
        notes = [*decided.resolved.notes, *decided.shapes.notes, *self.resuming.notes]
        if decided.network is not None:
            notes += training_notes(decided)
        source = settings.weights.from_
        if source is not None and self.matching is not None:
            notes.append(self.matching.summary(source))
        elif source is not None and settings.resume is not None:
            notes.append(f"weights.from={source} is not read, because the run resumes from {settings.resume}")
        return tuple(notes)

    def classes_of(self, nodes: Any) -> dict[str, Any]:
        """Return the class that each node names in its `_target_`. Nodes with an error are left out.

        Args:
            nodes: Nodes of the config, by name.

        Returns:
            Classes by the name of the node.
        """
        found: dict[str, Any] = {}
        for name, node in nodes.items() if isinstance(nodes, dict) else ():
            with contextlib.suppress(ConfigError, MissingExtraError):
                if is_node(node) and isinstance(node["_target_"], str):
                    found[name] = resolve_target(node["_target_"], allow=self.settings.security.allow)
        return found


@dataclass(frozen=True, kw_only=True)
class Stage:
    """A stage of the check.

    Attributes:
        name: Name of the stage. Later stages list this name in `needs`.
        run: Function that returns the errors or raises ConfigError. It returns None if the stage cannot be completed.
        keys: Top-level config keys that the stage reads. Default: no keys.
        needs: Names of the stages that must have passed before. Default: no stages.
        hides: Whether later stages are skipped if they read a key in which this stage found an error. Default: false.
    """

    name: str
    run: Callable[[Check], Iterable[ErrorDetails] | None]
    keys: Sequence[str] = ()
    needs: Sequence[str] = ()
    hides: bool = False


def _placement(check: Check) -> Iterable[ErrorDetails] | None:
    return () if check.decided.placement else None


def _precision(check: Check) -> Iterator[ErrorDetails]:
    precision = check.settings.precision
    word = WORDS[precision.word]
    yield from word.device_errors(check.decided.placement.accelerator)
    yield from word.scaler_errors(vars(precision.scaler))


def _objective(check: Check) -> Iterator[ErrorDetails]:
    for part in ("objective", "metrics"):
        try:
            getattr(check.decided, part)
        except ConfigError as error:
            yield from error.errors


def _network(check: Check) -> Iterable[ErrorDetails] | None:
    """Return the errors that the forwards on the meta device find. Return None if the network cannot be checked.

    Wrong values of `data`, such as a wrong input shape, also lead to errors in the network. In that case, only the
    errors of `data` are returned.
    """
    plan = check.decided
    if check.settings.phases and not check.knows(OPTIMIZATION_KEYS):
        return None  # phases may use the top-level optimizer and schedule
    found = shape_errors(plan.shapes, plan.spec, plan.objective, plan.phases)
    if not found:
        return None if plan.network is None else ()
    # The comparison with the data also reports losses and metrics that fail only because the network is wrong. Keep
    # errors of `data`, and of unknown names in a term.
    names = [f"{error.key}.{name}" for error in found for name in ("output", "target", "inputs")]
    declared = [error for error in compare_with_data(plan)[0] if error.key.startswith(("data.", *names))]
    return declared or found


def _module(check: Check) -> Iterable[ErrorDetails] | None:
    return () if check.decided.own is not None and check.decided.own.network is not None else None


def _loaders(check: Check) -> Iterator[ErrorDetails]:
    assert check.decided.own is not None
    try:
        check.decided.data_module  # noqa: B018  (the constructor may raise ConfigError)
    except ConfigError as error:
        yield from error.errors
    yield from module_errors(check.decided.own)


def _freezing(check: Check) -> Iterable[ErrorDetails]:
    return unfreezing_errors(check.network, build_freezing(check.network, check.settings))


def _optimizers(check: Check) -> Iterator[ErrorDetails]:
    """Yield the errors of the optimizer and the schedule, and of patterns that match no parameter."""
    plan, settings, network = check.decided, check.settings, check.network
    made: list[Optimizer] = []
    # The number of steps in an epoch requires reading the data, so it is computed only if a schedule may end too early.
    steps, epochs = map(_limit, (settings.trainer.max_steps, settings.trainer.max_epochs))
    if plan.phases:
        yield from phase_errors(plan.phases, network, steps=steps, epochs=epochs, made=made)
    else:
        optimization = build_optimization(settings)
        optimizer, _ = optimization.make(network, total_steps=steps, total_epochs=epochs)
        made.append(optimizer)
        yield from step_errors(optimization, network, optimizer, key="optimizer")
        yield from rate_errors(optimization, optimizer, key="scheduler", steps=lambda: _steps(check), epochs=epochs)
    if check.knows(("precision",)):
        word = WORDS[settings.precision.word]
        yield from (error for one in made for error in word.optimizer_errors(one))


def _terms(check: Check) -> Iterator[ErrorDetails]:
    plan, precision, network = check.decided, check.settings.precision, check.network
    yield from keep_errors(network, precision.keep, otherwise=WORDS[precision.word].parameters)
    yield from term_errors(plan.objective, network, plan.spec)


def _calls(check: Check) -> Iterator[ErrorDetails]:
    plan = check.decided
    yield from call_errors(plan.metrics.values())
    for forward, part in objectives_by_forward(plan.phases, plan.objective).items():
        if forward in plan.shapes.traces:
            yield from double_backward_errors(plan.shapes.traces[forward], part)


def _callbacks(check: Check) -> Iterator[ErrorDetails]:
    """Yield the errors of callbacks.

    The check constructs callbacks of libraries to find wrong arguments. Only the run constructs callbacks of users.
    """
    nodes, allow = check.settings.callbacks, check.settings.security.allow
    kinds = check.classes_of(nodes)
    if check.knows(("trainer",)):
        shows_bar = bool(check.settings.trainer.enable_progress_bar)
        yield from callback_errors(kinds, shows_bar=shows_bar)
    for name, kind in kinds.items():
        if kind.__module__.partition(".")[0] in LIBRARIES:
            try:
                construct(nodes[name], key=f"callbacks.{name}", allow=allow)
            except ConfigError as error:
                yield from error.errors


def _hooks(check: Check) -> Iterator[ErrorDetails]:
    if "precision" not in check.passed or not check.knows(KEYS_OF_HOOKS):
        for name, hook in build_entries(check.settings, "hooks").items():
            find_modules(check.network, hook.modules, key=f"hooks.{name}.modules")
        return
    own, hooks = check.decided.own, check.decided.hooks
    planned = dataclasses.replace(check.blueprint, hooks=hooks)
    found = list(compatibility_errors(hook_parts(hooks), planned))
    for name, hook in hooks.items():
        hook.name = name
        found += hook.errors(planned)
    for error in found:
        # The setup of the user's module may add layers later, so a pattern without a match is not an error yet.
        is_early = own is not None and not own.is_complete and error.key.endswith(".modules")
        if not is_early:
            yield error


def _strategy(check: Check) -> Iterator[ErrorDetails]:
    """Yield the errors of the strategy, and of parts of the run that are not compatible."""
    plan, settings = check.decided, check.settings
    if plan.own is None and not is_node(settings.optimizer):
        return
    found = list(compatibility_errors(other_parts(check.blueprint), check.blueprint))
    yield from found
    # If the strategy does not support the user's module, other errors of the strategy do not apply.
    if isinstance(plan.strategy, Strategy) and not (plan.own is not None and found):
        hooks = plan.hooks if check.knows(("security", *KEYS_OF_HOOKS)) else {}
        yield from plan.strategy.errors(dataclasses.replace(check.blueprint, hooks=hooks))


def _length(check: Check) -> Iterable[ErrorDetails]:
    """Yield the error of an epoch with fewer batches than trainer.val_check_interval."""
    trainer = check.settings.trainer
    interval = trainer.val_check_interval
    if check.found or not check.settings.train or not isinstance(interval, int):
        return
    taken = epoch_batches(_lengths(check), _batches(check.decided))
    if trainer.check_val_every_n_epoch is not None and taken is not None and interval > taken:
        got = f"{interval}, more than the {taken} batches of an epoch"
        fix = "Add trainer.check_val_every_n_epoch=null to count the batches over all epochs"
        yield ErrorDetails("trainer.val_check_interval", got, f"at most {taken}", fix)


def _weights(check: Check) -> Iterable[ErrorDetails]:
    """Return the errors of the file in `weights.from`, which initializes the network."""
    node = check.settings.weights
    if node.from_ is None or check.settings.resume is not None:
        return ()
    try:
        weights = read_weights(Path(node.from_), averaged=node.averaged)
    except (RunError, MissingExtraError) as error:
        expected = "a file of weights that exp, torch or safetensors wrote"
        raise config_error("weights.from", got=str(error), expected=expected) from error
    check.matching = match_weights(weights, check.network, keys=node.keys)
    return check.matching.errors(node.from_, is_strict=node.strict)


def _resume(check: Check) -> Iterable[ErrorDetails]:
    """Return the errors of a run that cannot resume from the checkpoint in `resume`."""
    plan, settings = check.decided, check.settings
    if settings.resume is None or check.found:
        return ()
    try:
        if plan.own is None:
            check.resuming = examine_resume(plan.plain, network=plan.network)
        else:
            # The module's setup may rename layers, as torch.compile does.
            network = plan.network if plan.own.is_complete else None
            check.resuming = examine_resume(plan.plain, network=network, prefix="")
    except RunError as error:
        raise config_error("resume", got=str(error), expected="a checkpoint that exp wrote") from error
    return check.resuming.errors


OPTIMIZERS = Stage(name="optimizers", run=_optimizers, keys=OPTIMIZATION_KEYS, needs=("model", "network"))
STAGES = (
    Stage(name="placement", run=_placement, keys=("strategy", "launch", "security"), hides=True),
    Stage(name="precision", run=_precision, keys=("precision", "phases"), needs=("placement",), hides=True),
    Stage(name="objective", run=_objective, keys=SHAPE_KEYS, needs=("model",)),
    Stage(
        name="modes",
        run=lambda check: mode_errors(check.settings, check.decided.metrics),
        keys=("monitor", "mode", "scheduler", "callbacks", "sweep"),
        needs=("objective",),
    ),
    Stage(name="network", run=_network, keys=SHAPE_KEYS, needs=("model", "objective")),
    Stage(name="network", run=_module, keys=SHAPE_KEYS, needs=("module",)),
    Stage(name="loaders", run=_loaders, needs=("module", "network")),
    Stage(name="freezing", run=_freezing, needs=("model", "network")),
    OPTIMIZERS,
    Stage(name="terms", run=_terms, keys=("precision",), needs=("model", "network")),
    Stage(name="calls", run=_calls, keys=OPTIMIZATION_KEYS, needs=("model", "network")),
    Stage(
        name="switches",
        run=lambda check: switch_errors(check.blueprint),
        keys=("runtime", "trainer"),
        needs=("model", "network", "precision"),
    ),
    Stage(name="callbacks", run=_callbacks, keys=("callbacks", "security"), needs=("network",)),
    Stage(name="hooks", run=_hooks, keys=("hooks", "security"), needs=("network",)),
    Stage(name="strategy", run=_strategy, keys=STRATEGY_KEYS, needs=("network", "precision")),
    Stage(name="length", run=_length, keys=("train", "trainer"), needs=("callbacks",)),
    Stage(name="weights", run=_weights, keys=("weights", "resume"), needs=("model", "network")),
    Stage(name="resume", run=_resume, keys=("resume",), needs=("network",)),
)


def _limit(limit: int | None) -> int:
    return ANY_LENGTH if limit in (None, -1) else limit


def _batches(plan: Plan) -> int | None:
    """Return the number of batches in a training epoch. Return None if the number is unknown on this machine.

    A batch contains the samples of all ranks.
    """
    try:
        return None if plan.data_module is not None else len(plan.data.loader("train"))
    except (ExpError, TypeError):
        return None


def _lengths(check: Check) -> Trainer:
    """Return a stand-in for Lightning's Trainer, with the attributes that determine the length of a run."""
    given = vars(check.settings.trainer)
    values = {name: default if given[name] is None else given[name] for name, default in LENGTHS.items()}
    return cast("Trainer", SimpleNamespace(**values, max_steps=None))


def _steps(check: Check) -> int | None:
    _, limits = take_limits(vars(check.settings.trainer))
    return total_steps(_lengths(check), limits, _batches(check.decided))


def examine(resolved: Resolved, *, machine: Machine | None = None) -> Check:
    """Return the completed check of a config, with all errors and the plan of the run.

    Args:
        resolved: Result of `exp.check.resolution.resolve`.
        machine: Description of the machine on which the run takes place. None (default): this machine.
    """
    check = Check(Plan(resolved=resolved, machine=machine))
    check.run(STAGES)
    return check


def plan(resolved: Resolved) -> Plan:
    """Return the plan of a config.

    Raises:
        ConfigError: The config has errors. The exception lists all of them.
    """
    return examine(resolved).plan()


def config_errors(config: DictConfig) -> tuple[ErrorDetails, ...]:
    """Return all errors of a composed config, each with the file that set the wrong value."""
    return examine(resolve(config)).errors


def validate(config: DictConfig) -> None:
    """Check a composed config. The config is not changed.

    Raises:
        ConfigError: The config has errors. The exception lists all of them.
    """
    checked_plan(config)


def checked_plan(config: DictConfig) -> Plan:
    """Return the plan of a config. The first samples of the data are also checked.

    Raises:
        ConfigError: The config has errors. The exception lists all of them.
    """
    decided = plan(resolve(config))
    errors, _ = compare_with_data(decided)
    raise_errors(errors)
    return decided


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A config without errors.

    Attributes:
        raw: Values of the config, with unresolved interpolations.
        decided: Plan of the config.
    """

    raw: Mapping[str, Any]
    decided: Plan


def check_job(config: DictConfig, before: Checked | None) -> Checked:
    """Return the checked config of a sweep's job.

    A full check builds and runs the network, which takes 40 ms, and a job may train for only 60 ms. The check is
    therefore limited to the changed values, if a job differs from a checked job only in the following values: `seed`,
    and numbers in `optimizer` and `scheduler`.

    Args:
        config: Config of the job. It must have passed the checks that do not import torch.
        before: Result of this function for an earlier job. None causes a full check.

    Raises:
        ConfigError: The config has errors. The exception lists all of them.
    """
    raw = raw_values(config)
    del raw[COMPOSITION]
    if before is not None:
        changed = changes(before.raw, raw)
        if changed is not None and _changes_the_optimizer_alone(before, changed, raw):
            _refuse_changed(config, changed, checked=before.decided)
            return before
    return Checked(raw=raw, decided=checked_plan(config))


def _changes_the_optimizer_alone(before: Checked, changed: Mapping[KeyPath, Any], raw: Mapping[str, Any]) -> bool:
    """Return whether a job changes only the seed and numbers of the optimizer and the schedule.

    Args:
        before: Checked config of an earlier job.
        changed: Changed values by the path of their key.
        raw: Values of the job's config, with unresolved interpolations.
    """
    decided = before.decided
    if decided.own is not None or decided.network is None or decided.settings.phases:
        return False
    kept = {path: value for path, value in changed.items() if path[0] != "sweep"}
    return not are_referred(changed, raw) and all(
        path == ("seed",) or (path[0] in NUMBERS and _are_numbers(value)) for path, value in kept.items()
    )


def _are_numbers(value: object) -> bool:
    return all(type(one) in (int, float) for one in (value if isinstance(value, list) else [value]))


def _refuse_changed(config: DictConfig, changed: Mapping[KeyPath, Any], *, checked: Plan) -> None:
    plain = with_changes(checked.plain, changed)
    groups = {path[0] for path in changed} & set(OPTIMIZATION_KEYS)
    errors = target_errors(
        {name: plain[name] for name in sorted(groups)}, allow=allowed_packages(plain), has_module=False
    )
    decided = Plan(resolved=Resolved(config=config, plain=plain, errors=tuple(errors)))
    # These parts do not depend on the changed values.
    vars(decided).update(
        {part: getattr(checked, part) for part in ("spec", "objective", "phases", "metrics", "shapes")}
    )
    check = Check(decided, passed=("network",))
    check.run([OPTIMIZERS])
    check.plan()
