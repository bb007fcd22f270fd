"""The files in the directory of a sweep that let the same command resume the sweep.

sweep.json     the overrides of the command, and the settings on which the proposals of a search depend
jobs.jsonl     one line per job, written before the job starts, with its number, its identity and its directory

The directory is locked while the sweep runs. The files cannot be locked, because each write replaces the file.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import os
import shutil
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from exp.config.frozen import COMPOSITION
from exp.config.hydra_node import is_inside
from exp.config.versions import as_before
from exp.errors import ConfigError, RunError, config_error, one_line
from exp.files import hold_lock, is_locked, write_atomic
from exp.run_report import Report, read_report

if TYPE_CHECKING:
    from exp.sweeps.jobs import Job, Plain

SETTINGS = "sweep.json"
JOBS = "jobs.jsonl"
AUTO = "auto"
# Config keys that do not change the result of a job: names, directories, output, settings of the sweep.
NOT_OF_JOBS = (COMPOSITION, "hydra", "name", "tags", "print_config", "data_dir", "logger", "sweep")
# When a sweep is killed, its jobs end within this number of seconds.
DEATH_SECONDS = 10.0


def identity_of(plain: Plain) -> str:
    """Return the identity of a job: 16 hexadecimal digits that are equal for jobs with the same result.

    Args:
        plain: Config of the job as plain values.
    """
    left = as_before({key: value for key, value in plain.items() if key not in NOT_OF_JOBS})
    text = json.dumps(left, sort_keys=True, default=repr)
    return hashlib.sha256(text.encode()).hexdigest()[:16]


@dataclass(frozen=True, kw_only=True)
class Entry:
    """A line of jobs.jsonl: a job that was started.

    Attributes:
        job: Number of the job.
        identity: Result of `identity_of`.
        directory: Run directory, relative to the directory of the sweep.
    """

    job: int
    identity: str
    directory: str


class Ledger:
    """The record of one sweep, including the jobs of an earlier sweep in the same directory.

    Args:
        directory: Directory of the sweep.

    Raises:
        ConfigError: A file of the earlier sweep cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        entries: list[Entry] = []
        path = directory / JOBS
        if path.is_file():
            try:
                content = path.read_bytes()
                whole = content[: content.rfind(b"\n") + 1]  # a killed sweep may have written an incomplete last line
                entries = [_entry(line, directory) for line in whole.splitlines()]
            except (OSError, ValueError, TypeError) as error:
                raise _damage_error(path, error) from error
            if len(whole) < len(content):
                os.truncate(path, len(whole))
        self.has_jobs = bool(entries)
        self._unclaimed: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._unclaimed[entry.identity].append(entry)
        self._next = max((entry.job for entry in entries), default=-1) + 1

    def claim(self, identity: str) -> Entry | None:
        """Return an entry of the earlier sweep that has this identity and was not returned before.

        Return None if no entry is left.
        """
        found = self._unclaimed[identity]
        return found.pop(0) if found else None

    def next_number(self) -> int:
        """Return a new job number, which no job of the earlier sweep has."""
        self._next += 1
        return self._next - 1

    def write(self, entries: Sequence[Entry]) -> None:
        """Append entries of jobs to jobs.jsonl, before these jobs start."""
        lines = "".join(json.dumps(vars(entry)) + "\n" for entry in entries)
        with (self.directory / JOBS).open("a", encoding="utf-8") as file:
            file.write(lines)
            file.flush()
            os.fsync(file.fileno())

    def report_of(self, job: Job, *, retries_failed: bool) -> Report | None:
        """Return the report of a job that ended in an earlier sweep.

        Args:
            job: Job with a run directory.
            retries_failed: Whether failed jobs run again. Value of sweep.retry_failed.

        Returns:
            The report, or None if the job still has to run.
        """
        directory = cast(Path, job.directory)
        if not (directory / "config.yaml").is_file():
            return None
        wait_for_dead(directory)
        if not (directory / "report.json").is_file():
            return None
        try:
            report = read_report(directory)
        except RunError as error:
            print(f"{error}. Job {job.number} therefore resumes from the last checkpoint of the job", file=sys.stderr)
            return None
        if report.status == "interrupted" or (report.status == "failed" and retries_failed):
            return None
        return replace(report, directory=str(directory))  # the directory of the sweep may have been moved

    def begin(self, overrides: Sequence[str], search: Mapping[str, object] | None) -> None:
        """Write sweep.json. If an earlier sweep wrote the file, compare the two sweeps first.

        Args:
            overrides: Overrides of the command.
            search: Settings on which the proposals of a search depend. None for a grid.

        Raises:
            ConfigError: One of the sweeps is a grid and the other is a search, or the two searches have different
                settings.
        """
        before = self._settings()
        if before is not None:
            known = before["search"]
            if (known is None) != (search is None):
                kind = "search" if search is None else "grid"
                raise _refusal(f"{self.directory}, which contains a {kind}", f"a {kind}, as in the first command")
            other = [key for key, value in (search or {}).items() if known.get(key, value) != value]
            if other:
                # Refuse, because the record of the search would mix results of different jobs.
                typed = " ".join(before["overrides"])
                got = f"a search that differs in {other[0]} from that in {self.directory}, whose command is {typed}"
                raise _refusal(got, "the same search; only sweep.trials may be larger than before")
            search = None if search is None else {**known, **search}
        self._keep_settings({"overrides": list(overrides), "search": search})

    def keep(self, key: str, value: int) -> int:
        """Return a value of the search from sweep.json, so that a resumed sweep uses the same value on any machine.

        Args:
            key: Name of the value in sweep.json.
            value: Value to store if sweep.json does not have the key.
        """
        settings = dict(self._settings() or {"search": {}})
        if key not in settings["search"]:
            settings["search"][key] = value
            self._keep_settings(settings)
        return int(settings["search"][key])

    def _settings(self) -> Mapping[str, Any] | None:
        path = self.directory / SETTINGS
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found["overrides"], list) or not isinstance(found["search"], dict | None):
                raise TypeError("the overrides or the search are missing or have a wrong type")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise _damage_error(path, error) from error
        return cast(Mapping[str, Any], found)

    def _keep_settings(self, settings: Mapping[str, Any]) -> None:
        write_atomic(self.directory / SETTINGS, json.dumps(settings, indent=2) + "\n")


def _entry(line: bytes, directory: Path) -> Entry:
    """Parse a line of jobs.jsonl. Raise ValueError or TypeError if the line is not a valid entry."""
    entry = Entry(**json.loads(line))
    if type(entry.job) is not int or not isinstance(entry.identity, str) or not isinstance(entry.directory, str):
        raise TypeError(f"no description of a job in {line.decode(errors='replace')}")
    if not os.path.abspath(directory / entry.directory).startswith(f"{os.path.abspath(directory)}{os.sep}"):
        raise ValueError(f"{entry.directory}, which is not below the sweep's directory")
    return entry


def _refusal(got: str, expected: str, fix: str | None = None) -> ConfigError:
    return config_error("sweep.resume", got=got, expected=expected, fix=fix)


def _damage_error(path: Path, error: Exception) -> ConfigError:
    report = f"python -m exp.report {os.path.relpath(path.parent)}"
    fix = f"Restore the file from a backup, or start a new sweep. {report} still works"
    return _refusal(f"{os.path.relpath(path)}, which is damaged: {one_line(error)}", f"an intact {path.name}", fix)


def find_sweep(wanted: str, *, new: Path) -> Path | None:
    """Return the directory of the sweep to resume.

    Args:
        wanted: A directory, or `auto` for the newest sweep of the same name.
        new: Directory that a new sweep would use: <sweeps>/<date>/<time>.

    Returns:
        The directory, or None if `auto` finds no sweep.

    Raises:
        ConfigError: The directory has no sweep, or its sweep is running. Also raised if the directory is neither below
            the working directory nor next to other sweeps of the same name.
    """
    if wanted == AUTO:
        found = sorted(sweeps_of(new).glob(f"*/*/{SETTINGS}"), key=lambda path: path.stat().st_mtime_ns)
        if not found:
            return None
        directory = found[-1].parent
    else:
        directory = Path(os.path.abspath(wanted))
        if not (directory / SETTINGS).is_file():
            raise _refusal(f"{wanted}, which has no {SETTINGS}", "a sweep's directory, or auto")
    if not is_inside(str(directory)) and not directory.is_relative_to(sweeps_of(new)):
        expected = "a directory below the working directory, or next to the directory hydra.sweep.dir"
        raise _refusal(f"{directory}", expected, f"Add hydra.sweep.dir={directory.parent}/new")
    if is_locked(directory):
        raise _running_error(directory)
    return directory


def is_sweep(directory: Path) -> bool:
    """Return whether a directory is the directory of a sweep."""
    # os.path.isfile is used, because Path.is_file raises an exception for a directory that cannot be read.
    if any(os.path.isfile(directory / name) for name in (SETTINGS, JOBS)):
        return True
    # A run directory may also have a table.csv, but next to a config.yaml.
    return os.path.isfile(directory / "table.csv") and not os.path.isfile(directory / "config.yaml")


def sweeps_of(wanted: Path) -> Path:
    """Return the directory that contains all sweeps of the same name.

    Args:
        wanted: Directory of one of the sweeps.
    """
    return wanted.absolute().parent.parent


@contextlib.contextmanager
def lock_sweep(directory: Path) -> Iterator[None]:
    """Lock the directory of a sweep while the code inside runs.

    Raises:
        ConfigError: Another sweep runs in the directory.
    """
    with contextlib.ExitStack() as stack:
        try:
            stack.enter_context(hold_lock(directory, alone=True))
        except BlockingIOError as error:
            raise _running_error(directory) from error
        yield


def _running_error(directory: Path) -> ConfigError:
    return _refusal(f"{directory}, whose sweep is still running", "a sweep that has ended")


def clear_unfrozen(directory: Path) -> None:
    """Remove the run directory of a job that ended before its config.yaml was written.

    Raises:
        RunError: A process of the job still runs after DEATH_SECONDS.
    """
    if directory.is_dir() and not (directory / "config.yaml").is_file():
        wait_for_dead(directory)
        shutil.rmtree(directory)


def wait_for_dead(directory: Path) -> None:
    """Wait until the processes of a killed sweep have ended and no longer write into a run directory.

    Raises:
        RunError: A process still runs after DEATH_SECONDS.
    """
    end = time.monotonic() + DEATH_SECONDS
    while any(map(is_locked, (directory / "config.yaml", *directory.glob(".*.partial")))):
        if time.monotonic() > end:
            raise RunError(f"{directory} is in use by a process of an earlier sweep. End that process first")
        time.sleep(0.05)
