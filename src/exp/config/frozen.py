"""Functions that read and write the config files of a run directory. A frozen config is the content of config.yaml."""

from __future__ import annotations

import functools
import importlib.metadata
import json
import platform
import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf

from exp.config.reading import UNKNOWN, Values, secrets_kept
from exp.config.settings import settings_of
from exp.config.versions import with_present_keys
from exp.config.yaml_files import parse_yaml, yaml_text
from exp.errors import ConfigError, RunError, config_error, describe_exception
from exp.shared_types import BEST_STEP, BEST_VALUE, searched_tags

# Node of a composed config that records the files and overrides of the composition. It is not in a frozen config.
COMPOSITION = "_composition_"
# Interpolation of the path of the run directory. It replaces `${hydra:runtime.output_dir}` in a config.
OUTPUT_DIR = f"${{{COMPOSITION}.directory}}"
# Keys of the node COMPOSITION: the user's config groups, the packages that the command line allows, and a flag that the
# run directory already exists.
OWN_GROUPS = "own_groups"
ALLOWED = "allow"
TAKEN = "is_taken"
# Tag of a scalar that is 1 if a search pruned the job, otherwise 0. TensorBoard's HParams page has no status for this.
PRUNED_TAG = "sweep/pruned"
# File with the standard output of a job of a sweep. The job's process keeps the file open.
OUTPUT = "output.log"
DISTRIBUTIONS = (
    "exp-framework", "torch", "lightning", "hydra-core", "omegaconf", "torchmetrics", "tensorboard", "numpy",
)  # fmt: skip
# Keys that are hyperparameters of every run, also if the command line does not set them.
ALWAYS = ("optimizer.lr", "data.batch_size", "seed")


@secrets_kept()
def frozen_yaml(config: DictConfig) -> str:
    """Return the config as YAML text, with interpolations resolved and without the node COMPOSITION."""
    plain = cast(dict[str, object], OmegaConf.to_container(config, resolve=True))
    plain.pop(COMPOSITION, None)
    return yaml_text(plain)


def read_frozen(directory: Path | str) -> DictConfig:
    """Return the frozen config of a run directory.

    Raises:
        RunError: config.yaml is missing or cannot be read.
    """
    text, path = _config_text(directory)
    return from_text(text, name=str(path))


def from_text(text: str, *, name: str) -> DictConfig:
    """Return the config in a YAML text that `frozen_yaml` returned. Keys of earlier versions of exp are converted.

    Args:
        text: YAML text of the config.
        name: Name of the file, for error messages.

    Raises:
        RunError: The text is not a config.
    """
    content = with_present_keys(_mapping(text, name=name))
    # A frozen config contains only interpolations of secrets. They are kept as text until an object with the secret is
    # built.
    return cast(DictConfig, OmegaConf.create(map_texts(content, literal)))


def frozen_values(directory: Path) -> dict[str, Any]:
    """Return the values in a run's config.yaml. Keys of earlier versions of exp are not converted.

    Raises:
        RunError: config.yaml is missing or cannot be read.
    """
    text, path = _config_text(directory)
    return _mapping(text, name=str(path))


def read_overrides(directory: Path | str) -> list[str]:
    """Return the overrides in a run's overrides.yaml. Interpolations, as in `name=a${seed}`, are not resolved."""
    path = Path(directory) / "overrides.yaml"
    return cast(list[str], _parse(_text(path), name=str(path)))


def read_parent(directory: Path) -> Mapping[str, object] | None:
    """Return the facts about the parent run that `record_parent` wrote; None if the run is not a fork."""
    path = directory / "provenance.json"
    if not path.is_file():
        return None
    parent: Mapping[str, object] | None = json.loads(path.read_text(encoding="utf-8")).get("parent")
    return parent


def _config_text(directory: Path | str) -> tuple[str, Path]:
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise RunError(f"{path} does not exist; expected a run directory, which contains config.yaml")
    return _text(path), path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RunError(f"{path} cannot be read: {describe_exception(error)}. Restore the file") from error


def _mapping(text: str, *, name: str) -> dict[str, Any]:
    content = _parse(text, name=name)
    if not isinstance(content, dict):
        raise RunError(f"{name} was changed after exp wrote this file: the file contains no mapping. Restore the file")
    return content


def _parse(text: str, *, name: str) -> object:
    try:
        return parse_yaml(text, name=name)
    except ConfigError as error:
        raise RunError(f"{name} was changed after exp wrote it: {error.errors[0].got}. Restore the file") from error


def map_texts(value: object, change: Callable[[str], str]) -> Any:
    """Return a copy of nested dicts and lists in which each text is replaced by the result of a function.

    Args:
        value: Nested dicts and lists.
        change: Function that returns the new text.
    """
    if isinstance(value, dict):
        return {name: map_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def literal(text: str) -> str:
    """Return a text in which each `${` is escaped, so that OmegaConf does not resolve interpolations in the text."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def refuse_more_than(allow: Sequence[str], directory: Path) -> None:
    """Raise ConfigError if a run's frozen config allows packages that the command does not allow.

    Args:
        allow: Packages that the command allows.
        directory: Run directory.
    """
    refuse_untrusted(read_frozen(directory), allow=allow, source=str(directory / "config.yaml"))


def refuse_untrusted(config: DictConfig, *, allow: Sequence[str], source: str, is_override: bool = False) -> None:
    """Raise ConfigError if a frozen config allows packages (`security.allow`) that the command does not allow.

    Args:
        config: Frozen config.
        allow: Packages that the command allows.
        source: File of the config, for the message.
        is_override: The proposed fix is the override `security.allow`, or the argument `allow` in Python. Default:
            false, the proposed fix is the flag --allow.
    """
    named = OmegaConf.select(config, "security.allow")
    others = [str(package) for package in named if package not in allow] if isinstance(named, list | ListConfig) else []
    if not others:
        return
    flags = " ".join(f"--allow {package}" for package in others)
    keys = f"'security.allow=[{','.join(others)}]' to the command, in Python allow={others} to exp.load"
    raise config_error(
        "security.allow", got=f"[{', '.join(others)}] in a file", expected="packages that this command allows",
        fix=f"If you trust the packages, add {keys if is_override else flags}", source=source,
    )  # fmt: skip


def versions() -> dict[str, str]:
    """Return the versions of Python and of the packages in DISTRIBUTIONS, by name. The packages are not imported."""
    return {"python": platform.python_version(), **_installed_versions()}


@functools.cache
def _installed_versions() -> Mapping[str, str]:
    # Cached, because reading the versions takes 2 ms.
    return {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}


def chosen_values(plain: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, object]:
    """Return the hyperparameters of a run. They are the keys in ALWAYS, the keys that overrides set, and `tags`.

    Args:
        plain: Plain values of the config.
        overrides: Overrides as typed. In a job of a sweep, they include the swept values.

    Returns:
        Values by dotted key. The value of a config group is the chosen option, as in {"model": "lenet"}.
    """
    known = Values(dict(plain))
    values = {key: known[key] for key in ALWAYS if known[key] not in (None, UNKNOWN)}
    for override in overrides:
        key, _, typed = override.lstrip("+").partition("=")
        if override.startswith("~") or key.startswith("hydra"):
            continue
        value = known[key.partition("@")[0]]
        is_added = override.startswith("+") and isinstance(value, dict) and key in values
        if is_added:
            values[key] = f"{values[key]}, {typed}"
        else:
            values[key] = typed if value in (None, UNKNOWN) or isinstance(value, dict | list) else value
    if known["tags"]:
        values["tags"] = ", ".join(map(str, known["tags"]))
    return values


def compared_tags(plain: Mapping[str, Any], *, is_trial: bool | None = None) -> list[str]:
    """Return the tags of the scalars by which runs are compared on TensorBoard's HParams page.

    They are the monitored tag, the tags that a search optimizes, and the tags of all metrics.

    Args:
        plain: Plain values of the config.
        is_trial: Whether the run is a job of a search. Default: None, true if `sweep.trial` is set in the config.
    """
    settings = settings_of(plain)
    monitor, sweep = settings.monitor, settings.sweep
    stages = [stage for stage in ("train", "val", "test") if stage in settings.metric_stages]
    tags: list[str | None] = [] if monitor is None or not settings.checkpoint.save_best else [BEST_VALUE, BEST_STEP]
    tags += [monitor, *searched_tags(sweep.monitor, mode=settings.mode)]
    if sweep.pruner != "none" and (sweep.trial is not None if is_trial is None else is_trial):
        tags.append(PRUNED_TAG)
    tags += [f"{name}/{stage}" for name in settings.metrics for stage in stages]
    return [tag for tag in dict.fromkeys(tags) if tag is not None]
