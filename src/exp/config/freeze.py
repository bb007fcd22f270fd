"""Make the run directory of one run, and write its first files.

config.yaml      the resolved config that every rank reads
overrides.yaml   the command line's overrides, a list
provenance.json  command, git revision and diff, versions, machine
"""

from __future__ import annotations

import contextlib
import datetime
import errno
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

MAX_TRIES = 100


def freeze(config: DictConfig) -> Path:
    """Make the run directory of a composed config, and write overrides.yaml, provenance.json and config.yaml.

    If the directory exists, `-2`, `-3` and so on are appended to its name, unless it was made for this config; see
    `take_directory`.

    Returns:
        The absolute path of the new directory.

    Raises:
        RunError: The directory cannot be made or written.
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

    config.yaml is written last. If it exists, the others do, also after a kill.

    Args:
        directory: Run directory.
        text: Text of config.yaml.
        overrides: Overrides of the run.
        origin: Result of `shared_origin`, for several runs of one process.
        is_synced: Whether the files are on the disk when this returns, which takes 0.5 ms each.

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
        "Remove it, or set another with hydra.run.dir=outputs/elsewhere"
    )


def take_directory(config: DictConfig, directory: Path) -> None:
    """Let `freeze` use a directory that was made for this config."""
    composition = config[COMPOSITION]
    with open_dict(composition):
        composition.directory = literal(str(directory))
        composition[TAKEN] = True


def clear(directory: Path) -> None:
    """Remove the files of a run that was killed before its first checkpoint, except its output."""
    for path in directory.iterdir():
        if path.is_dir() and not path.is_symlink():
            shutil.rmtree(path)
        elif path.name != OUTPUT:
            path.unlink()


def make_exclusively(wanted: Path) -> Path:
    """Make and return a new directory: `wanted`, or `wanted-2`, `wanted-3` and so on if it exists."""
    wanted = wanted.absolute()
    candidate = wanted
    for count in itertools.count(2):
        with contextlib.suppress(FileExistsError):
            return _make(candidate)
        candidate = wanted.with_name(f"{wanted.name}-{count}")
    raise AssertionError("numbers do not end")


def _make(directory: Path) -> Path:
    parent = directory.parent
    for _ in range(MAX_TRIES):
        # A sweep that started no job removes its empty directories, also between these calls.
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
    raise FileNotFoundError(errno.ENOENT, "another program keeps removing its parent", str(directory))


def record_parent(directory: Path, parent: Mapping[str, object]) -> None:
    """Add the parent run and its step to provenance.json of a fork."""
    path = directory / "provenance.json"
    found = _mask({**json.loads(path.read_text(encoding="utf-8")), "parent": parent})
    write_atomic(path, json.dumps(found, indent=2) + "\n")


def _mask(found: Mapping[str, object]) -> dict[str, object]:
    # The diff and the command may have secrets.
    return cast(dict[str, object], map_texts(dict(found), mask_secrets))


def shared_origin() -> Mapping[str, object]:
    """Return the provenance that the runs of this process share, without overrides and with secrets masked."""
    return _mask(provenance([]))


def provenance(overrides: list[str]) -> dict[str, object]:
    """Return command, git revision and diff, versions and machine of a run as plain values."""
    return {
        "command": sys.argv,
        "overrides": overrides,
        "working_directory": os.getcwd(),
        "time": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "git": revision(),
        "versions": versions(),
        "machine": {"host": platform.node(), "system": platform.platform(), "cores": os.cpu_count()},
    }
