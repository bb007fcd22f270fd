"""What came of a run: report.json for programs, report.md for people, and the table at the end on the screen."""

from __future__ import annotations

import dataclasses
import json
import math
import os
import re
import shlex
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from exp.config.freeze import versions
from exp.errors import RunError
from exp.files import write_whole

Status = Literal["completed", "failed", "interrupted"]


@dataclass(frozen=True, kw_only=True)
class Report:
    """One run's result. The fields are the keys of report.json, a public contract.

    metrics: tag to last value, such as {"accuracy/val": 0.98}.
    best: {metric, value, step, checkpoint} of the best checkpoint; None where none was written.
    steps: optimizer steps of the whole run, those before a resume included.
    step_ms: wall time of training over optimizer steps, validation included; None where no step was taken.
    peak_memory_mib: of device memory on a GPU, else of this rank's resident set.
    tags: the config's, by which runs are found again.
    error: None, or {type, message}.
    """

    status: Status
    directory: str
    metrics: Mapping[str, float] = field(default_factory=dict)
    best: Mapping[str, Any] | None = None
    steps: int = 0
    epochs: int = 0
    wall_seconds: float = 0.0
    step_ms: float | None = None
    peak_memory_mib: float | None = None
    world_size: int = 1
    precision: str = "fp32"
    strategy: str = "auto"
    monitor: str = "loss/val"
    command: str = ""
    tags: Sequence[str] = ()
    versions: Mapping[str, str] = field(default_factory=dict)
    error: Mapping[str, str] | None = None

    @property
    def monitored(self) -> float:
        """The value that goes back to a sweeper: the best of the monitored metric, nan where there is none."""
        if self.best is not None:
            return float(self.best["value"])
        return float(self.metrics[self.monitor]) if self.monitor in self.metrics else math.nan


class Ongoing:
    """A run under way: knows how it started, and makes the report of its end.

    directory: the run directory. config: the frozen config; only the words that the report repeats are read.
    """

    def __init__(self, directory: Path, config: Any, *, overrides: Sequence[str], world_size: int) -> None:
        self._started = time.monotonic()
        _forget_peak_memory()
        self.directory = directory
        self._overrides = list(overrides)
        self._facts = {
            "directory": str(directory),
            "precision": config.precision.word,
            "strategy": config.strategy.name,
            "monitor": config.monitor,
            "world_size": world_size,
            "command": _command(overrides),
            "tags": tuple(config.tags),
            "versions": versions(),
        }

    def ended(
        self,
        status: Status,
        *,
        parts: Any | None = None,
        error: BaseException | None = None,
        before: Report | None = None,
    ) -> Report:
        """The report of an end.

        parts: what build.py made; None where the run ended before, or in other processes.
        before: what rank 0 had to report of the same run, if it could: its figures hold, its reason may not.
        """
        told = None if error is None else {"type": type(error).__name__, "message": str(error)}
        if before is not None:
            return dataclasses.replace(before, status=status, error=told)
        return Report(
            status=status,
            wall_seconds=time.monotonic() - self._started,
            error=told,
            **self._facts,
            **({} if parts is None else _progress(parts)),
        )

    def resume_command(self, checkpoint: str) -> str:
        """What goes on with this run from a checkpoint: its own command, with `resume`."""
        others = [text for text in self._overrides if text.lstrip("+").partition("=")[0] != "resume"]
        path = os.path.relpath(checkpoint)
        path = checkpoint if path.startswith("..") else path
        # Hydra reads other signs as its own grammar; inside quotes a quote is escaped.
        plain = re.fullmatch(r"[\w./+@%:-]+", path, re.ASCII)
        escaped = path.replace("'", "\\'")
        return _command([*others, f"resume={path}" if plain else f"resume='{escaped}'"])


def _command(overrides: Sequence[str]) -> str:
    return shlex.join(["python", "-m", "exp.train", *overrides])


def _progress(parts: Any) -> dict[str, Any]:
    """How far a run came, read from the callbacks that kept count."""
    trainer, best = parts.trainer, parts.checkpointing.best
    steps = trainer.global_step
    return {
        "metrics": dict(parts.recording.latest),
        "best": best,
        "steps": steps,
        "epochs": trainer.current_epoch,
        "step_ms": 1000.0 * parts.stopping.seconds / steps if steps else None,
        "peak_memory_mib": _peak_memory_mib(),
    }


def _peak_memory_mib() -> float:
    # Here, because who only reads reports needs no torch.
    from exp.hooks.allocations.peaks import peak_of_run

    return peak_of_run().so_far() / 2**20


def _forget_peak_memory() -> None:
    """A job of a sweep reports its own peak, not that of a job before it in the same process."""
    from exp.hooks.allocations.peaks import HOST, peak_of_run

    HOST.forget()
    peak_of_run().forget()


def write_report(report: Report) -> None:
    """Writes report.json and report.md into the run directory, each whole or not at all.

    Raises: RunError where the directory cannot be written.
    """
    directory = Path(report.directory)
    plain = dataclasses.asdict(report)
    try:
        write_whole(directory / "report.json", json.dumps(_finite(plain), indent=2, sort_keys=True) + "\n")
        write_whole(directory / "report.md", as_markdown(report))
    except OSError as error:
        raise RunError(f"the report cannot be written to {directory}: {error.strerror or error}") from error


def read_report(directory: Path | str) -> Report:
    """The report of a run directory.

    Raises: RunError where it holds none.
    """
    path = Path(directory) / "report.json"
    if not path.is_file():
        raise RunError(f"{path} is not there: the run has not ended, or was killed before it could write its report")
    plain = json.loads(path.read_text(encoding="utf-8"))
    plain["metrics"] = {tag: float(value) for tag, value in plain["metrics"].items()}
    plain["tags"] = tuple(plain["tags"])
    return Report(**plain)


def find_report(directory: Path | str) -> Report | None:
    """The report of a run directory; None where there is none yet."""
    return read_report(directory) if (Path(directory) / "report.json").is_file() else None


def as_markdown(report: Report) -> str:
    """The report as a page: a heading, the facts, the metrics."""
    facts = [(name, value) for name, value in _facts(report) if value]
    lines = [f"# {report.status}: {Path(report.directory).name}", "", *(f"- {name}: {value}" for name, value in facts)]
    if report.error:
        lines += ["", f"**{report.error['type']}**", "", "```", report.error["message"], "```"]
    if report.metrics:
        lines += ["", "| metric | last value |", "|---|---|"]
        lines += [f"| {tag} | {value:.6g} |" for tag, value in sorted(report.metrics.items())]
    return "\n".join(lines) + "\n"


def print_report(report: Report) -> None:
    """Prints the table of results and how to look further."""
    from rich.console import Console
    from rich.table import Table

    console = Console(highlight=False)
    table = Table(title=f"{report.status} in {report.wall_seconds:.1f} s", title_justify="left")
    table.add_column("metric")
    for stage in ("train", "val", "test"):
        table.add_column(stage, justify="right")
    rows: dict[str, dict[str, float]] = {}
    for tag, value in report.metrics.items():
        name, _, stage = tag.rpartition("/")
        if stage in ("train", "val", "test"):
            rows.setdefault(name, {})[stage] = value
    for name, values in sorted(rows.items()):
        table.add_row(name, *(f"{values[stage]:.4f}" if stage in values else "" for stage in ("train", "val", "test")))
    console.print(table)
    width = max(len(name) for name, _ in _facts(report))
    for name, value in _facts(report):
        if value:
            # soft_wrap: a path that is broken over two lines cannot be copied.
            console.print(f"{name:<{width}}  {value}", soft_wrap=True, markup=False)


def _facts(report: Report) -> list[tuple[str, str]]:
    directory = Path(report.directory)
    best = ""
    if report.best is not None:
        best = f"{report.best['metric']} {report.best['value']:.4f} at step {report.best['step']}"
    speed = "" if report.step_ms is None else f", {report.step_ms:.2f} ms a step"
    ranks = f", {report.world_size} ranks" if report.world_size > 1 else ""
    memory = "" if report.peak_memory_mib is None else f", {report.peak_memory_mib:.0f} MiB at the peak"
    shown = os.path.relpath(directory)
    return [
        ("best", best),
        ("steps", f"{report.steps} in {report.epochs} epochs{speed}{memory}"),
        ("tags", ", ".join(report.tags)),
        ("placed", f"precision {report.precision}, strategy {report.strategy}{ranks}"),
        ("results", shown),
        ("dashboard", f"python -m exp.dashboard {_dashboard_root(shown)}"),
    ]


def _dashboard_root(shown: str) -> str:
    """`outputs` for a run below it, so that earlier runs are there to compare with; else the run's own directory."""
    first = Path(shown).parts[0]
    return shown if first in ("..", "/", ".") else first


def _finite(value: Any) -> Any:
    """JSON has no NaN or infinity: they become their names, so that any reader can parse the file."""
    if isinstance(value, Mapping):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value
