"""What run directories hold, of any runs and sweeps below a folder, as far as it can be read.

A run that is going on, was killed, was copied by half or goes away while it is read is a record that says so, and never
an error: `problems` has a line for each file that is missing or damaged.
"""

from __future__ import annotations

import math
import os
import re
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, cast

from exp.config.reading import UNKNOWN, Values
from exp.config.yaml_files import read_yaml
from exp.errors import ConfigError, ExpError, shorten
from exp.files import is_locked
from exp.redaction import mask_secrets
from exp.run_report import DAMAGE as REPORT_DAMAGE
from exp.run_report import Report, parsed_report
from exp.shared_types import Mode, compared_tag
from exp.sweeps.ledger import JOBS, SETTINGS
from exp.tensorboard.curves import Curve, event_files, read_curves

# Any of them makes a folder a run's.
MARKS = ("config.yaml", "overrides.yaml", "provenance.json", "report.json")
EVENTS = "tensorboard"
# What exp.data and exp.find_lr leave: looks and tests, which are no runs to compare with others.
NO_RUN = ("data.md", "lr.json")
# Whose folders hold no runs, and may be large.
SKIPPED = ("__pycache__", "node_modules", "checkpoints")
RUNNING, NO_REPORT, UNREADABLE = "running", "no report", "unreadable"
# Of an override: no hyperparameter.
BESIDE = ("hydra", "sweep", "resume", "from_run", "print_config", "tags", "logger", "security")
# What a file that is torn, of another version, or written by somebody else makes of its reading.
DAMAGE = (*REPORT_DAMAGE, OSError, ExpError)


@dataclass(frozen=True, kw_only=True)
class RunRecord:
    """One run directory.

    status: the report's; running, where a process holds the run; no report, where none does; unreadable.
    typed: key to value of its overrides, as text. config: the plain frozen one; empty where it cannot be read.
    monitor, mode: None where the config cannot be read.
    value: the monitored one, also of a run that failed or is under way, then the best so far; nan without one.
    step: of the optimizer, at which it was. metrics: tag to last value. seconds: nan where nobody knows.
    curves: those that were asked for.
    """

    directory: Path
    status: str
    typed: Mapping[str, str] = field(default_factory=dict)
    config: Mapping[str, Any] = field(default_factory=dict)
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
        """A hyperparameter as text: what the config holds, or what was typed of a group; None where nobody knows."""
        found = Values(dict(self.config))[key]
        if found is UNKNOWN or isinstance(found, dict | list):
            return self.typed.get(key)
        return mask_secrets(text_of(found))


def text_of(value: object) -> str:
    """Return a value as YAML has it: 1 and 1.0 are different texts, 1e-4 and 0.0001 are the same."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    return str(value)


@dataclass(frozen=True, kw_only=True)
class Found:
    """runs: their directories, absolute, each once, 9 before 10. problems: folders that could not be looked into."""

    runs: Sequence[Path]
    problems: Sequence[str]


def find_runs(places: Sequence[Path]) -> Found:
    """The run directories at and below some folders, however these lie in each other."""
    problems: list[str] = []

    def tell(error: OSError) -> None:
        problems.append(f"{error.filename}: {error.strerror or error}")

    found: dict[str, Path] = {}
    for place in places:
        for folder, inner, files in os.walk(place, onerror=tell):
            if is_run(Path(folder), names=[*inner, *files]):
                found.setdefault(os.path.realpath(folder), Path(folder).absolute())
                inner.clear()
            inner[:] = [name for name in inner if not name.startswith(".") and name not in SKIPPED]
    return Found(runs=sorted(found.values(), key=natural), problems=list(dict.fromkeys(problems)))


def is_run(folder: Path, *, names: Collection[str]) -> bool:
    """Whether a folder is the one of a run. names: of what is in it."""
    if any(name in names for name in NO_RUN):
        return False
    return any(name in names for name in MARKS) or (EVENTS in names and bool(_event_files(folder)))


def natural(path: Path) -> list[tuple[int, int, str]]:
    """A key to sort paths by, in which 9 comes before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]


def is_sweep(directory: Path) -> bool:
    """Whether a folder is the one of a sweep."""
    # os.path, for pathlib raises where a directory may not be entered.
    if any(os.path.isfile(directory / name) for name in (SETTINGS, JOBS)):
        return True
    # A run has a table of its own, beside its config.
    return os.path.isfile(directory / "table.csv") and not os.path.isfile(directory / "config.yaml")


def _event_files(directory: Path) -> list[Path]:
    """Return the event files of a run; none if there are none or they cannot be listed, which `read_run` reports."""
    try:
        return event_files(directory / EVENTS)
    except OSError:
        return []


def read_run(directory: Path, *, tags: Collection[str] = ()) -> RunRecord:
    """What a run directory holds.

    tags: whose curves are read beside those of the losses, the monitored tag and the validation metrics.
    """
    problems: list[str] = []
    config = read_part(directory, "config.yaml", _mapping, problems) or {}
    typed = read_part(directory, "overrides.yaml", _overrides, problems) or {}
    known = Values(config)
    monitor = known["monitor"] if isinstance(known["monitor"], str) else None
    mode = cast(Mode, known["mode"]) if known["mode"] in ("min", "max") else None
    over = known["sweep.repeat_over"]
    wanted = {"loss/train", "loss/val", *tags, *([] if monitor is None else [compared_tag(monitor)])}
    found = read_curves(directory / EVENTS, wants=lambda tag: tag in wanted or is_of_validation(tag))
    record = RunRecord(
        directory=directory,
        status=UNREADABLE,
        typed={key: mask_secrets(text) for key, text in typed.items()},
        config=config,
        monitor=monitor,
        mode=mode,
        repeat_over=over if isinstance(over, str) else None,
        curves=found.by_tag,
    )
    told = _reported(record, problems)
    return replace(told, problems=tuple(map(mask_secrets, [*problems, *found.problems])))


def is_of_validation(tag: str) -> bool:
    """Whether it is a loss or a metric of the validation, and no class's, term's or entry's part of one."""
    return tag.endswith("/val") and tag.count("/") == 1


def _reported(record: RunRecord, problems: list[str]) -> RunRecord:
    """The record with what report.json says; without one, with what the curves say so far."""
    directory = record.directory
    is_there = os.path.lexists(directory / "report.json")
    facts = read_part(directory, "report.json", _facts, problems) if is_there else None
    if facts is not None:
        return replace(record, **facts)
    status = UNREADABLE if is_there else RUNNING if _is_held(directory) else NO_REPORT
    if status == NO_REPORT:
        why = "the run has not begun, or was killed" if os.path.isdir(directory) else "the directory has gone"
        problems.append(f"report.json is not there: {why}")
    last = {tag: float(curve.values[-1]) for tag, curve in record.curves.items()}
    value, step = best_point(record.curves.get(compared_tag(record.monitor or "")), mode=record.mode)
    return replace(record, status=status, metrics=last, value=value, step=step)


def _is_held(directory: Path) -> bool:
    """Whether a process holds the run, or the sweep that it is a job of, which locks its whole directory."""
    return is_locked(directory / "config.yaml") or is_locked(directory.parent)


def best_point(curve: Curve | None, *, mode: Mode | None) -> tuple[float, int | None]:
    """The best finite value of a curve, and its first step; nan and None where there is none."""
    pick = max if mode == "max" else min
    pairs = [] if curve is None else list(zip(curve.values.tolist(), curve.steps.tolist(), strict=True))
    finite = [(value, step) for value, step in pairs if math.isfinite(value)]
    return pick(finite, key=lambda pair: pair[0]) if finite else (math.nan, None)


# --- the files ---


def read_part(directory: Path, name: str, read: Callable[[Path], Any], problems: list[str]) -> Any:
    """What a file of a run directory holds; None, and a line in `problems`, where it cannot be read.

    read: gives it, and raises one of DAMAGE.
    """
    path = directory / name
    try:
        return read(path)
    except FileNotFoundError:
        problems.append(f"{name} is not there")
    except OSError as error:
        problems.append(f"{name} cannot be read: {error.strerror or error}")
    except DAMAGE as error:
        what = error.errors[0].got if isinstance(error, ConfigError) else str(error) or type(error).__name__
        what = f"it has no {what}" if isinstance(error, KeyError) else what
        problems.append(f"{name} is not as exp wrote it: {shorten(what, most=200)}")
    return None


def _plain(path: Path) -> Any:
    path.open("rb").close()  # of a file that cannot be opened, read_yaml makes an error of a config
    return read_yaml(path)


def _mapping(path: Path) -> dict[str, Any]:
    found = _plain(path)
    if not isinstance(found, dict):
        raise ValueError("no mapping")
    return found


def _overrides(path: Path) -> dict[str, str]:
    found = _plain(path)
    if not isinstance(found, list) or not all(isinstance(text, str) for text in found):
        raise ValueError("no list of overrides")
    return dict(_typed(found))


def _typed(overrides: Sequence[str]) -> Iterator[tuple[str, str]]:
    for override in overrides:
        key, sign, value = override.lstrip("+").partition("=")
        key = key.partition("@")[0]
        if sign and not override.startswith("~") and key.partition(".")[0].partition("/")[0] not in BESIDE:
            yield key, _number_or_text(value)


def _number_or_text(value: str) -> str:
    """1e-4 and 0.0001 are one value."""
    try:
        return text_of(int(value) if value.lstrip("+-").isdecimal() else float(value))
    except ValueError:
        return value


def _facts(path: Path) -> dict[str, Any]:
    """The fields of a record that a report fills. Raises: one of DAMAGE."""
    report: Report = parsed_report(path.read_text(encoding="utf-8"))
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
