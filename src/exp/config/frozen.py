"""Read and write the config files of a run directory."""

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

# The node of a composed config that records its composition. A frozen config does not have it.
COMPOSITION = "_composition_"
# The interpolation of the run directory. It replaces `${hydra:runtime.output_dir}`.
OUTPUT_DIR = f"${{{COMPOSITION}.directory}}"
# Keys of COMPOSITION: config groups of the user, packages that the command line allows, and whether the run directory
# exists already.
OWN_GROUPS = "own_groups"
ALLOWED = "allow"
TAKEN = "is_taken"
# 1 if a search pruned the job, else 0. A tag, because TensorBoard's page of hyperparameters has no state for it.
PRUNED_TAG = "sweep/pruned"
# Standard output of a job of a sweep. The job's process keeps the file open.
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
    """Return the config that `frozen_yaml` wrote as text.

    Args:
        text: YAML text of the config.
        name: Name of the file, for error messages.

    Raises:
        RunError: The text is not a config.
    """
    content = with_present_keys(_mapping(text, name=name))
    # Only interpolations of secrets are left. They are kept as text, and are resolved when the object is built.
    return cast(DictConfig, OmegaConf.create(map_texts(content, literal)))


def frozen_values(directory: Path) -> dict[str, Any]:
    """Return the values of config.yaml as written, with the keys of the exp version that wrote the file.

    Raises:
        RunError: config.yaml is missing or cannot be read.
    """
    text, path = _config_text(directory)
    return _mapping(text, name=str(path))


def read_overrides(directory: Path | str) -> list[str]:
    """Return the overrides of a run from overrides.yaml. Interpolations, as in `name=a${seed}`, are not resolved."""
    path = Path(directory) / "overrides.yaml"
    return cast(list[str], _parse(_text(path), name=str(path)))


def read_parent(directory: Path) -> Mapping[str, object] | None:
    """Return the parent run and the step of a fork from provenance.json; None if the run is not a fork."""
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
        raise RunError(f"{name} was changed after exp wrote it: it has no mapping. Restore the file")
    return content


def _parse(text: str, *, name: str) -> object:
    try:
        return parse_yaml(text, name=name)
    except ConfigError as error:
        raise RunError(f"{name} was changed after exp wrote it: {error.errors[0].got}. Restore the file") from error


def map_texts(value: object, change: Callable[[str], str]) -> Any:
    """Return a copy of nested dicts and lists in which a function has replaced each text."""
    if isinstance(value, dict):
        return {name: map_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [map_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def literal(text: str) -> str:
    """Return a text with each `${name}` escaped, so that OmegaConf keeps it as text."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def refuse_more_than(allow: Sequence[str], directory: Path) -> None:
    """Raise ConfigError if `security.allow` of a run directory names packages that the command does not name.

    Args:
        allow: Packages that the command allows.
        directory: Run directory.
    """
    refuse_untrusted(read_frozen(directory), allow=allow, source=str(directory / "config.yaml"))


def refuse_untrusted(config: DictConfig, *, allow: Sequence[str], source: str, is_override: bool = False) -> None:
    """Raise ConfigError if `security.allow` of a frozen config names packages that the command does not name.

    Args:
        config: Frozen config.
        allow: Packages that the command allows.
        source: File of the config, for the message.
        is_override: The command allows packages by the override `security.allow`, or by `allow` in Python. By default,
            the flag is --allow.
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
    """Return the versions of Python and of the packages that affect the results of a run.

    The packages are not imported.
    """
    return {"python": platform.python_version(), **_installed_versions()}


@functools.cache
def _installed_versions() -> Mapping[str, str]:
    # Cached, because reading the versions takes 2 ms.
    return {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}


def chosen_values(plain: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, object]:
    """Return the hyperparameters of a run: the keys that the command line sets, learning rate, batch size and seed.

    Args:
        plain: Plain values of the config.
        overrides: Overrides as typed. For a job of a sweep, they include the swept values.

    Returns:
        Values by dotted key. The value of a group is the chosen option, as in {"model": "lenet"}.
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
    """Return the tags by which runs are compared: the monitored tag, the tags of a search, and the metrics.

    Args:
        plain: Plain values of the config.
        is_trial: The run is a job of a search. None: it is a job if `sweep.trial` of the config is set.
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
