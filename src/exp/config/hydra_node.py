"""Checks of Hydra's own settings, which are in the config node `hydra`.

Users may set the directories, the sweeper and the launcher. Any other setting of Hydra is an error.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.clusters import cluster_errors
from exp.config.groups import USED_GROUPS
from exp.config.hydra_adapter import HYDRA_ERRORS, Layer, registered_targets, searchpath_error
from exp.config.plain_tree import leaves, text_values
from exp.config.reading import raw_values
from exp.config.search_path import OWN_CONF, display_path
from exp.config.slots import nodes_in
from exp.config.yaml_files import choices_of, read_yaml, split
from exp.errors import ErrorDetails, raise_errors
from exp.files import is_valid_path
from exp.redaction import INTERPOLATION
from exp.spelling import among, did_you_mean, fix_of_key

ALLOWED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
ALLOWED_BELOW = ("hydra.sweeper.", "hydra.launcher.", "hydra.job.config.")
NO_LOGGING = ("exp does not use Hydra's logging", "train.log of the run directory, which exp writes")
NO_VARIABLES = ("jobs do not set environment variables", "NAME=value before the command")
REFUSED = {
    "hydra.callbacks": ("a class that would run before the check", "a callback of the run: +callbacks=early_stopping"),
    "hydra.job.chdir": ("exp does not change the working directory", "paths relative to the working directory"),
    "hydra.job.name": ("exp sets the name of a job by the key name", "name=NAME"),
    "hydra.output_subdir": ("Hydra writes no files in exp", "config.yaml and overrides.yaml of the run directory"),
    "hydra.mode": ("exp takes the mode from the flags", "-m for a sweep, and no flag for a single run"),
    **dict.fromkeys(("hydra.job_logging", "hydra.hydra_logging", "hydra.verbose"), NO_LOGGING),
    **dict.fromkeys(("hydra.job.env_set", "hydra.job.env_copy"), NO_VARIABLES),
}

# An environment variable in the path of a directory. It is trusted, because its value comes from the user's shell.
ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)\}")


def hydra_key_error(key: str, value: object) -> ErrorDetails | None:
    """Return the error for one of Hydra's own settings; None if users may set it.

    Args:
        key: Dotted key below `hydra`, or a config group of Hydra such as `hydra/launcher`.
        value: Value of the setting. It appears in some messages.
    """
    if key == "hydra.searchpath":
        return searchpath_error(value)
    if "/" in key:
        if any(key == group or key.startswith(group + "/") for group in USED_GROUPS):
            return None
        fix = fix_of_key(key.replace("/", "."), str(value)) or did_you_mean(key, USED_GROUPS)
        return ErrorDetails(key, "a group that exp does not use", " or ".join(USED_GROUPS), fix)
    for refused, (got, expected) in REFUSED.items():
        if key == refused or key.startswith(refused + "."):
            return ErrorDetails(key, got, expected, fix_of_key(refused, str(value)))
    if key in ALLOWED or key.startswith(ALLOWED_BELOW):
        return None
    return ErrorDetails(key, "not a setting that exp uses", f"one of {among(ALLOWED)}", did_you_mean(key, ALLOWED))


def hydra_node_errors(
    config: DictConfig, layers: Sequence[Layer], *, multirun: bool, typed: Mapping[str, str]
) -> list[ErrorDetails]:
    """Return the errors in the node `hydra` of a composed config.

    Args:
        config: Composed config, with the node `hydra`.
        layers: Files that were merged into the config.
        multirun: The command is a sweep (-m).
        typed: Texts of the values that the command line sets, by Hydra's key.
    """
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    of_files = [error for layer in layers for error in _file_errors(layer, config)]
    plugins = [*_plugin_errors(config, "sweeper"), *_plugin_errors(config, "launcher")]
    return [*of_files, *plugins, *_directory_errors(config, key, typed=typed.get(key))]


def _file_errors(layer: Layer, config: DictConfig) -> Iterator[ErrorDetails]:
    """Yield an error for each of Hydra's settings in a file that has no effect in exp or would run code too early."""
    if layer.file is None or layer.file.is_relative_to(OWN_CONF):
        return
    content, source = read_yaml(layer.file), display_path(layer.file)
    errors = unused_settings(content, split("" if layer.package == "_global_" else layer.package))
    for group, option in _hydra_choices(content):
        if group in USED_GROUPS and str(config.hydra.runtime.choices[group]) != option:
            got = f"{option}, which the primary config or the command line replaces"
            fix = f"Write {group}={option} on the command line"
            errors.append(ErrorDetails(group, got, "a choice that takes effect", fix))
    yield from (replace(error, source=source) for error in errors)


def unused_settings(content: object, package: Sequence[str]) -> list[ErrorDetails]:
    """Return an error for each of Hydra's settings and groups in a file that exp does not use.

    A setting is accepted if exp's own train.yaml has the same value.

    Args:
        content: Content of the file.
        package: Names in the dotted key at which the file is merged.
    """
    own = read_yaml(OWN_CONF / "train.yaml")
    # Settings in exp's train.yaml are accepted, because a user's primary config may be a changed copy of this file.
    known = dict(settings_of(own, ()))
    errors: dict[str, ErrorDetails] = {}
    for key, value in settings_of(content, package):
        is_known = key in known and known[key] == value
        error = None if is_known else hydra_key_error(key, value)
        if error is not None:
            short = ".".join(key.split(".")[:3])
            errors.setdefault(short, replace(error, key=short))
    for group, option in _hydra_choices(content):
        if group not in USED_GROUPS and (group, option) not in _hydra_choices(own):
            errors[group] = ErrorDetails(group, f"{option}: a group that exp does not use", " or ".join(USED_GROUPS))
    return list(errors.values())


def settings_of(content: object, package: Sequence[str]) -> Iterator[tuple[str, object]]:
    """Yield each dotted key below `hydra` that a file sets, with its value. A list is yielded as one value.

    Args:
        content: Content of the file.
        package: Names in the dotted key at which the file is merged.
    """
    if isinstance(content, dict) and content:
        for name, value in content.items():
            if package or name == "hydra":
                yield from settings_of(value, (*package, str(name)))
    elif len(package) > 1 and package[0] == "hydra":
        yield ".".join(package), content


def _hydra_choices(content: object) -> list[tuple[str, str]]:
    """Return the entries for Hydra's own groups in the defaults list of a file, as pairs (group, option)."""
    choices = [choice for choice in choices_of(content) if choice.group.startswith("hydra/")]
    return [(choice.group, option) for choice in choices for option in choice.options]


def _plugin_errors(config: DictConfig, name: str) -> list[ErrorDetails]:
    """Return the errors in the node `hydra.sweeper` or `hydra.launcher`.

    Args:
        config: Composed config, with the node `hydra`.
        name: "sweeper" or "launcher".
    """
    key, known = f"hydra.{name}", registered_targets()
    try:
        # Interpolations are resolved, because they may refer to a node with a `_target_`. Hydra would build this node.
        plain = OmegaConf.to_container(config.hydra[name], resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        return [ErrorDetails(key, str(error).splitlines()[0], "values that are known before the sweep")]
    errors = [
        ErrorDetails(
            f"{key}._target_", f"{target}, a class of no installed Hydra plug-in",
            f"hydra/{name}=NAME of an installed plug-in",
        )
        for target in (str(node["_target_"]) for _, node in nodes_in(plain))
        if target not in known
    ]  # fmt: skip
    if word := next(_security_keys(plain), None):
        fix = "Write 'security.allow=[PACKAGE]' on the command line, if you trust the package"
        errors.append(ErrorDetails(f"{key}.params", word, "parameters other than security", fix))
    if name == "launcher" and isinstance(plain, dict):
        errors += cluster_errors({str(word): value for word, value in plain.items()})
    return errors


def _security_keys(plain: object) -> Iterator[str]:
    """Yield each key in the settings of a sweeper that would set a key below `security`.

    Such keys are refused, because a sweeper converts its parameters to overrides. exp cannot distinguish these
    overrides from overrides of the command line. Texts are searched, too, because some sweepers have lists of
    overrides.
    """
    for path, value in leaves(plain):
        word = f"{path}.{value.partition('=')[0]}" if isinstance(value, str) and "=" in value else path
        if "security" in [part.strip(" +~") for part in word.split(".")]:
            yield word


def _directory_errors(config: DictConfig, key: str, *, typed: str | None = None) -> list[ErrorDetails]:
    """Return the errors of the path of a run directory or sweep directory.

    The path must be known and be within the working directory. Only the command line may set a path outside of the
    working directory.

    Args:
        config: Composed config, with the node `hydra`.
        key: Key of the path, such as "hydra.run.dir".
        typed: Text of the path on the command line. Default: None, the command line does not set the key.
    """
    try:
        directory = OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return [ErrorDetails(key, str(error).splitlines()[0], "a path that is known before the run")]
    if not isinstance(directory, str) or not directory.strip() or "\0" in directory:
        return [ErrorDetails(key, repr(directory), "a directory below the working directory")]
    if not is_valid_path(directory):
        expected = "a path of fewer than 2000 characters, and of 250 bytes at most between two slashes"
        return [ErrorDetails(key, f"{directory[:40]}..., {len(directory)} characters", expected)]
    if secret := INTERPOLATION.search(directory):
        return [ErrorDetails(key, f"{secret[0]} in the path of a directory", "a path without a secret")]
    if is_inside(directory) or (typed is not None and _is_below_typed(directory, typed)):
        return []
    if Path.cwd().is_relative_to(os.path.abspath(directory)):
        return [
            ErrorDetails(key, directory, "a directory below the working directory", f"Write {key}=outputs/elsewhere")
        ]
    fix = f"Write {key}={directory} on the command line. Only the command line may leave the working directory"
    return [ErrorDetails(key, directory, "a directory below the working directory", fix)]


def _is_below_typed(directory: str, typed: str) -> bool:
    """Return whether a directory is within the fixed part of a path on the command line.

    The fixed part ends before the first interpolation: for `/disk/${name}`, it is `/disk`. The result is False for the
    working directory and its parents.

    Args:
        directory: Path of the directory, with interpolations resolved.
        typed: Text of the path on the command line, with interpolations.
    """
    text = ENVIRONMENT.sub(lambda found: os.environ.get(found[1].strip()) or found[0], typed)
    fixed = text.partition("${")[0]
    place = os.path.abspath(fixed if fixed == text else os.path.dirname(fixed))
    path = Path(os.path.abspath(directory))
    return bool(fixed) and path.is_relative_to(place) and not Path.cwd().is_relative_to(path)


def is_inside(directory: str) -> bool:
    """Return whether a path is within the working directory and contains no `..`. Symbolic links are not followed."""
    path = Path(directory)
    return Path.cwd() in Path(os.path.abspath(path)).parents and ".." not in path.parts


def directory_of(config: DictConfig, *, sweep: str | None) -> str:
    """Return the absolute path of the run directory of a job.

    Args:
        config: Composed config, with the node `hydra`.
        sweep: Directory of the sweep that contains the job. None: a single run.

    Raises:
        ConfigError: The run directory is outside of the sweep's directory.
    """
    if sweep is None:
        return os.path.abspath(str(config.hydra.run.dir))
    errors = _directory_errors(config, "hydra.sweep.subdir")
    subdir = Path() if errors else Path(config.hydra.sweep.subdir)
    directory = Path(os.path.abspath(Path(sweep) / subdir))
    if not errors and (".." in subdir.parts or Path(os.path.abspath(sweep)) not in directory.parents):
        errors = [ErrorDetails("hydra.sweep.subdir", str(subdir), "a directory below the directory of the sweep")]
    raise_errors(errors)
    return str(directory)


def resolve_hydra_values(config: DictConfig) -> list[ErrorDetails]:
    """Replace interpolations of Hydra's values, such as `${hydra:job.num}`, by the values, in place.

    The replacement is needed because exp removes the node `hydra` from the config.

    Args:
        config: Composed config, with the node `hydra`.

    Returns:
        An error for each interpolation without a value before the run.
    """
    errors = []
    for key, text in text_values(raw_values(config)):
        if "${hydra" not in text or key.startswith("hydra."):
            continue
        try:
            OmegaConf.update(config, key, OmegaConf.select(config, key, throw_on_missing=True))
        except HYDRA_ERRORS as error:
            got = f"{text}: {str(error).splitlines()[0]}"
            errors.append(ErrorDetails(key, got, "a value that is known before the run"))
    return errors
