"""Create the run directory of a run, and write its first files.

config.yaml      resolved config, which all ranks read
overrides.yaml   list of the overrides of the command line
provenance.json  command, git revision and diff, package versions, machine
"""

from __future__ import annotations

import contextlib
import datetime
import itertools
import json
import os
import platform
import shutil
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import cast

from omegaconf import DictConfig, open_dict

from exp.config.frozen import COMPOSITION, OUTPUT, TAKEN, frozen_yaml, literal, map_texts, versions
from exp.config.revision import revision
from exp.config.yaml_files import yaml_text
from exp.errors import RunError
from exp.files import write_atomic
from exp.redaction import mask_secrets


def freeze(config: DictConfig) -> Path:
    """Create the run directory of a composed config, and write overrides.yaml, provenance.json and config.yaml.

    If a directory of this name exists, `-2`, `-3` and so on are appended to the name of the new directory. A directory
    that `take_directory` has set is used even if it exists.

    Args:
        config: Composed config, without the hydra node. The path of the run directory is updated in place.

    Returns:
        Absolute path of the run directory.

    Raises:
        RunError: The directory cannot be created or written.
    """
    composition = config[COMPOSITION]
    wanted = Path(composition.directory)
    try:
        directory = wanted.absolute() if TAKEN in composition else make_exclusively(wanted)
    except OSError as error:
        raise _unwritable(wanted, error) from error
    composition.directory = literal(str(directory))
    write_frozen(directory, text=frozen_yaml(config), overrides=list(composition.overrides))
    return directory


def write_frozen(
    directory: Path,
    *,
    text: str,
    overrides: list[str],
    origin: Mapping[str, object] | None = None,
    is_synced: bool = True,
) -> None:
    """Write overrides.yaml, provenance.json and config.yaml of a run.

    config.yaml is written last. If a run directory contains config.yaml, it therefore contains all three files, even if
    the process was killed.

    Args:
        directory: Run directory.
        text: Text of config.yaml.
        overrides: Overrides of the command line.
        origin: Result of `shared_origin`, which several runs of one process may share. None: the provenance is
            computed.
        is_synced: Sync each file to disk before returning. This takes 0.5 ms per file.

    Raises:
        RunError: A file cannot be written.
    """
    own = {"overrides": overrides}
    found = _mask(provenance(overrides)) if origin is None else {**origin, **_mask(own)}
    try:
        for name, content in (
            ("overrides.yaml", yaml_text(overrides)),
            ("provenance.json", json.dumps(found, indent=2) + "\n"),
            ("config.yaml", text),
        ):
            write_atomic(directory / name, content, is_synced=is_synced)
    except OSError as error:
        raise _unwritable(directory, error) from error


def _unwritable(directory: Path, error: OSError) -> RunError:
    return RunError(
        f"the run directory {directory} cannot be written: {error.strerror or error}. "
        "Remove the directory, or set another one by hydra.run.dir=outputs/elsewhere"
    )


def take_directory(config: DictConfig, directory: Path) -> None:
    """Set an existing directory as the run directory of a config, so that `freeze` does not create a new directory."""
    composition = config[COMPOSITION]
    with open_dict(composition):
        composition.directory = literal(str(directory))
        composition[TAKEN] = True


def clear(directory: Path) -> None:
    """Remove all files of a run directory except output.log.

    A run that was killed before its first checkpoint can then start again in the same directory.
    """
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OUTPUT:
            path.unlink()


def make_exclusively(wanted: Path) -> Path:
    """Create a new directory and return its absolute path.

    If `wanted` exists, the new directory is `wanted-2`. If `wanted-2` exists, it is `wanted-3`, and so on.
    """
    wanted = wanted.absolute()
    wanted.parent.mkdir(parents=True, exist_ok=True)
    candidate = wanted
    for count in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            candidate.mkdir()
            return candidate
        candidate = wanted.with_name(f"{wanted.name}-{count}")
    raise AssertionError("numbers do not end")


def record_parent(directory: Path, parent: Mapping[str, object]) -> None:
    """Write facts about the parent of a forked run to provenance.json.

    Args:
        directory: Run directory of the fork.
        parent: Facts such as the parent's run directory and the step of the fork, by name.
    """
    path = directory / "provenance.json"
    found = _mask({**json.loads(path.read_text(encoding="utf-8")), "parent": parent})
    write_atomic(path, json.dumps(found, indent=2) + "\n")


def _mask(found: Mapping[str, object]) -> dict[str, object]:
    # The diff and the command may contain secrets.
    return cast(dict[str, object], map_texts(dict(found), mask_secrets))


def shared_origin() -> Mapping[str, object]:
    """Return the provenance that all runs of this process share. Secrets are masked, and `overrides` is empty."""
    return _mask(provenance([]))


def provenance(overrides: list[str]) -> dict[str, object]:
    """Return the content of provenance.json: command, git revision and diff, package versions and machine.

    Args:
        overrides: Overrides of the command line.
    """
    return {
        "command": sys.argv,
        "overrides": overrides,
        "working_directory": os.getcwd(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "versions": versions(),
        "machine": {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
    }
