"""From overrides to the config of one job: Hydra's composition on our search path, and all errors at once."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.config.clusters import refuse_cluster
from exp.config.copying import copied
from exp.config.found_run import LEFT_OUT, Changes, key_of, merged, named_run
from exp.config.frozen import ALLOWED, COMPOSITION, OUTPUT_DIR, OWN_GROUPS, literal
from exp.config.grammar import packages_allowed_by
from exp.config.groups import PRIMARY, Vocabulary, open_search_path
from exp.config.hydra_adapter import HYDRAS, Layer, compose_groups, hydra_config, record_overrides
from exp.config.hydra_node import directory_of, hydra_node_errors, resolve_hydra_values
from exp.config.left_out import leave_out
from exp.config.overrides import Line, apply_values, checked_lines, for_hydra, ignored_choices
from exp.config.reading import name_gpu, secrets_kept
from exp.config.resolvers import use_resolvers
from exp.config.sources import source_of
from exp.errors import ConfigError, ErrorDetails, raise_errors

# Overrides that are not the job's own: of Hydra, and of how a sweep starts its jobs.
BESIDE_THE_JOB = (*HYDRAS, "sweep.")


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed config with its hydra node, its files in the order of merging, and the words of its command line."""

    config: DictConfig
    layers: tuple[Layer, ...]
    vocabulary: Vocabulary
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
    check: Callable[[DictConfig], Sequence[ErrorDetails]] | None = None,
) -> Composition:
    """Compose, with the hydra node kept.

    multirun: overrides may hold several values, which are then left out.
    may_sweep: whether a file that says `hydra.mode: MULTIRUN` is heeded.
    check: where overrides have errors, finds those of the rest of the config, so that all come back at once.
    Raises: ConfigError with every error of the overrides and of the composition; SweepAskedError.
    """
    may_sweep = may_sweep and named_run(overrides)[0] is None  # which is one run
    overrides = expanded(overrides, config_dir=config_dir, config_name=config_name, multirun=multirun)
    vocabulary = open_search_path(config_dir=config_dir, config_name=config_name)
    config_name = vocabulary.config_name
    lines, errors = checked_lines(overrides, vocabulary, multirun=multirun)
    try:
        config, layers = compose_groups(
            vocabulary.places, config_name=config_name, overrides=for_hydra(lines, vocabulary)
        )
    except ConfigError as error:
        raise ConfigError([*errors, *error.errors]) from error
    unfit = apply_values(config, lines, vocabulary)
    refused = [line for line, _ in unfit]
    texts = [line.text for line in lines if line not in refused]
    use_resolvers(config, allow=packages_allowed_by(texts))
    record_overrides(config, texts)
    errors += [error for _, error in unfit] or _after_errors(config, lines, layers, multirun=multirun)
    if may_sweep and config.hydra.mode is not None and config.hydra.mode.name == "MULTIRUN":
        raise SweepAskedError
    composition = Composition(
        config=config, layers=tuple(layers), vocabulary=vocabulary, overrides=tuple(overrides),
        config_name=config_name, config_dir=config_dir,
    )  # fmt: skip
    if errors and check is not None:
        rest = _without_hydra(replace(composition, overrides=tuple(texts)), directory="")
        errors += _other_errors(check(rest), known=errors)
    raise_errors(errors)
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
        told = f"{run} is no config today, so what has changed since is not known: {error.errors[0]}"
        print(told, file=sys.stderr)
        return overrides
    for line in changes.lines(run):
        print(line, file=sys.stderr)
    return [*overrides[: len(overrides) - len(now)], *changes.overrides(), *now]


@secrets_kept()
def job_config(composition: Composition, *, job: int | None = None, sweep: str | None = None) -> DictConfig:
    """The job's config without the hydra node. In a sweep: job is its number, sweep the sweep's directory.

    Raises: ConfigError where a directory or an interpolation of Hydra's own values leads nowhere.
    """
    config = composition.config
    if sweep is None:
        refuse_cluster(config.hydra.launcher["_target_"])
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
        errors = resolve_hydra_values(config)
    config = _without_hydra(composition, directory=directory)
    if errors:
        raise ConfigError([replace(error, source=source_of(config, error.key)) for error in errors])
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
            ALLOWED: [literal(package) for package in packages_allowed_by(composition.overrides)],
            OWN_GROUPS: own_groups_chosen(composition),
            # Texts, because OmegaConf takes longer to make mappings than Hydra to compose a config.
            "layers": [literal(layer.text) for layer in composition.layers if layer.file is not None],
        }
    name_gpu(config)
    leave_out(config)
    return config


def own_groups_chosen(composition: Composition) -> list[str]:
    """Return the folders of the user's own of which an option was merged under their name."""
    tops = [(layer.config_path.partition("/")[0], layer.package.partition(".")[0]) for layer in composition.layers]
    chosen = {group for group, node in tops if group == node}
    return [group for group in composition.vocabulary.own if group in chosen]


def recorded(overrides: Sequence[str]) -> list[str]:
    """The overrides of a job as its config keeps them."""
    return [literal(text) for text in overrides if not text.lstrip("+~").startswith(BESIDE_THE_JOB)]


def _after_errors(
    config: DictConfig, lines: Sequence[Line], layers: Sequence[Layer], *, multirun: bool
) -> list[ErrorDetails]:
    with hydra_config(config):
        typed = {line.key: str(line.value) for line in lines if line.key.startswith("hydra.")}
        errors = hydra_node_errors(config, layers, multirun=multirun, typed=typed)
    return errors + ignored_choices(lines, [layer.config_path for layer in layers])


def _other_errors(found: Sequence[ErrorDetails], *, known: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Those at other keys, and not in the nodes that the faulty overrides were meant for."""
    groups = {error.key for error in known if "." not in error.key}
    keys = {error.key for error in known}
    return [error for error in found if error.key not in keys and error.key.partition(".")[0] not in groups]
