"""What a sweep's directory remembers, so that the same command goes on with it: how it was started, which job is which.

sweep.json     the command's overrides, and of a search what its proposals depend on
jobs.jsonl     a line a job, written before it starts: its number, its identity, its directory

The directory itself is locked while the sweep runs: its files are replaced.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, cast

from exp.config.freeze import COMPOSITION
from exp.config.hydra_node import is_inside
from exp.errors import ConfigError, Fault, RunError
from exp.files import holding, is_locked, write_whole

SETTINGS = "sweep.json"
JOBS = "jobs.jsonl"
AUTO = "auto"
# What does not tell one job from another: names, places, what is shown, and how the sweep goes about it.
BESIDE = (COMPOSITION, "hydra", "name", "tags", "print_config", "data_dir", "logger", "sweep")
# A killed sweep's jobs die with it, and need a moment for that.
DEATH_SECONDS = 10.0


def identity_of(plain: Mapping[str, Any]) -> str:
    """What a job computes, in 16 hexadecimal digits: the same for the same resolved config, whatever it is called."""
    left = {key: value for key, value in plain.items() if key not in BESIDE}
    text = json.dumps(left, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """One job. directory: relative to the sweep's."""

    job: int
    identity: str
    directory: str


class Ledger:
    """The record of one sweep; of a directory that another sweep left, with what that one wrote.

    Raises: RunError where what is there cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        entries: list[Entry] = []
        path = directory / JOBS
        if path.is_file():
            content = path.read_bytes()
            whole = content[: content.rfind(b"\n") + 1]  # a killed sweep may have left half a line
            if len(whole) < len(content):
                os.truncate(path, len(whole))
            try:
                entries = [Entry(**json.loads(line)) for line in whole.splitlines()]
            except (ValueError, TypeError) as error:
                raise RunError(f"{path} is not as a sweep wrote it: {error}") from error
        self._unclaimed: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._unclaimed[entry.identity].append(entry)
        self.has_jobs = bool(entries)
        self._next = max((entry.job for entry in entries), default=-1) + 1

    def claimed(self, identity: str) -> Entry | None:
        """The job of an earlier sweep here that computes this, each of them once; None where there is none."""
        found = self._unclaimed[identity]
        return found.pop(0) if found else None

    def next_number(self) -> int:
        """A number that no job of an earlier sweep has."""
        self._next += 1
        return self._next - 1

    def write(self, entries: Sequence[Entry]) -> None:
        """Add jobs that are about to start."""
        lines = "".join(json.dumps(vars(entry)) + "\n" for entry in entries)
        with (self.directory / JOBS).open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def settings(self) -> Mapping[str, Any] | None:
        """What the sweep was started with; None where nothing was written."""
        path = self.directory / SETTINGS
        if not path.is_file():
            return None
        try:
            return cast(Mapping[str, Any], json.loads(path.read_text(encoding="utf-8")))
        except ValueError as error:
            raise RunError(f"{path} is not as a sweep wrote it: {error}") from error

    def keep_settings(self, settings: Mapping[str, Any]) -> None:
        """Write what the sweep is started with."""
        write_whole(self.directory / SETTINGS, json.dumps(settings, indent=2) + "\n")


def found_sweep(wanted: str, *, beside: Path) -> Path | None:
    """The directory of the sweep to go on with; None where `auto` finds none.

    wanted: a directory, or auto. beside: where a new sweep of this name would be, <sweeps>/<date>/<time>.
    Raises: ConfigError where it is none, is elsewhere than below the working directory, or is still going on.
    """
    if wanted == AUTO:
        found = sorted(sweeps_of(beside).glob(f"*/*/{SETTINGS}"), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            return None
        directory = found[-1].parent
    else:
        directory = Path(os.path.abspath(wanted))
        if not (directory / SETTINGS).is_file():
            got, expected = f"{wanted}, which has no {SETTINGS}", "a sweep's directory, or auto"
            raise ConfigError([Fault(key="sweep.resume", got=got, expected=expected)])
    if not is_inside(str(directory)):
        got, expected = f"{directory}", "a directory below the working directory"
        cure = "Start in the directory in which the sweep was begun, or copy it"
        raise ConfigError([Fault(key="sweep.resume", got=got, expected=expected, cure=cure)])
    if is_locked(directory):
        raise _going_on(directory)
    return directory


def sweeps_of(wanted: Path) -> Path:
    """The directory of all sweeps of a name, by the directory that one of them would have."""
    return wanted.absolute().parent.parent


@contextlib.contextmanager
def held(directory: Path) -> Iterator[None]:
    """Keep other sweeps out of a sweep's directory, for as long as this is entered.

    Raises: ConfigError where one is still going on there.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(holding(directory, alone=True))
        except BlockingIOError as error:
            raise _going_on(directory) from error
        yield


def _going_on(directory: Path) -> ConfigError:
    got = f"{directory}, where a sweep is still going on"
    return ConfigError([Fault(key="sweep.resume", got=got, expected="one that has ended, or was killed")])


def clear_unfrozen(directory: Path) -> None:
    """Take away a job's run directory that holds no config.yaml yet: its process ended before it had frozen that.

    Raises: RunError where a process of a killed sweep's job still writes into it, and does not end.
    """
    if directory.is_dir() and not (directory / "config.yaml").is_file():
        wait_for_dead(directory)
        shutil.rmtree(directory)


def wait_for_dead(directory: Path) -> None:
    """Wait until no process of a killed sweep's job writes into a run directory any more.

    Raises: RunError where one does not end.
    """
    end = time.monotonic() + DEATH_SECONDS
    while any(map(is_locked, (directory / "config.yaml", *directory.glob(".*.partial")))):
        if time.monotonic() > end:
            raise RunError(f"{directory} is still going on: a process of the sweep before holds it. End that first")
        time.sleep(0.05)
