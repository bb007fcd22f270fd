"""Reads the run directories of runs and sweeps below a folder, even if files are missing or damaged.

A run gets a record even if it is running, was killed, was copied only partly, or is deleted during the read. `problems`
of the record lists the missing and damaged files.
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
# A folder with any of these files is no run directory. exp.data and exp.find_lr write them.
NO_RUN = ("data.md", "lr.json")
# Folders that the search skips, because they contain no runs and may be large.
SKIPPED = ("__pycache__", "node_modules", "checkpoints")
RUNNING, NO_REPORT, UNREADABLE = "running", "no report", "unreadable"
# Overrides of these keys are no hyperparameters and are not compared.
NOT_COMPARED = ("hydra", "sweep", "resume", "from_run", "print_config", "tags", "logger", "security")
# Exceptions that are raised when a truncated file, or a file of another program, is read.
DAMAGE = (*REPORT_DAMAGE, OSError, ExpError)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """Contents of a run directory.

    Attributes:
        directory: The run directory.
        status: Status in report.json, such as completed. If the report is missing or damaged: RUNNING, NO_REPORT or
            UNREADABLE.
        typed: Overrides of the command line: values as text, by config key.
        config: Config in config.yaml. Empty if the file cannot be read.
        monitor: Monitored tag. None: the config cannot be read.
        mode: "min" if smaller values of the monitored tag are better, else "max". None: the config cannot be read.
        repeat_over: Value of sweep.repeat_over in the config, or None.
        value: Best value of the monitored tag, even if the run is not completed. nan if the tag has no value.
        step: Optimizer step of `value`.
        metrics: Last value of each tag.
        seconds: Wall time in seconds. nan if it is unknown.
        peak_memory_mib: Peak memory in MiB. None: unknown.
        curves: Curves by tag.
        error: First line of the error that ended the run, or an empty text.
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
        """Return the value of a config key as text.

        The value is read from the config. If the config lacks the key, the override of the command line is returned. If
        both are missing, the result is None.
        """
        found = Values(dict(self.config))[key]
        if found is UNKNOWN or isinstance(found, dict | list):
            return self.typed.get(key)
        return mask_secrets(text_of(found))


def text_of(value: object) -> str:
    """Return a value as text in YAML. The texts of 1 and 1.0 differ, but those of 1e-4 and 0.0001 are equal."""
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
    """Return the run directories at and below some folders.

    Args:
        places: The folders. A folder may be a run directory.
    """
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
        names: Names of the files and folders in `folder`.
    """
    if any(name in names for name in NO_RUN):
        return False
    return any(name in names for name in MARKS) or (EVENTS in names and _has_events(folder))


def _has_events(directory: Path) -> bool:
    try:
        return bool(event_files(directory / EVENTS))
    except OSError:  # read_run reports this error
        return False


def read_run(directory: Path, *, tags: Collection[str] = ()) -> RunRecord:
    """Return the record of a run directory.

    Args:
        directory: Run directory.
        tags: Tags of additional curves. Curves of losses, validation metrics and the monitored tag are always read.
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
    """Return whether a tag is a loss or metric of the whole validation split, and not of a single class or term."""
    return tag.endswith("/val") and tag.count("/") == 1


def _with_report(record: RunRecord, problems: list[str]) -> RunRecord:
    """Return a record with the values of report.json added. If the report is missing or damaged, set only the status.

    Args:
        record: Record without a report.
        problems: List to which messages about the file are added.
    """
    directory = record.directory
    exists = os.path.lexists(directory / "report.json")
    facts = read_part(directory, "report.json", _facts, problems) if exists else None
    if facts is not None:
        return replace(record, **facts)
    # A running sweep locks its directory, which contains the run directory.
    is_running = is_locked(directory / "config.yaml") or is_locked(directory.parent)
    status = UNREADABLE if exists else RUNNING if is_running else NO_REPORT
    if status == NO_REPORT:
        why = "the run did not begin, or was killed" if os.path.isdir(directory) else "the directory was removed"
        problems.append(f"report.json is missing: {why}")
    return replace(record, status=status)


def best_point(curve: Curve | None, *, mode: Mode | None) -> tuple[float, int | None]:
    """Return the best value of a curve, and the first step with this value.

    Values that are not finite are ignored. If no value is left, the result is nan and None.
    """
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
    """Return the text of a number in a uniform spelling, and other text unchanged.

    The numbers 1e-4 and 0.0001 get the same text.
    """
    try:
        return text_of(int(value) if value.lstrip("+-").isdecimal() else float(value))
    except ValueError:
        return value


def _facts(path: Path) -> dict[str, Any]:
    """Return the values in report.json, by field of RunRecord."""
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
    """Return a sort key for paths. Numbers in names are compared by value, so that 9 comes before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
