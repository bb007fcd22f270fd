"""The table of a sweep: one row a job, rewritten whole after each, and printed at the end with the best job."""

from __future__ import annotations

import csv
import io
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from exp.files import write_whole
from exp.types import STAGES, Mode

NOT_STARTED = "not started"


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one job.

    swept: key to value as text, of what differs from job to job. status: the report's, or that it was not started.
    value: the monitored one, nan where there is none.
    directory: relative to the sweep's.
    """

    job: int
    swept: Mapping[str, str]
    status: str
    monitor: str | None
    mode: Mode
    value: float
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    directory: str = ""
    error: str = ""


def best_row(rows: Sequence[Row]) -> Row | None:
    """The completed job with the best monitored value; None where there is none, or where jobs watch different tags."""
    done = [row for row in rows if row.status == "completed" and math.isfinite(row.value)]
    if not done or len({(row.monitor, row.mode) for row in rows}) > 1:
        return None
    pick = min if done[0].mode == "min" else max
    return pick(done, key=lambda row: row.value)


def write_table(directory: Path, rows: Sequence[Row]) -> None:
    """Writes table.csv with every value that a job had last, and table.md with losses and metrics, for readers.

    Each whole or not at all.
    """
    header, cells = _cells(rows)
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(cells)
    write_whole(directory / "table.csv", text.getvalue())
    write_whole(directory / "table.md", _markdown(rows))


def print_table(directory: Path, rows: Sequence[Row]) -> None:
    """Prints the table, the best job, and how to look further."""
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    console = Console(highlight=False)
    best = best_row(rows)
    header, cells = _cells(rows, brief=True)
    table = Table(title=f"{len(rows)} job{'s' if len(rows) != 1 else ''}", title_justify="left")
    for name in header:
        table.add_column(name, overflow="fold")
    for row, values in zip(rows, cells, strict=True):
        table.add_row(*map(escape, values), style="bold" if row is best else None)
    console.print(table)
    unstarted = [str(row.job) for row in rows if row.status == NOT_STARTED]
    if unstarted:
        jobs = "job" if len(unstarted) == 1 else "jobs"
        console.print(f"not started: {jobs} {', '.join(unstarted)}", markup=False, soft_wrap=True)
    for row in rows:
        if row.error:
            console.print(f"job {row.job} {row.status}: {row.error}", markup=False, soft_wrap=True)
    shown = os.path.relpath(directory)
    if best is not None:
        swept = " ".join(f"{key}={value}" for key, value in best.swept.items())
        console.print(
            f"best       job {best.job}, {best.monitor} {best.value:.6g}  {swept}".rstrip(),
            markup=False,
            soft_wrap=True,
        )
    console.print(f"results    {shown}", markup=False, soft_wrap=True)
    console.print(f"dashboard  python -m exp.dashboard {shown}", markup=False, soft_wrap=True)


def _cells(rows: Sequence[Row], *, results: bool = False, brief: bool = False) -> tuple[list[str], list[list[str]]]:
    """results: losses and metrics alone. brief: those of validation, for a screen."""
    swept = list(dict.fromkeys(key for row in rows for key in row.swept))
    monitors = list(dict.fromkeys(row.monitor for row in rows if row.monitor is not None))
    metrics = sorted({tag for row in rows for tag in row.metrics})
    if results:
        # <metric>/<stage>, loss/<stage>/<term>: hooks log dozens of tags a parameter or a layer, a metric one a class.
        metrics = [tag for tag in metrics if tag.split("/")[1:2] and tag.split("/")[1] in STAGES]
        metrics = [tag for tag in metrics if tag.count("/") == 1 or tag.startswith("loss/")]
    if brief:
        metrics = [tag for tag in metrics if tag.endswith("/val") and tag not in monitors]
    header = ["job", "status", *swept, *(f"best {name}" for name in monitors), *metrics, "seconds"]
    cells = []
    for row in rows:
        line = [str(row.job), row.status, *(row.swept.get(key, "") for key in swept)]
        # A job that was not completed has no best.
        line += [_number(row.value) if row.monitor == name and math.isfinite(row.value) else "" for name in monitors]
        line += [_number(row.metrics[tag]) if tag in row.metrics else "" for tag in metrics]
        line.append("" if row.status == NOT_STARTED else f"{row.seconds:.1f}")
        cells.append(line if brief else [*line, row.directory, row.error])
    return header if brief else [*header, "directory", "error"], cells


def _markdown(rows: Sequence[Row]) -> str:
    header, cells = _cells(rows, results=True)
    best = best_row(rows)
    lines = [f"# {len(rows)} job{'s' if len(rows) != 1 else ''}", ""]
    if best is not None:
        lines += [f"Best: job {best.job}, {best.monitor} {best.value:.6g}", ""]
    lines += [_line(header), "|---" * len(header) + "|"]
    lines += [_line(values) for values in cells]
    return "\n".join(lines) + "\n"


def _line(values: Sequence[str]) -> str:
    escaped = (" ".join(value.replace("|", "\\|").split()) for value in values)
    return "| " + " | ".join(escaped) + " |"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
