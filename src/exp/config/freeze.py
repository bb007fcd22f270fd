"""The run directory, made once and exclusively, and what is written into it before anything is built.

config.yaml      the resolved config that every rank reads
overrides.yaml   the command line's overrides, a list
provenance.json  command, git revision and diff, versions, machine
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import functools
import importlib.metadata
import itertools
import json
import os
import platform
import re
import shutil
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

from omegaconf import DictConfig, ListConfig, OmegaConf, open_dict

from exp.config.reading import UNKNOWN, Values, secrets_kept
from exp.config.revision import revision
from exp.config.versions import with_present_keys
from exp.config.yaml_files import parse_yaml, yaml_text
from exp.errors import ConfigError, Fault, RunError, one_line
from exp.files import write_whole
from exp.redaction import covered
from exp.shared_types import BEST_STEP, BEST_VALUE, searched_tags

COMPOSITION = "_composition_"
# The run directory, as the interpolation that `${hydra:runtime.output_dir}` becomes.
OUTPUT_DIR = f"${{{COMPOSITION}.directory}}"
# In it, the keys at the top that are groups of the user's own.
OWN_GROUPS = "own_groups"
# In it, the packages that the command line allows.
ALLOWED = "allow"
# In it, where the run directory stands already and is this config's own.
TAKEN = "is_taken"
# 1 where a search has pruned the job, else 0: TensorBoard's page of hyperparameters has no word for it.
PRUNED_TAG = "sweep/pruned"
# What a job of a sweep prints, which its process holds open.
OUTPUT = "output.log"
DISTRIBUTIONS = (
    "exp-framework",
    "torch",
    "lightning",
    "hydra-core",
    "omegaconf",
    "torchmetrics",
    "tensorboard",
    "numpy",
)
MAX_TRIES = 100
# Of every run among its hyperparameters.
ALWAYS = ("optimizer.lr", "data.batch_size", "seed")


def freeze(
    config: DictConfig, *, text: str | None = None, origin: Mapping[str, Any] | None = None, is_synced: bool = True
) -> Path:
    """Makes the run directory of a composed config and writes overrides.yaml, provenance.json and config.yaml.

    config.yaml is the last: where it stands, the others do, in whatever moment the process was killed.

    A directory that stands already is never shared: `-2`, `-3` and so on are appended. One that was made for this
    config alone is taken; see `take_directory`.

    text: of config.yaml, where it is made already. origin: `shared_origin`, of several runs.
    is_synced: whether each file is on the disk when this returns, for 0.5 ms each; else when the system sees to it.
    Returns: the absolute path of the new directory.
    Raises: RunError where the directory cannot be made or written.
    """
    composition = config[COMPOSITION]
    wanted = Path(composition.directory)
    try:
        directory = wanted.absolute() if TAKEN in composition else make_exclusively(wanted)
        composition.directory = literal(str(directory))
        overrides = list(composition.overrides)
        found = _covered(provenance(overrides)) if origin is None else {**origin, **_covered({"overrides": overrides})}
        for name, content in (
            ("overrides.yaml", OmegaConf.to_yaml(composition.overrides, resolve=True)),
            ("provenance.json", json.dumps(found, indent=2) + "\n"),
            ("config.yaml", frozen_yaml(config) if text is None else text),
        ):
            write_whole(directory / name, content, is_synced=is_synced)
    except OSError as error:
        raise RunError(
            f"the run directory {wanted} cannot be written: {error.strerror or error}. "
            "Free the place, or choose another with hydra.run.dir=outputs/elsewhere"
        ) from error
    return directory


def take_directory(config: DictConfig, directory: Path) -> None:
    """Have `freeze` take a directory that was made for this config already, as for what its process prints before."""
    composition = config[COMPOSITION]
    with open_dict(composition):
        composition.directory = literal(str(directory))
        composition[TAKEN] = True


def clear(directory: Path) -> None:
    """Take away what a run left that was killed before its first checkpoint, so that it can begin anew in its place."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OUTPUT:
            path.unlink()


def make_exclusively(wanted: Path) -> Path:
    """Makes `wanted`, or `wanted-2`, `wanted-3`, ... where it stands already. Two at once never get the same one."""
    wanted = wanted.absolute()
    candidate = wanted
    for count in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            return _made(candidate)
        candidate = wanted.with_name(f"{wanted.name}-{count}")
    raise AssertionError("numbers do not end")


def _made(directory: Path) -> Path:
    parent = directory.parent
    for _ in range(MAX_TRIES):
        # A sweep of which nothing was started takes empty directories away, and may do so in between.
        try:
            parent.mkdir(parents=True, exist_ok=True)
        except FileExistsError as error:
            if parent.exists() and not parent.is_dir():
                raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(parent)) from error
            continue
        except FileNotFoundError:
            continue
        with contextlib.suppress(FileNotFoundError):
            directory.mkdir()
            return directory
    raise FileNotFoundError(errno.ENOENT, "another program takes its parent away again and again", str(directory))


@secrets_kept()
def frozen_yaml(config: DictConfig) -> str:
    """The config as YAML text, every interpolation resolved, without the record of its composition."""
    plain = cast(dict[str, object], OmegaConf.to_container(config, resolve=True))
    plain.pop(COMPOSITION, None)
    return yaml_text(plain)


def read_frozen(directory: Path | str) -> DictConfig:
    """The config that `freeze` wrote.

    Raises: RunError where the directory holds none.
    """
    path = _config_of(directory)
    return from_text(_text(path), name=str(path))


def from_text(text: str, *, name: str) -> DictConfig:
    """The config of what `frozen_yaml` made. name: of its file, for messages.

    Raises: RunError for another text.
    """
    content = with_present_keys(_mapping(text, name=name))
    # What is left of interpolations is text: a secret is resolved by nobody but the object that is built with it.
    return cast(DictConfig, OmegaConf.create(_with_texts(content, literal)))


def frozen_values(directory: Path) -> dict[str, Any]:
    """The values of the config that `freeze` wrote, as they stand in its file.

    Raises: RunError where the directory holds none, or something else.
    """
    path = _config_of(directory)
    return _mapping(_text(path), name=str(path))


def _config_of(directory: Path | str) -> Path:
    path = Path(directory) / "config.yaml"
    if not path.is_file():
        raise RunError(f"{path} is not there: a run directory made by exp.train holds a frozen config.yaml")
    return path


def _text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise RunError(f"{path} is not as exp wrote it: {one_line(error)}. Take the file of the run") from error
    except OSError as error:
        raise RunError(f"{path} cannot be read: {error.strerror or error}. Take the file of the run") from error


def _mapping(text: str, *, name: str) -> dict[str, Any]:
    content = _parsed(text, name=name)
    if not isinstance(content, dict):
        raise RunError(f"{name} is not as exp wrote it: it holds no mapping. Take the file of the run")
    return content


def _parsed(text: str, *, name: str) -> Any:
    try:
        return parse_yaml(text, name=name)
    except ConfigError as error:
        raise RunError(f"{name} is not as exp wrote it: {error.faults[0].got}. Take the file of the run") from error


def _with_texts(value: object, change: Callable[[str], str]) -> Any:
    if isinstance(value, dict):
        return {name: _with_texts(inner, change) for name, inner in value.items()}
    if isinstance(value, list):
        return [_with_texts(inner, change) for inner in value]
    return change(value) if isinstance(value, str) else value


def literal(text: str) -> str:
    """Text that OmegaConf gives back as it is: `${name}` of an override is not to be resolved in the record of it."""
    return re.sub(r"(\\*)\$\{", lambda found: f"{found[1] * 2}\\${{", text)


def refuse_more_than(allow: Sequence[str], directory: Path) -> None:
    """Refuse a run directory whose `security.allow` names packages that the command does not.

    Raises: ConfigError.
    """
    refuse_untrusted(read_frozen(directory), allow=allow, source=str(directory / "config.yaml"))


def refuse_untrusted(config: DictConfig, *, allow: Sequence[str], source: str, is_override: bool = False) -> None:
    """The same of a frozen config, wherever it came from.

    is_override: whether who asks names packages by `security.allow`, or `allow` in Python, and not by --allow.
    Raises: ConfigError.
    """
    fault = untrusted(OmegaConf.select(config, "security.allow"), allow=allow, is_override=is_override)
    if fault is not None:
        raise ConfigError([dataclasses.replace(fault, source=source)])


def untrusted(named: Any, *, allow: Sequence[str], is_override: bool = False) -> Fault | None:
    """What is wrong with a `security.allow` that is not this command's own, or None."""
    others = [str(package) for package in named if package not in allow] if isinstance(named, list | ListConfig) else []
    if not others:
        return None
    flags = " ".join(f"--allow {package}" for package in others)
    keys = f"'security.allow=[{','.join(others)}]' to the command, in Python allow={others} to exp.load"
    return Fault(
        key="security.allow",
        got=f"[{', '.join(others)}] in a file",
        expected="packages that this command names",
        cure=f"If you trust them, add {keys if is_override else flags}",
    )


def read_overrides(directory: Path | str) -> list[str]:
    """The overrides that a frozen config was composed with."""
    # As plain text: `name=a${seed}` is the record of an override, not an interpolation.
    path = Path(directory) / "overrides.yaml"
    return cast(list[str], _parsed(_text(path), name=str(path)))


def record_parent(directory: Path, parent: Mapping[str, Any]) -> None:
    """Adds to provenance.json of which run, and of which step of it, this one is a fork."""
    path = directory / "provenance.json"
    found = _covered({**json.loads(path.read_text(encoding="utf-8")), "parent": parent})
    write_whole(path, json.dumps(found, indent=2) + "\n")


def read_parent(directory: Path) -> Mapping[str, Any] | None:
    """What `record_parent` wrote; None of a run that is no fork."""
    path = directory / "provenance.json"
    if not path.is_file():
        return None
    parent: Mapping[str, Any] | None = json.loads(path.read_text(encoding="utf-8")).get("parent")
    return parent


def _covered(found: Mapping[str, object]) -> dict[str, Any]:
    # The diff may be of a file with secrets, the command of a program that was started with one.
    return cast(dict[str, Any], _with_texts(dict(found), covered))


def shared_origin() -> Mapping[str, Any]:
    """Where runs of this process come from, without the overrides of each; secrets in it are named."""
    return _covered(provenance([]))


def provenance(overrides: list[str]) -> dict[str, Any]:
    """Where a run came from: plain values only."""
    return {
        "command": sys.argv,
        "overrides": overrides,
        "working_directory": os.getcwd(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "versions": versions(),
        "machine": {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
    }


def versions() -> dict[str, str]:
    """Versions of Python and of the packages that decide a run's numbers. Reads metadata; imports none of them."""
    return {"python": platform.python_version(), **_installed()}


@functools.cache
def _installed() -> Mapping[str, str]:
    # Once a process, of which no import changes: 2 ms.
    return {name: importlib.metadata.version(name) for name in DISTRIBUTIONS}


def chosen_values(plain: Mapping[str, Any], overrides: Sequence[str]) -> dict[str, Any]:
    """The hyperparameters that tell one run from another: those of the command line, and the three that all ask for.

    plain: the config's values. overrides: as typed, with the swept ones of a job among them.
    Returns: values by dotted key. A group is worth the option that was chosen, such as {"model": "lenet"}.
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
    if plain["tags"]:
        values["tags"] = ", ".join(map(str, plain["tags"]))
    return values


def compared_tags(plain: Mapping[str, Any], *, is_trial: bool | None = None) -> list[str]:
    """The tags by which runs are compared: what is monitored, what a search looks for, the metrics.

    plain: the config's values. is_trial: whether it is the job of a search; None where the config says it.
    """
    sweep = plain["sweep"]
    stages = [stage for stage in ("train", "val", "test") if stage in plain["metric_stages"]]
    monitor = plain["monitor"]
    tags = [] if monitor is None or not plain["checkpoint"]["save_best"] else [BEST_VALUE, BEST_STEP]
    tags += [monitor, *searched_tags(sweep["monitor"], mode=plain["mode"])]
    if sweep["pruner"] != "none" and (sweep["trial"] is not None if is_trial is None else is_trial):
        tags.append(PRUNED_TAG)
    tags += [f"{name}/{stage}" for name in plain["metrics"] for stage in stages]
    return [tag for tag in dict.fromkeys(tags) if tag is not None]
