"""Hydra's own settings: where results go, the sweeper and the launcher may be set. Any other is an error."""

from __future__ import annotations

import os
import re
from collections.abc import Container, Iterator, Mapping, Sequence
from dataclasses import replace
from enum import Enum
from pathlib import Path
from typing import Any

from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from exp.config.clusters import cluster_faults
from exp.config.groups import USED_GROUPS
from exp.config.habits import cure_of_key
from exp.config.hydra_adapter import HYDRA_ERRORS, Layer, registered_targets, searchpath_fault
from exp.config.plain_tree import text_values
from exp.config.search_path import OWN_CONF, shown
from exp.config.slots import nodes_in
from exp.config.yaml_files import Choice, choices_of, read_yaml, split
from exp.errors import Fault, raise_faults
from exp.files import can_be_a_path
from exp.redaction import INTERPOLATION
from exp.spelling import among, did_you_mean, show

ALLOWED = ("hydra.run.dir", "hydra.sweep.dir", "hydra.sweep.subdir")
ALLOWED_BELOW = ("hydra.sweeper.", "hydra.launcher.", "hydra.job.config.")
REFUSED = {
    "hydra.callbacks": ("a class that would run before the check", "a callback of the run: +callbacks=early_stopping"),
    "hydra.job.chdir": ("the working directory never changes", "paths relative to it; results go to the run directory"),
    "hydra.job.name": ("the name of a run is its own key", "name=NAME"),
    "hydra.output_subdir": ("Hydra writes no files here", "config.yaml and overrides.yaml of the run directory"),
    "hydra.job_logging": ("Hydra sets up no logging here", "train.log of the run directory"),
    "hydra.hydra_logging": ("Hydra sets up no logging here", "train.log of the run directory"),
    "hydra.verbose": ("Hydra sets up no logging here", "--info for what Hydra sees"),
    "hydra.mode": ("the mode is a flag", "-m for several jobs, nothing for one"),
    "hydra.job.env_set": ("a job changes no environment variables", "NAME=value before the command"),
    "hydra.job.env_copy": ("a job changes no environment variables", "NAME=value before the command"),
}


# Of sweepers of other packages: Optuna's, Nevergrad's, Ax's.
DIRECTIONS: Mapping[str, Mapping[str, object]] = {
    "hydra.sweeper.direction": {"min": "minimize", "max": "maximize"},
    "hydra.sweeper.optim.maximize": {"min": False, "max": True},
    "hydra.sweeper.ax_config.experiment.minimize": {"min": True, "max": False},
}
QUOTES = "'\""
# Written by whoever types the command, or has set up the machine.
ENVIRONMENT = re.compile(r"\$\{oc\.env:([^,}]+)\}")
# What exp does anyway.
HARMLESS: Mapping[str, tuple[object, ...]] = {
    "hydra.job.chdir": (False, None),
    "hydra.output_subdir": (None,),
    "hydra.verbose": (False,),
    "hydra/job_logging": ("none", "disabled"),
    "hydra/hydra_logging": ("none", "disabled"),
}


def hydra_key_fault(key: str, value: object) -> Fault | None:
    """Return the error of an override of Hydra's own settings, or None."""
    if key in HARMLESS and value in HARMLESS[key]:
        return None
    if key == "hydra.searchpath":
        return searchpath_fault(value)
    if "/" in key:
        if any(key == group or key.startswith(group + "/") for group in USED_GROUPS):
            return None
        cure = cure_of_key(key.replace("/", "."), str(value)) or did_you_mean(key, USED_GROUPS)
        return _fault(key, "a group that exp does not use", " or ".join(USED_GROUPS), cure)
    for refused, (got, expected) in REFUSED.items():
        if key == refused or key.startswith(refused + "."):
            return _fault(key, got, expected, cure_of_key(refused, str(value)))
    if key in ALLOWED or key.startswith(ALLOWED_BELOW):
        return None
    return _fault(key, "not a setting that exp uses", f"one of {among(ALLOWED)}", did_you_mean(key, ALLOWED))


def swept_fault(key: str, text: str) -> Fault:
    """The fault of several values for one of Hydra's own settings. text: what stands behind the `=`."""
    word = key.removeprefix("hydra.sweeper.params.")
    cure = None if word == key else f"Write {word}={text}, which is swept by -m"
    return _fault(key, "several values", "one value: Hydra's own settings cannot be swept", cure)


def hydra_node_faults(
    config: DictConfig, layers: Sequence[Layer], *, multirun: bool, typed: Mapping[str, str]
) -> list[Fault]:
    """Return the errors of the hydra node of a composed config.

    Args:
        layers: The files that were merged.
        typed: Hydra's own keys that the command line sets, with the text of each value.
    """
    written = [fault for layer in layers for fault in _file_faults(layer, config)]
    keys = {fault.key for fault in written}
    return written + [fault for fault in _node_faults(config, multirun=multirun, typed=typed) if fault.key not in keys]


def _file_faults(layer: Layer, config: DictConfig) -> Iterator[Fault]:
    """Yield an error for each setting of Hydra's in a file that would have no effect, or run code before the check."""
    if layer.file is None or layer.file.is_relative_to(OWN_CONF):
        return
    content, source = read_yaml(layer.file), shown(layer.file)
    faults = unused_settings(content, split("" if layer.package == "_global_" else layer.package))
    for group, option in _hydras(choices_of(content)):
        if group in USED_GROUPS and str(config.hydra.runtime.choices[group]) != option:
            got = f"{option}, which the choice of the primary config or of the command line overrules"
            cure = f"Write {group}={option} on the command line"
            faults.append(_fault(group, got, "a choice that takes effect", cure))
    yield from (replace(fault, source=source) for fault in faults)


def unused_settings(content: Any, package: Sequence[str]) -> list[Fault]:
    """Return an error for each setting and group of Hydra's that a file has, and neither exp nor its own files use.

    package: where the file is merged.
    """
    own = read_yaml(OWN_CONF / "train.yaml")
    # A user's own primary config begins as a copy of exp's.
    known = dict(settings_of(own, ()))
    faults: dict[str, Fault] = {}
    for key, value in settings_of(content, package):
        is_known = key == "hydra.mode" or (key in known and known[key] == value)
        fault = None if is_known else hydra_key_fault(key, value)
        if fault is not None:
            short = ".".join(key.split(".")[:3])
            faults.setdefault(short, replace(fault, key=short))
    for group, option in _hydras(choices_of(content)):
        if group not in USED_GROUPS and (group, option) not in _hydras(choices_of(own)):
            faults[group] = _fault(group, f"{option}: a group that exp does not use", " or ".join(USED_GROUPS))
    return list(faults.values())


def settings_of(content: Any, package: Sequence[str]) -> Iterator[tuple[str, Any]]:
    """Yield every dotted key below hydra that a file sets, with its value; lists are values."""
    key = ".".join(package)
    if isinstance(content, dict) and content:
        for name, value in content.items():
            if package or name == "hydra":
                yield from settings_of(value, (*package, str(name)))
    elif package and package[0] == "hydra" and len(package) > 1:
        yield key, content


def _hydras(choices: Sequence[Choice]) -> list[tuple[str, str]]:
    """Return Hydra's own groups that a defaults list chooses from, and the options."""
    hydras = [choice for choice in choices if choice.group.startswith("hydra/")]
    return [(choice.group, option) for choice in hydras for option in choice.options]


def _node_faults(config: DictConfig, *, multirun: bool, typed: Mapping[str, str]) -> list[Fault]:
    hydra = config.hydra
    faults = []
    if hydra.callbacks:
        got, expected = REFUSED["hydra.callbacks"]
        faults += [_fault(f"hydra.callbacks.{name}", got, expected) for name in hydra.callbacks]
    if hydra.job.chdir:
        faults.append(_fault("hydra.job.chdir", *REFUSED["hydra.job.chdir"]))
    known = registered_targets()
    for name in ("sweeper", "launcher"):
        faults += _plugin_faults(config, name, known)
    if multirun:
        faults += _direction_faults(config)
    key = "hydra.sweep.dir" if multirun else "hydra.run.dir"
    return faults + _directory_faults(config, key, typed=typed.get(key))


def _plugin_faults(config: DictConfig, name: str, known: Container[str]) -> list[Fault]:
    """Return the errors in the settings of a sweeper or launcher. known: the targets that plug-ins registered."""
    key = f"hydra.{name}"
    try:
        # Resolved, for Hydra resolves them, too: an interpolation may lead to a node with a `_target_`.
        plain = OmegaConf.to_container(config.hydra[name], resolve=True, throw_on_missing=False)
    except OmegaConfBaseException as error:
        return [_fault(key, str(error).splitlines()[0], "values that can be worked out before the sweep")]
    faults = [
        _fault(
            f"{key}._target_", f"{target} is not of an installed Hydra plug-in",
            f"hydra/{name}=NAME of an installed plug-in",
        )
        for target in (str(node["_target_"]) for _, node in nodes_in(plain))
        if target not in known
    ]  # fmt: skip
    for word in _keys_in(plain):
        # A sweeper makes overrides of its parameters, and an override looks like one that was typed.
        if word.strip().lstrip("+~").partition(".")[0] == "security":
            cure = "Write 'security.allow=[PACKAGE]' on the command line, if you trust it"
            faults.append(_fault(f"{key}.params", word, "no key of security: it is not for a sweep to set", cure))
    if isinstance(plain, dict) and plain.get("custom_search_space") is not None:
        faults.append(_fault(f"{key}.custom_search_space", "a function by its name", "values in hydra.sweeper.params"))
    if name == "launcher" and isinstance(plain, dict):
        faults += cluster_faults({str(word): value for word, value in plain.items()})
    return faults


def _direction_faults(config: DictConfig) -> Iterator[Fault]:
    """Yield an error if the sweeper of another package has a direction of its own that is not the one of `mode`."""
    plain = OmegaConf.to_container(config, resolve=False, throw_on_missing=False)
    mode = plain["mode"] if isinstance(plain, dict) and "mode" in plain else None
    for key, words in DIRECTIONS.items():
        value = OmegaConf.select(config, key, default=None)
        word = value.name if isinstance(value, Enum) else value
        if mode in ("min", "max") and value is not None and not OmegaConf.is_config(value) and word != words[mode]:
            cure = f"Write {key}={show(words[mode]).strip(QUOTES)}"
            yield _fault(key, f"{show(word)}, with mode={mode}", "the direction of mode", cure)


def _keys_in(plain: Any) -> Iterator[str]:
    items = plain.items() if isinstance(plain, dict) else enumerate(plain) if isinstance(plain, list) else ()
    for key, value in items:
        if isinstance(plain, dict):
            yield str(key)
        # Sweepers take lists of overrides, too.
        elif isinstance(value, str) and "=" in value:
            yield value.partition("=")[0]
        yield from _keys_in(value)


def _directory_faults(config: DictConfig, key: str, *, typed: str | None = None) -> list[Fault]:
    """Return the errors of a directory for results: it has a value and is inside the working directory.

    typed: the value on the command line, which may lead elsewhere.
    """
    try:
        directory = OmegaConf.select(config, key, throw_on_missing=True)
    except OmegaConfBaseException as error:
        return [_fault(key, str(error).splitlines()[0], "a path that can be worked out before the run")]
    if not isinstance(directory, str) or not directory.strip() or "\0" in directory:
        return [_fault(key, repr(directory), "a directory below the working directory")]
    longest, secret = max(directory.split("/"), key=len), INTERPOLATION.search(directory)
    if not can_be_a_path(directory):
        expected = "a path of fewer than 2000 characters, and of 250 bytes at most between two slashes"
        got = f"{longest[:40]}..., {len(longest)} characters"
        return [_fault(_name_or(key, config, longest), got, expected)]
    if secret is not None:
        got = f"{secret[0]} in the name of a folder"
        return [_fault(_name_or(key, config, secret[0]), got, "a name that holds no secret")]
    if is_inside(directory) or (typed is not None and _is_below_typed(directory, typed)):
        return []
    if Path.cwd().is_relative_to(os.path.abspath(directory)):
        return [_fault(key, directory, "a directory of its own for the results", f"Write {key}=outputs/elsewhere")]
    cure = f"Write {key}={directory} on the command line, which may lead to another disk"
    return [_fault(key, directory, "a directory below the working directory", cure)]


def _name_or(key: str, config: DictConfig, text: str) -> str:
    """Return `name` if the name of the run has a text of a directory, else the key of the directory."""
    return "name" if "name" in config and text in str(config.name) else key


def _is_below_typed(directory: str, typed: str) -> bool:
    """Whether a path lies where its typed text leads, up to the first of its interpolations: `/disk/${name}` in /disk.

    The working directory itself, and what is above it, holds other things than a run.
    """
    text = ENVIRONMENT.sub(lambda found: os.environ.get(found[1].strip()) or found[0], typed)
    fixed = text.partition("${")[0]
    place = os.path.abspath(fixed if fixed == text else os.path.dirname(fixed))
    path = Path(os.path.abspath(directory))
    return bool(fixed) and path.is_relative_to(place) and not Path.cwd().is_relative_to(path)


def is_inside(directory: str) -> bool:
    """Whether a path lies below the working directory, read as text: links may lead out, `..` may not."""
    path = Path(directory)
    return Path.cwd() in Path(os.path.abspath(path)).parents and ".." not in path.parts


def directory_of(config: DictConfig, *, sweep: str | None) -> str:
    """Return the absolute path of a job's run directory. sweep: the directory of its sweep.

    Raises:
        ConfigError: It leads out of the sweep's directory.
    """
    if sweep is None:
        return os.path.abspath(str(config.hydra.run.dir))
    faults = _directory_faults(config, "hydra.sweep.subdir")
    subdir = Path() if faults else Path(config.hydra.sweep.subdir)
    directory = Path(os.path.abspath(Path(sweep) / subdir))
    if not faults and (".." in subdir.parts or Path(os.path.abspath(sweep)) not in directory.parents):
        faults = [_fault("hydra.sweep.subdir", str(subdir), "a directory below the sweep's own")]
    raise_faults(faults)
    return str(directory)


def resolve_hydra_values(config: DictConfig) -> list[Fault]:
    """Replace `${hydra:...}` and `${hydra....}` by their values, because the job's config has no hydra node.

    Return an error for each that has no value before the run.
    """
    faults = []
    for key, text in text_values(OmegaConf.to_container(config, resolve=False, throw_on_missing=False)):
        if "${hydra" not in text or key.startswith("hydra."):
            continue
        try:
            OmegaConf.update(config, key, OmegaConf.select(config, key, throw_on_missing=True))
        except HYDRA_ERRORS as error:
            got = f"{text}: {str(error).splitlines()[0]}"
            faults.append(_fault(key, got, "a value that is known before the run"))
    return faults


def _fault(key: str, got: str, expected: str, cure: str | None = None) -> Fault:
    return Fault(key=key, got=got, expected=expected, cure=cure)
