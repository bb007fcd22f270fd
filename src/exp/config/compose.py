"""Compose the config of a run, or of one job of a sweep, from overrides. All errors are reported together."""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

from omegaconf import DictConfig, OmegaConf, open_dict

from exp.config.clusters import refuse_cluster
from exp.config.found_run import LEFT_OUT, changes, find_run, key_of, merge_overrides, override_texts, report_changes
from exp.config.frozen import ALLOWED, COMPOSITION, OUTPUT_DIR, OWN_GROUPS, literal
from exp.config.grammar import packages_allowed_by
from exp.config.groups import PRIMARY, Vocabulary, open_search_path
from exp.config.hydra_adapter import HYDRAS, Layer, compose_groups, hydra_config, record_overrides
from exp.config.hydra_node import directory_of, hydra_node_errors, resolve_hydra_values
from exp.config.left_out import leave_out
from exp.config.overrides import Line, apply_values, checked_lines, for_hydra, ignored_choices
from exp.config.reading import copy_config, secrets_kept
from exp.config.resolvers import use_resolvers
from exp.config.sources import source_of
from exp.errors import ConfigError, ErrorDetails, raise_errors

# Beginnings of overrides that do not apply to a single job: Hydra's settings and the settings of the sweep.
NOT_OF_A_JOB = (*HYDRAS, "sweep.")


@dataclass(frozen=True, kw_only=True)
class Composition:
    """A composed config, with the files and overrides from which it was composed.

    Args:
        config: Composed config, with the node `hydra`.
        layers: Files that were merged, in the order of merging.
        vocabulary: Groups, options and top-level keys that the command line may use.
        overrides: Overrides of the command.
        config_name: Name of the primary config, such as "train".
        config_dir: Directory of --config-dir. None: the flag is not given.
    """

    config: DictConfig
    layers: tuple[Layer, ...]
    vocabulary: Vocabulary
    overrides: tuple[str, ...]
    config_name: str
    config_dir: str | None


@secrets_kept()
def composition_of(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    multirun: bool = False,
    check: Callable[[DictConfig], Sequence[ErrorDetails]] | None = None,
) -> Composition:
    """Compose a config from the overrides of a command.

    Args:
        overrides: Overrides of the command.
        config_dir: Directory of --config-dir. Default: None, the flag is not given.
        config_name: Name of the primary config. Default: "train".
        multirun: The command is a sweep (-m). Overrides with several values are then allowed, but are not applied.
            Default: false.
        check: Function that returns the errors of a config. It is called only if the overrides have errors, so that all
            errors are reported together. Default: None, only errors of overrides are reported.

    Raises:
        ConfigError: The overrides or the composition have errors.
    """
    overrides = expand_run(overrides, config_dir=config_dir, config_name=config_name, multirun=multirun)
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
    composition = Composition(
        config=config, layers=tuple(layers), vocabulary=vocabulary, overrides=tuple(overrides),
        config_name=config_name, config_dir=config_dir,
    )  # fmt: skip
    if errors and check is not None:
        rest = _without_hydra(replace(composition, overrides=tuple(texts)), directory="")
        errors += _other_errors(check(rest), known=errors)
    raise_errors(errors)
    return composition


def expand_run(
    overrides: Sequence[str], *, config_dir: str | None, config_name: str, multirun: bool = False
) -> Sequence[str]:
    """Replace the override `from_run=DIR` by overrides that compose the config of that run.

    Additional overrides set the values of the run that differ from the YAML files of today. These values are printed on
    standard error. Overrides without `from_run` are returned unchanged.

    Args:
        overrides: Overrides of the command.
        config_dir: Directory of --config-dir. None: the flag is not given.
        config_name: Name of the primary config.
        multirun: The command is a sweep (-m). Overrides with several values are then allowed. Default: false.
    """
    run, now = find_run(overrides)
    if run is None:
        return overrides

    def compose_run(given: Sequence[str], *, several: bool = False) -> DictConfig:
        found = composition_of(given, config_dir=config_dir, config_name=config_name, multirun=several)
        return _without_hydra(found, directory="")

    trust = [text for text in now if key_of(text) == "security.allow"]
    before = merge_overrides(run, trust, without=LEFT_OUT)
    overrides = merge_overrides(run, now, without=LEFT_OUT)
    try:
        own = compose_run(before)
        then = changes(run, own, own, now)
        if now and then:  # compare again, to leave out values that the command changes
            then = changes(run, own, compose_run(overrides, several=multirun), now)
    except ConfigError as error:
        print(f"The config of {run} cannot be compared with the present files: {error.errors[0]}", file=sys.stderr)
        return overrides
    if then:
        print(report_changes(run, then), file=sys.stderr)
    return [*overrides[: len(overrides) - len(now)], *override_texts(then), *now]


@secrets_kept()
def job_config(composition: Composition, *, job: int | None = None, sweep: str | None = None) -> DictConfig:
    """Return the config of a run, or of a job of a sweep, without the node `hydra`.

    Args:
        composition: Composition of the run or job.
        job: Number of the job in a sweep. Default: None, a single run.
        sweep: Directory of the sweep. Default: None, a single run.

    Raises:
        ConfigError: The path of the run directory, or an interpolation of one of Hydra's values, cannot be resolved.
    """
    config = composition.config
    if sweep is None:
        refuse_cluster(config.hydra.launcher["_target_"])
    with open_dict(config):
        if job is not None:
            config.hydra.job.num = job
            config.hydra.job.id = str(job)
        # Values contain an interpolation of the run directory, because its name is final only after it is created.
        config.hydra.runtime.output_dir = OUTPUT_DIR
        config[COMPOSITION] = {"directory": literal(OUTPUT_DIR)}
    with hydra_config(config):
        directory = directory_of(config, sweep=sweep)
        errors = resolve_hydra_values(config)
    config = _without_hydra(composition, directory=directory)
    if errors:
        raise ConfigError([replace(error, source=source_of(config, error.key)) for error in errors])
    return config


def shared_config(composition: Composition) -> DictConfig:
    """Return the config of a sweep before swept values are applied, as a copy without the node `hydra`.

    All jobs of the sweep have this config in common.
    """
    return _without_hydra(replace(composition, config=copy_config(composition.config)), directory="")


def _without_hydra(composition: Composition, *, directory: str) -> DictConfig:
    config = composition.config
    OmegaConf.set_readonly(config, False)
    with open_dict(config):
        del config["hydra"]
        config[COMPOSITION] = {
            "overrides": job_overrides(composition.overrides),
            "of_sweep": [literal(text) for text in composition.overrides if text.lstrip("+~").startswith("sweep.")],
            "directory": literal(directory),
            ALLOWED: [literal(package) for package in packages_allowed_by(composition.overrides)],
            OWN_GROUPS: own_groups_chosen(composition),
            # Layers are stored as texts, because OmegaConf takes longer to create mappings than Hydra to compose.
            "layers": [literal(layer.text) for layer in composition.layers if layer.file is not None],
        }
    leave_out(config)
    return config


def own_groups_chosen(composition: Composition) -> list[str]:
    """Return the user's config groups from which an option is merged at the top-level key of the same name."""
    tops = [(layer.config_path.partition("/")[0], layer.package.partition(".")[0]) for layer in composition.layers]
    chosen = {group for group, node in tops if group == node}
    return [group for group in composition.vocabulary.own if group in chosen]


def job_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that apply to a single job, with `${` escaped.

    Without the escape, OmegaConf would resolve interpolations in the overrides when the node COMPOSITION is read.
    """
    return list(map(literal, kept_overrides(overrides)))


def kept_overrides(overrides: Sequence[str]) -> list[str]:
    """Return the overrides that apply to a single job. Overrides of Hydra's settings and of `sweep` are left out."""
    return [text for text in overrides if not text.lstrip("+~").startswith(NOT_OF_A_JOB)]


def _after_errors(
    config: DictConfig, lines: Sequence[Line], layers: Sequence[Layer], *, multirun: bool
) -> list[ErrorDetails]:
    with hydra_config(config):
        typed = {line.key: str(line.value) for line in lines if line.key.startswith("hydra.")}
        errors = hydra_node_errors(config, layers, multirun=multirun, typed=typed)
    return errors + ignored_choices(lines, [layer.config_path for layer in layers])


def _other_errors(found: Sequence[ErrorDetails], *, known: Sequence[ErrorDetails]) -> list[ErrorDetails]:
    """Return the errors of a config, without errors that wrong overrides may have caused.

    An error is left out if an override of the same key is wrong. It is also left out if the override of the key's group
    is wrong.

    Args:
        found: Errors of the config.
        known: Errors of overrides.
    """
    groups = {error.key for error in known if "." not in error.key}
    keys = {error.key for error in known}
    return [error for error in found if error.key not in keys and error.key.partition(".")[0] not in groups]
