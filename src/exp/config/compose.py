"""From overrides to the config of one job: Hydra's composition on our search path, and all faults at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf, open_dict

from exp.config.clusters import refuse_cluster
from exp.config.copying import copied
from exp.config.found_run import LEFT_OUT, Changes, key_of, merged, named_run
from exp.config.freeze import COMPOSITION, OUTPUT_DIR, OWN_GROUPS, literal
from exp.config.groups import PRIMARY, open_search_path
from exp.config.hydra_adapter import HYDRA_ERRORS, Loader, fault_of, hydra_config, name_folder, packages_allowed_by
from exp.config.hydra_node import (
    directory_of,
    follow_mode,
    hydra_node_faults,
    recorded_override_faults,
    resolve_hydra_values,
)
from exp.config.module_key import leave_out
from exp.config.overrides import (
    Line,
    checked_lines,
    diagnose,
    for_hydra,
    ignored_choices,
    swept_key_faults,
    with_value,
)
from exp.config.reading import name_gpu, secrets_kept
from exp.config.resolvers import use_resolvers
from exp.config.sources import source_of
from exp.errors import ConfigError, Fault

# Overrides that are not the job's own: of Hydra, and of how a sweep goes about its jobs.
HYDRAS = ("hydra.", "hydra/")
BESIDE_THE_JOB = (*HYDRAS, "sweep.")


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed config with its hydra node, and what it was made of."""

    config: DictConfig
    loader: Loader
    overrides: tuple[str, ...]
    config_name: str
    config_dir: str | None


class SweepAskedError(Exception):
    """A file of a config says `hydra.mode: MULTIRUN`, and the command has no flag -m."""


@secrets_kept()
def composition_of(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    multirun: bool = False,
    may_sweep: bool = False,
    check: Callable[[DictConfig], Sequence[Fault]] | None = None,
) -> Composition:
    """Compose, with the hydra node kept.

    multirun: overrides may hold several values, which are then left out.
    may_sweep: whether a file that says `hydra.mode: MULTIRUN` is heeded.
    check: where overrides have faults, finds those of the rest of the config, so that all come back at once.
    Raises: ConfigError with every fault of the overrides and of the composition; SweepAskedError.
    """
    may_sweep = may_sweep and named_run(overrides)[0] is None  # which is one run
    overrides = expanded(overrides, config_dir=config_dir, config_name=config_name, multirun=multirun)
    loader, vocabulary = open_search_path(config_dir=config_dir, config_name=config_name, overrides=overrides)
    lines, faults = checked_lines(overrides, vocabulary, multirun=multirun)
    config: DictConfig | None = None
    try:
        given = for_hydra(lines, vocabulary)
        config = loader.compose(config_name=config_name, overrides=given, multirun=multirun)
        faults += recorded_override_faults(config, given)
        faults += _after_faults(config, lines, loader, multirun=multirun)
        faults += swept_key_faults(loader, config, lines)
        record_overrides(config, [line.text for line in lines])
    except ConfigError as error:
        faults += error.faults
    except HYDRA_ERRORS as error:
        found = diagnose(loader, lines)
        is_of_jobs = bool(found.faults) and multirun and any(line.group and line.is_sweep for line in lines)
        if is_of_jobs and not faults:
            # An option that is swept may have the keys: each job is told.
            late = [line for line in lines if not (line.group or line.is_sweep or line in found.healthy)]
            kept = [line.text for line in lines if line not in late]
            shared = composition_of(kept, config_dir=config_dir, config_name=config_name, multirun=True, check=check)
            record_overrides(shared.config, [line.text for line in lines])
            return replace(shared, overrides=tuple(overrides))
        faults += () if is_of_jobs else found.faults or (with_value(fault_of(error), lines),)
        config, lines = found.config, list(found.healthy)
        if config is not None:
            use_resolvers(config, allow=sorted(packages_allowed_by(overrides)))
    if config is None:
        raise ConfigError(faults)
    if may_sweep and config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN":
        raise SweepAskedError
    composition = Composition(
        config=config, loader=loader, overrides=tuple(overrides), config_name=config_name, config_dir=config_dir
    )  # fmt: skip
    if faults and check is not None:
        rest = _without_hydra(replace(composition, overrides=tuple(line.text for line in lines)), directory="")
        faults += _other_faults(check(rest), known=faults)
    if faults:
        raise ConfigError(faults)
    return composition


def expanded(
    overrides: Sequence[str], *, config_dir: str | None, config_name: str, multirun: bool = False
) -> Sequence[str]:
    """The overrides with those that make the config of a run in the place of `from_run=DIR`, where that is among them.

    Says on standard error what is set that no command line said.
    """
    run, now = named_run(overrides)
    if run is None:
        return overrides

    def composed(given: Sequence[str], *, several: bool) -> DictConfig:
        found = composition_of(given, config_dir=config_dir, config_name=config_name, multirun=several)
        return _without_hydra(found, directory="")

    trust = [text for text in now if key_of(text) == "security.allow"]
    before, overrides = merged(run, trust, without=LEFT_OUT), merged(run, now, without=LEFT_OUT)
    try:
        own = composed(before, several=False)
        changes = Changes.of(run, own)
        if now and (changes.then or changes.since):
            changes = changes.beside(now, own, composed(overrides, several=multirun))
    except ConfigError as error:
        told = f"{run} is no config today, so what has changed since is not known: {error.faults[0]}"
        print(told, file=sys.stderr)
        return overrides
    for line in changes.lines(run):
        print(line, file=sys.stderr)
    return [*overrides[: len(overrides) - len(now)], *changes.overrides(), *now]


def with_values(composition: Composition, changed: Sequence[Override], *, overrides: Sequence[str]) -> Composition:
    """The composition of the same overrides but for some plain values, without composing again.

    changed: the overrides with other values; each sets a key that the composition has set. overrides: all of them.
    """
    config = copied(composition.config)
    for override in changed:
        composition.loader.apply(override, config)
    record_overrides(config, overrides)
    return replace(composition, config=config, overrides=tuple(overrides))


def record_overrides(config: DictConfig, overrides: Sequence[str]) -> None:
    """Keep the overrides as typed where Hydra keeps those that it composed with."""
    texts = [text for text in overrides if not text.lstrip("+~").startswith(HYDRAS)]
    config.hydra.overrides.task = texts
    name_folder(config, texts)


@secrets_kept()
def job_config(composition: Composition, *, job: int | None = None, sweep: str | None = None) -> DictConfig:
    """The job's config without the hydra node. In a sweep: job is its number, sweep the sweep's directory.

    Raises: ConfigError where a directory or an interpolation of Hydra's own values leads nowhere.
    """
    config = composition.config
    if sweep is None:
        refuse_cluster(config.hydra.launcher._target_)
    unused = [] if sweep is not None else list(OmegaConf.select(config, "hydra.sweeper.params") or ())
    with open_dict(config):
        if job is not None:
            config.hydra.job.num = job
            config.hydra.job.id = str(job)
        # The run directory gets its final name when it is made: values keep the reference to it.
        config.hydra.runtime.output_dir = OUTPUT_DIR
        config[COMPOSITION] = {"directory": literal(OUTPUT_DIR)}
    with hydra_config(config):
        directory = directory_of(config, sweep=sweep)
        faults = resolve_hydra_values(config)
    config = _without_hydra(composition, directory=directory)
    if faults:
        raise ConfigError([replace(fault, source=source_of(config, fault.key)) for fault in faults])
    for key in unused:
        place = source_of(config, f"hydra.sweeper.params.{key}")
        print(f"hydra.sweeper.params.{key} is not used: -m makes a sweep of it  [{place}]", file=sys.stderr)
    return config


def shared_config(composition: Composition) -> DictConfig:
    """Return a copy of what the jobs of a sweep share, without the hydra node and what is swept."""
    return _without_hydra(replace(composition, config=copied(composition.config)), directory="")


def _without_hydra(composition: Composition, *, directory: str) -> DictConfig:
    config = composition.config
    OmegaConf.set_readonly(config, False)
    with open_dict(config):
        del config["hydra"]
        config[COMPOSITION] = {
            "overrides": recorded(composition.overrides),
            "of_sweep": [literal(text) for text in composition.overrides if text.lstrip("+~").startswith("sweep.")],
            "directory": literal(directory),
            OWN_GROUPS: composition.loader.own_groups_chosen(),
            # Texts, for OmegaConf takes longer over mappings than Hydra over a config.
            "layers": [literal(layer.text) for layer in composition.loader.layers if layer.file is not None],
        }
    name_gpu(config)
    leave_out(config)
    return config


def recorded(overrides: Sequence[str]) -> list[str]:
    """The overrides of a job as its config keeps them."""
    return [literal(text) for text in overrides if not text.lstrip("+~").startswith(BESIDE_THE_JOB)]


def _after_faults(config: DictConfig, lines: Sequence[Line], loader: Loader, *, multirun: bool) -> list[Fault]:
    with hydra_config(config):
        typed = {line.key: str(line.value) for line in lines if line.key.startswith("hydra.")}
        faults = hydra_node_faults(config, loader.layers, multirun=multirun, typed=typed)
    OmegaConf.set_readonly(config.hydra, False)
    faults += follow_mode(config, loader.layers, typed=typed)
    return faults + ignored_choices(lines, [layer.config_path for layer in loader.layers])


def _other_faults(found: Sequence[Fault], *, known: Sequence[Fault]) -> list[Fault]:
    """Those at other keys, and not in the nodes that the faulty overrides were meant for."""
    groups = {fault.key for fault in known if "." not in fault.key}
    keys = {fault.key for fault in known}
    return [fault for fault in found if fault.key not in keys and fault.key.partition(".")[0] not in groups]
