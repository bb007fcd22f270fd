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
import sys
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

from exp.config.freeze import COMPOSITION
from exp.config.hydra_node import is_inside
from exp.config.versions import as_before
from exp.errors import ConfigError, Fault, RunError, one_line
from exp.files import holding, is_locked, write_whole
from exp.run_report import Report, read_report
from exp.spelling import among

if TYPE_CHECKING:
    from exp.sweeps.jobs import Job

SETTINGS = "sweep.json"
JOBS = "jobs.jsonl"
AUTO = "auto"
# What does not tell one job from another: names, places, what is shown, and how the sweep goes about it.
BESIDE = (COMPOSITION, "hydra", "name", "tags", "print_config", "data_dir", "logger", "sweep")
# The differences between two searches in words, by key of sweep.json.
OF_SEARCH = {"axes": "other axes", "objectives": "another monitor", "config": "other settings of its jobs"}
# A killed sweep's jobs die with it, and need a moment for that.
DEATH_SECONDS = 10.0


def identity_of(plain: Mapping[str, Any]) -> str:
    """What a job computes, in 16 hexadecimal digits: the same for the same resolved config, whatever it is called."""
    left = as_before({key: value for key, value in plain.items() if key not in BESIDE})
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

    Raises: ConfigError where what is there cannot be read.
    """

    def __init__(self, directory: Path) -> None:
        self.directory = directory
        entries: list[Entry] = []
        path = directory / JOBS
        if path.is_file():
            try:
                content = path.read_bytes()
                whole = content[: content.rfind(b"\n") + 1]  # a killed sweep may have left half a line
                entries = [_entry(line, directory) for line in whole.splitlines()]
            except (OSError, ValueError, TypeError) as error:
                raise _damaged(path, error) from error
            if len(whole) < len(content):
                os.truncate(path, len(whole))
        self._unclaimed: dict[str, list[Entry]] = defaultdict(list)
        for entry in entries:
            self._unclaimed[entry.identity].append(entry)
        self._directories = {(directory / entry.directory).absolute() for entry in entries}
        self.has_jobs = bool(entries)
        self._next = max((entry.job for entry in entries), default=-1) + 1

    def claimed(self, identity: str) -> Entry | None:
        """The job of an earlier sweep here that computes this, each of them once; None where there is none."""
        found = self._unclaimed[identity]
        return found.pop(0) if found else None

    @property
    def unclaimed(self) -> list[Entry]:
        """The jobs of an earlier sweep here that nobody has claimed, by their numbers."""
        left = (entry for entries in self._unclaimed.values() for entry in entries)
        return sorted(left, key=lambda entry: entry.job)

    def refuse_lost(self) -> None:
        """Reject a directory with runs of which no line is left: they would be run again, beside themselves.

        Raises: ConfigError.
        """
        lost: set[Path] = set()
        for path in sorted(self.directory.absolute().rglob("config.yaml")):
            run = path.parent
            # What an evaluation left in a run is no job.
            if not {run, *run.parents} & (self._directories | lost):
                lost.add(run)
        if lost:
            names = sorted(os.path.relpath(run, self.directory.absolute()) for run in lost)
            raise ConfigError([
                Fault(
                    key="sweep.resume",
                    got=f"{self.directory / JOBS}, which has no line of {among(names)}, where runs are",
                    expected="a line of each job that was started",
                    cure=f"Put a whole {JOBS} back, or move those directories to another place to run them again",
                )
            ])  # fmt: skip

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

    def report_of(self, job: Job, *, retries_failed: bool) -> Report | None:
        """Return the report of a job that an earlier sweep of this directory has finished. Return None for others."""
        directory = cast(Path, job.directory)
        if not (directory / "config.yaml").is_file():
            return None
        wait_for_dead(directory)
        if not (directory / "report.json").is_file():
            return None
        try:
            report = read_report(directory)
        except RunError as error:
            print(f"{error}. Job {job.number} goes on from its last checkpoint", file=sys.stderr)
            return None
        if report.status == "interrupted" or (report.status == "failed" and retries_failed):
            return None
        return replace(report, directory=str(directory))  # the sweep may have been moved

    def begin(self, overrides: Sequence[str], search: Mapping[str, Any] | None) -> None:
        """Write what the sweep is started with.

        Args:
            overrides: Overrides of the command.
            search: What the proposals of a search depend on. None for a grid.

        Raises:
            ConfigError: The sweep of this directory was another one.
        """
        before = self.settings()
        if before is not None:
            self.refuse_lost()
            known = before["search"]
            if (known is None) != (search is None):
                got = f"{'a grid' if search is None else 'a search'}, where a sweep of the other kind was"
                raise ConfigError([Fault(key="sweep.resume", got=got, expected="the same kind")])
            other = [key for key, value in (search or {}).items() if known.get(key, value) != value]
            if other:
                # The record of the search would mix the results of different jobs.
                what, typed = OF_SEARCH.get(other[0], f"another {other[0]}"), " ".join(before["overrides"])
                got = f"{what} than {self.directory} was begun with: {typed}"
                expected = "the same search, of more trials if you like"
                raise ConfigError([Fault(key="sweep.resume", got=got, expected=expected)])
            search = None if search is None else {**known, **search}
        self._keep_settings({"overrides": list(overrides), "search": search})

    def kept(self, key: str, value: Any) -> Any:
        """Return a value of the search as it was when the search began, on whatever machine it resumes."""
        settings = dict(self.settings() or {"search": {}})
        if key not in settings["search"]:
            settings["search"][key] = value
            self._keep_settings(settings)
        return settings["search"][key]

    def settings(self) -> Mapping[str, Any] | None:
        """What the sweep was started with; None where nothing was written."""
        path = self.directory / SETTINGS
        if not path.is_file():
            return None
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if not isinstance(found, dict) or not isinstance(found["overrides"], list):
                raise TypeError("no command in it")
            if not isinstance(found["search"], dict | None):
                raise TypeError("no search in it")
        except (OSError, ValueError, TypeError, LookupError) as error:
            raise _damaged(path, error) from error
        return cast(Mapping[str, Any], found)

    def _keep_settings(self, settings: Mapping[str, Any]) -> None:
        write_whole(self.directory / SETTINGS, json.dumps(settings, indent=2) + "\n")


def _entry(line: bytes, directory: Path) -> Entry:
    """Raises: ValueError, TypeError where a line is none that a sweep wrote."""
    entry = Entry(**json.loads(line))
    if type(entry.job) is not int or not isinstance(entry.identity, str) or not isinstance(entry.directory, str):
        raise TypeError(f"no job in {line.decode(errors='replace')}")
    if not os.path.abspath(directory / entry.directory).startswith(f"{os.path.abspath(directory)}{os.sep}"):
        raise ValueError(f"{entry.directory}, which is not below the sweep's directory")
    return entry


def _damaged(path: Path, error: Exception) -> ConfigError:
    """The fault of a sweep to go on with of which a file cannot be read."""
    shown = os.path.relpath(path)
    cure = f"Put a whole one back, or begin a new sweep; python -m exp.report {os.path.dirname(shown)} shows this one"
    got, expected = f"{shown}: {one_line(error)}", f"{path.name} as a sweep wrote it"
    return ConfigError([Fault(key="sweep.resume", got=got, expected=expected, cure=cure)])


def found_sweep(wanted: str, *, beside: Path) -> Path | None:
    """The directory of the sweep to go on with; None where `auto` finds none.

    wanted: a directory, or auto. beside: where a new sweep of this name would be, <sweeps>/<date>/<time>.
    Raises: ConfigError where it is none, is neither below the working directory nor there, or is still going on.
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
    if not is_inside(str(directory)) and not directory.is_relative_to(sweeps_of(beside)):
        got, expected = f"{directory}", "a directory below the working directory, or where hydra.sweep.dir leads"
        cure = f"Add hydra.sweep.dir={directory.parent}/again, or start in the directory in which it was begun"
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
