"""Reads the run directories of runs and sweeps below a folder, even if files are missing or damaged.

A run that is running, killed, partly copied or deleted during the read becomes a record and raises no error. `problems`
of the record has a line for each missing or damaged file.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, TypeVar, cast

from exp.config.reading import UNKNOWN, Values
from exp.config.yaml_files import read_yaml
from exp.errors import ConfigError, ExpError, shorten
from exp.files import is_locked
from exp.redaction import mask_secrets
from exp.run_report import DAMAGE as REPORT_DAMAGE
from exp.run_report import parse_report
from exp.shared_types import Mode, compared_tag
from exp.tensorboard.event_file import Curve, event_files, read_curves

Part = TypeVar("Part")
# A folder with any of these files is a run directory.
MARKS = ("config.yaml", "overrides.yaml", "provenance.json", "report.json")
EVENTS = "tensorboard"
# Files of exp.data and exp.find_lr, whose directories are not compared.
NO_RUN = ("data.md", "lr.json")
# Folders without runs that may be large.
SKIPPED = ("__pycache__", "node_modules", "checkpoints")
RUNNING, NO_REPORT, UNREADABLE = "running", "no report", "unreadable"
# Overrides of these keys are no hyperparameters.
NOT_COMPARED = ("hydra", "sweep", "resume", "from_run", "print_config", "tags", "logger", "security")
# Errors of truncated files, and of files of other programs.
DAMAGE = (*REPORT_DAMAGE, OSError, ExpError)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory.

    Attributes:
        status: Status of the report, or RUNNING, NO_REPORT, UNREADABLE.
        typed: Values of the overrides by key, as text.
        config: Frozen config. Empty if it cannot be read.
        monitor: Monitored tag. None if the config cannot be read.
        mode: Direction of the monitored tag. None if the config cannot be read.
        value: Best value of the monitored tag, also for a run that is not completed. nan without a value.
        step: Optimizer step of the value.
        metrics: Last value of each tag.
        seconds: Wall time in seconds. nan if it is unknown.
        curves: Curves by tag.
        problems: A line for each file that is missing or damaged.
    """

    directory: Path
    status: str
    typed: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, object] = field(default_factory=dict)
    monitor: str | None = None
    mode: Mode | None = None
    repeat_over: str | None = None
    value: float = math.nan
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = math.nan
    peak_memory_mib: float | None = None
    curves: Mapping[str, Curve] = field(default_factory=dict)
    error: str = ""
    problems: Sequence[str] = ()

    def value_of(self, key: str) -> str | None:
        """Return a hyperparameter as text: the value in the config, or else the override. None without a value."""
        found = Values(dict(self.config))[key]
        if found is UNKNOWN or isinstance(found, dict | list):
            return self.typed.get(key)
        return mask_secrets(text_of(found))


def text_of(value: object) -> str:
    """Return a value as text in YAML. 1 and 1.0 give different texts, and 1e-4 and 0.0001 the same text."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of a search for runs.

    Args:
        runs: Absolute run directories, without duplicates, in natural order (9 before 10).
        problems: Messages about folders that cannot be read.
    """

    runs: Sequence[Path]
    problems: Sequence[str]


def find_runs(places: Sequence[Path]) -> Found:
    """Return the run directories at and below some folders."""
    problems: dict[str, None] = {}

    def note(error: OSError) -> None:
        problems[f"{error.filename}: {error.strerror or error}"] = None

    found: dict[str, Path] = {}
    for place in places:
        for folder, inner, files in os.walk(place, onerror=note):
            if is_run(Path(folder), names=[*inner, *files]):
                found.setdefault(os.path.realpath(folder), Path(folder).absolute())
                inner.clear()
            inner[:] = [name for name in inner if not name.startswith(".") and name not in SKIPPED]
    return Found(runs=sorted(found.values(), key=_natural_order), problems=list(problems))


def is_run(folder: Path, *, names: Collection[str]) -> bool:
    """Return whether a folder is a run directory.

    Args:
        folder: The folder.
        names: Names of the files and folders in it.
    """
    if any(name in names for name in NO_RUN):
        return False
    return any(name in names for name in MARKS) or (EVENTS in names and _has_events(folder))


def _has_events(directory: Path) -> bool:
    try:
        return bool(event_files(directory / EVENTS))
    except OSError:  # read_run reports it
        return False


def read_run(directory: Path, *, tags: Collection[str] = ()) -> RunRecord:
    """Return the record of a run directory.

    Args:
        directory: Run directory.
        tags: Tags whose curves are read in addition to losses, the monitored tag and validation metrics.
    """
    problems: list[str] = []
    config = read_part(directory, "config.yaml", _mapping, problems) or {}
    typed = read_part(directory, "overrides.yaml", _overrides, problems) or {}
    known = Values(config)
    monitor = known["monitor"] if isinstance(known["monitor"], str) else None
    over = known["sweep.repeat_over"]
    wanted = {"loss/train", "loss/val", *tags, *([] if monitor is None else [compared_tag(monitor)])}
    found = read_curves(directory / EVENTS, wants=lambda tag: tag in wanted or is_of_validation(tag))
    record = RunRecord(
        directory=directory,
        status=UNREADABLE,
        typed={key: mask_secrets(text) for key, text in typed.items()},
        config=config,
        monitor=monitor,
        mode=cast(Mode, known["mode"]) if known["mode"] in ("min", "max") else None,
        repeat_over=over if isinstance(over, str) else None,
        curves=found.by_tag,
    )
    record = _with_report(record, problems)
    return replace(record, problems=tuple(map(mask_secrets, [*problems, *found.problems])))


def is_of_validation(tag: str) -> bool:
    """Return whether a tag is a loss or metric of the validation split, except values of single classes or terms."""
    return tag.endswith("/val") and tag.count("/") == 1


def _with_report(record: RunRecord, problems: list[str]) -> RunRecord:
    """Return a record with the values of report.json, or with the status of a run without a report."""
    directory = record.directory
    exists = os.path.lexists(directory / "report.json")
    facts = read_part(directory, "report.json", _facts, problems) if exists else None
    if facts is not None:
        return replace(record, **facts)
    # A sweep locks its own directory.
    is_running = is_locked(directory / "config.yaml") or is_locked(directory.parent)
    status = UNREADABLE if exists else RUNNING if is_running else NO_REPORT
    if status == NO_REPORT:
        why = "the run did not begin, or was killed" if os.path.isdir(directory) else "the directory was removed"
        problems.append(f"report.json is missing: {why}")
    return replace(record, status=status)


def best_point(curve: Curve | None, *, mode: Mode | None) -> tuple[float, int | None]:
    """Return the best finite value of a curve, and the first step with this value; nan and None without a value."""
    pick = max if mode == "max" else min
    pairs = [] if curve is None else list(zip(curve.values.tolist(), curve.steps.tolist(), strict=True))
    finite = [(value, step) for value, step in pairs if math.isfinite(value)]
    return pick(finite, key=lambda pair: pair[0]) if finite else (math.nan, None)


# --- the files ---


def read_part(directory: Path, name: str, read: Callable[[Path], Part], problems: list[str]) -> Part | None:
    """Return the result of `read` for a file of a run directory; None if the file is missing or damaged.

    Args:
        directory: Run directory.
        name: Name of the file.
        read: Function that reads the file.
        problems: List to which a line about a missing or damaged file is added.
    """
    try:
        return read(directory / name)
    except FileNotFoundError:
        problems.append(f"{name} is missing")
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror or error}")
    except DAMAGE as error:
        what = error.errors[0].got if isinstance(error, ConfigError) else str(error) or type(error).__name__
        what = f"no entry {what}" if isinstance(error, KeyError) else what
        problems.append(f"{name} is damaged: {shorten(what, most=200)}")
    return None


def _plain(path: Path) -> object:
    path.open("rb").close()  # raises OSError, which read_yaml would report as an error of a config
    return read_yaml(path)


def _mapping(path: Path) -> dict[str, object]:
    found = _plain(path)
    if not isinstance(found, dict):
        raise ValueError("not a mapping")
    return found


def _overrides(path: Path) -> dict[str, str]:
    found = _plain(path)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("not a list of overrides")
    return dict(_parse_overrides(found))


def _parse_overrides(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    for override in overrides:
        key, sign, value = override.lstrip("+").partition("=")
        key = key.partition("@")[0]
        if sign and not override.startswith("~") and key.partition(".")[0].partition("/")[0] not in NOT_COMPARED:
            yield key, _number_or_text(value)


def _number_or_text(value: str) -> str:
    """Return a number in a uniform spelling, and other text unchanged. 1e-4 and 0.0001 give the same text."""
    try:
        return text_of(int(value) if value.lstrip("+-").isdecimal() else float(value))
    except ValueError:
        return value


def _facts(path: Path) -> dict[str, Any]:
    """Return the fields of a RunRecord whose values are in report.json."""
    report = parse_report(path.read_text(encoding="utf-8"))
    error = "" if report.error is None else str(report.error["message"])
    peak = report.peak_memory_mib
    return {
        "status": str(report.status),
        "value": report.monitored,
        "step": None if report.best is None else int(report.best["step"]),
        "metrics": {**report.metrics, **report.best_metrics},
        "seconds": float(report.wall_seconds),
        "peak_memory_mib": None if peak is None else float(peak),
        "error": mask_secrets(next(iter(error.strip().splitlines()), "")),
    }


def _natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a sort key for paths that compares the numbers in names by value, so that 9 comes before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
