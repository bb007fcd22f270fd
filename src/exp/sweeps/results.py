"""The table of a sweep, with one row per job. The table is rewritten while jobs end, and printed after the last job.

Jobs that differ only in one key, such as the seed, are called repeats. If a sweep has repeats, a second table has one
row for each group of repeats. The row contains the mean, the standard deviation and the number of values. The best
group has the best mean.
"""

from __future__ import annotations

import csv
import io
import math
import os
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exp.files import write_atomic
from exp.output import markdown_table
from exp.run_report import train_command
from exp.shared_types import STAGES, Mode

if TYPE_CHECKING:
    from rich.table import Table

NOT_STARTED = "not started"
# If this key is swept and sweep.repeat_over is null, jobs that differ only in this key are repeats.
FOLD = "data.split.fold"
# Value of sweep.repeat_over that disables repeats.
NONE = "none"
# Text in the table for a swept key that a job does not set.
DEFAULT = "(default)"
# Statuses of jobs that ended without an error and are not run again.
FINISHED = ("completed", "pruned")


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one job of a sweep, or of one run that is compared with other runs.

    Attributes:
        job: Number of the job.
        swept: Values of the swept keys as text, by key.
        status: Status in the report of the job, or `NOT_STARTED`.
        monitor: Monitored tag. None if the job monitors no tag.
        mode: `min` if smaller values of the monitored tag are better, `max` if larger values are better.
        value: Best value of the monitored tag. nan if there is no value.
        step: Optimizer step at which the value was computed. None if there is no value.
        metrics: Values of all tags. Values of evaluation tags are those of the best checkpoint.
        seconds: Duration of the job in seconds. nan if it is unknown.
        peak_memory_mib: Peak memory in MiB. None if it was not measured.
        directory: Run directory, relative to the directory of the sweep.
        error: First line of the error that ended the job. Empty if the job has no error.
        is_job: Whether tables show the job number as the name of the row. If false, tables show the run directory.
    """

    job: int
    swept: Mapping[str, str]
    status: str
    monitor: str | None
    mode: Mode
    value: float = math.nan
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_mib: float | None = None
    directory: str = ""
    error: str = ""
    is_job: bool = True

    @property
    def has_value(self) -> bool:
        """Return whether the job was completed and its monitored value is finite, so that it can be compared."""
        return self.status == "completed" and math.isfinite(self.value)

    @property
    def name(self) -> str:
        return f"job {self.job}" if self.is_job else self.directory


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """A group of jobs that differ only in one key, the repeated key.

    Attributes:
        swept: Values of the other swept keys, which all jobs of the group share.
        rows: Rows of the jobs.
    """

    swept: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def values(self) -> list[float]:
        """Monitored values of the completed jobs."""
        return [row.value for row in self.rows if row.has_value]

    @property
    def mean(self) -> float:
        """Mean of the values. nan if no job has a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """Sample standard deviation of the values, with divisor n - 1. nan for fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the completed job with the best monitored value.

    Returns:
        The row. None if no job has a value, or if the jobs monitor different tags.
    """
    done = [row for row in rows if row.has_value]
    if not done or _watch_several(rows):
        return None
    return min(done, key=lambda row: _sign(rows) * row.value)


def _watch_several(rows: Sequence[Row]) -> bool:
    return len({(row.monitor, row.mode) for row in rows}) > 1


def _sign(rows: Sequence[Row]) -> int:
    """Return 1 if lower values are better, and -1 if higher values are better."""
    return -1 if rows[0].mode == "max" else 1


def repeats_of(rows: Sequence[Row], *, over: str) -> list[Repeats]:
    """Return groups of rows. Rows of a group differ only in the value of the repeated key.

    Args:
        rows: Rows of all jobs.
        over: The repeated key.
    """
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple((key, value) for key, value in row.swept.items() if key != over), []).append(row)
    return [Repeats(swept=dict(shared), rows=members) for shared, members in groups.items()]


def best_repeats(rows: Sequence[Row], *, over: str) -> Repeats | None:
    """Return the group of repeats with the best mean.

    Only groups with the largest number of completed jobs are compared. Otherwise, a group in which only one of three
    jobs was completed could win by chance.

    Args:
        rows: Rows of all jobs.
        over: The repeated key.

    Returns:
        The group. None if no job has a value, or if the jobs monitor different tags.
    """
    groups = repeats_of(rows, over=over)
    most = max((len(group.values) for group in groups), default=0)
    if not most or _watch_several(rows):
        return None
    return min((one for one in groups if len(one.values) == most), key=lambda group: _sign(rows) * group.mean)


def best_of(rows: Sequence[Row], *, repeat_over: str | None = None) -> Row | None:
    """Return the best job.

    Args:
        rows: Rows of all jobs.
        repeat_over: The repeated key. If given, only jobs of the best group of repeats are compared.
    """
    group = None if repeat_over is None else best_repeats(rows, over=repeat_over)
    return best_row(rows) if repeat_over is None else None if group is None else best_row(group.rows)


def again_command(directory: Path, row: Row | None) -> str:
    """Return the command that starts a new run from the config of a job.

    Args:
        directory: Directory of the sweep.
        row: Row of the job. If None, the command is an empty string.
    """
    return "" if row is None else train_command([], key="from_run", path=str(directory / row.directory))


def write_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Write table.csv with all values, and table.md with losses and metrics. Each file is replaced atomically.

    Args:
        directory: Directory of the sweep.
        rows: Rows of all jobs.
        repeat_over: The repeated key. If given, table.md has a second table with one row for each group of repeats.
    """
    header, cells = table_cells(rows)
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *cells])
    write_atomic(directory / "table.csv", text.getvalue())
    write_atomic(directory / "table.md", _markdown(rows, directory, repeat_over))


def print_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Print the table, the best job, and commands that show further results.

    Args:
        directory: Directory of the sweep.
        rows: Rows of all jobs.
        repeat_over: The repeated key, or None without repeats.
    """
    from rich.console import Console

    console = Console(highlight=False)
    for table in rich_tables(rows, repeat_over=repeat_over):
        console.print(table)
    lines = [f"job {row.job} {row.status}: {row.error}" for row in rows if row.error]
    shown = os.path.relpath(directory)
    if best := best_line(rows, repeat_over=repeat_over):
        lines.append(f"best       {best}")
        lines.append(f"again      {again_command(directory, best_of(rows, repeat_over=repeat_over))}")
    lines.append(f"results    {shown}")
    lines.append(f"compare    python -m exp.report {shown}")
    lines.append(f"dashboard  python -m exp.dashboard {shown}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def best_line(rows: Sequence[Row], *, repeat_over: str | None = None) -> str:
    """Return a line that describes the best job or the best group of repeats. Return "" if no job has a value."""
    shown = differing_keys(rows)
    if repeat_over is None:
        best = best_row(rows)
        if best is None:
            return ""
        return f"{best.name}, {best.monitor} {best.value:.6g}  {_show_swept(best.swept, shown)}".rstrip()
    group = best_repeats(rows, over=repeat_over)
    if group is None:
        return ""
    called = ", ".join(row.name for row in group.rows if row.has_value)
    deviation = f" ± {group.deviation:.2g}" if math.isfinite(group.deviation) else ""
    mean = f"{rows[0].monitor} {group.mean:.6g}{deviation}, the mean of {len(group.values)} over {repeat_over}"
    return f"{called}: {mean}  {_show_swept(group.swept, shown)}".rstrip()


def _show_swept(swept: Mapping[str, str], shown: Sequence[str]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items() if key in shown and value != DEFAULT)


def _count_rows(rows: Sequence[Row]) -> str:
    return f"{len(rows)} {_kind(rows)}{'s' if len(rows) != 1 else ''}"


def _kind(rows: Sequence[Row]) -> str:
    return "job" if all(row.is_job for row in rows) else "run"


def rich_tables(rows: Sequence[Row], *, repeat_over: str | None = None) -> list[Table]:
    """Return the table of jobs for the screen. If there are repeats, also return the table of repeats.

    The best row is bold. Jobs are sorted by number. Other runs are sorted by value, the best first.

    Args:
        rows: Rows of jobs, or of other runs.
        repeat_over: The repeated key, or None without repeats.
    """
    if _kind(rows) == "run" and not _watch_several(rows):
        sign = _sign(rows)
        rows = sorted(rows, key=lambda row: sign * row.value if row.has_value else math.inf)
    keys, monitors, best = differing_keys(rows), monitors_of(rows), best_row(rows)
    tables = [_table(_count_rows(rows), [_kind(rows), "status", *_best_columns(monitors), "seconds"])]
    for row in rows:
        cells = [row.name.removeprefix("job "), row.status, *_best_cells(row, monitors), _seconds(row)]
        _add_line(tables[0], [*cells, _show_swept(row.swept, keys)], is_best=row is best)
    if repeat_over is not None:
        top = best_repeats(rows, over=repeat_over)
        tables.append(_table(f"over {repeat_over}", _repeat_columns(rows)))
        for group in repeats_of(rows, over=repeat_over):
            line = [*_repeat_figures(group), _show_swept(group.swept, keys)]
            _add_line(tables[1], line, is_best=top is not None and group.rows == top.rows)
    return tables


def _table(title: str, header: Sequence[str]) -> Table:
    """Return a table without rows. The last column contains the swept values."""
    from rich.table import Table

    table = Table(title=title, title_justify="left")
    for name in header:
        table.add_column(name, no_wrap=True)
    table.add_column("values")
    return table


def _add_line(table: Table, cells: Sequence[str], *, is_best: bool) -> None:
    from rich.text import Text

    style = "bold" if is_best else ""
    table.add_row(*(Text(" ".join(cell.split()), style, no_wrap=True, overflow="ellipsis") for cell in cells))


def differing_keys(rows: Sequence[Row]) -> list[str]:
    """Return the swept keys that have different values in the rows. For a single row, return all swept keys."""
    keys = dict.fromkeys(key for row in rows for key in row.swept)
    return [key for key in keys if len(rows) == 1 or len({row.swept.get(key) for row in rows}) > 1]


def monitors_of(rows: Sequence[Row]) -> list[str]:
    """Return the monitored tags of the rows without duplicates."""
    return list(dict.fromkeys(row.monitor for row in rows if row.monitor is not None))


def _repeat_columns(rows: Sequence[Row]) -> list[str]:
    return [f"mean {' '.join(monitors_of(rows))}".rstrip(), "deviation", "n"]


def _repeat_figures(group: Repeats) -> list[str]:
    numbers = [_number(value) if math.isfinite(value) else "" for value in (group.mean, group.deviation)]
    return [*numbers, str(len(group.values))]


def repeat_cells(rows: Sequence[Row], *, over: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of repeats.

    Each row has the swept values of a group, and the mean, deviation and number of its monitored values.
    """
    keys = [key for key in differing_keys(rows) if key != over]
    groups = repeats_of(rows, over=over)
    cells = [[*(group.swept.get(key, "") for key in keys), *_repeat_figures(group)] for group in groups]
    return [*keys, *_repeat_columns(rows)], cells


def table_cells(rows: Sequence[Row], *, results: bool = False) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of jobs or other runs.

    Args:
        rows: Rows of the table.
        results: Whether only losses and metrics are columns. If false, all logged tags are columns. Default: False.
    """
    swept, monitors = differing_keys(rows), monitors_of(rows)
    metrics = sorted({tag for row in rows for tag in row.metrics})
    if results:
        # Keep only <metric>/<stage> and loss/<stage>/<term>, because hooks log dozens of tags per layer.
        metrics = [tag for tag in metrics if tag.split("/")[1:2] and tag.split("/")[1] in STAGES]
        metrics = [tag for tag in metrics if tag.count("/") == 1 or tag.startswith("loss/")]
    facts = ["step", *metrics, "seconds", "peak_mib", "directory", "error"]
    cells = []
    for row in rows:
        line = [str(row.job) if row.is_job else row.directory, row.status, *(row.swept.get(key, "") for key in swept)]
        line += _best_cells(row, monitors)
        line.append("" if row.step is None or not math.isfinite(row.value) else str(row.step))
        line += [_number(row.metrics[tag]) if tag in row.metrics else "" for tag in metrics]
        line += [_seconds(row), "" if row.peak_memory_mib is None else f"{row.peak_memory_mib:.0f}"]
        cells.append([*line, row.directory, row.error])
    return [_kind(rows), "status", *swept, *_best_columns(monitors), *facts], cells


def _best_columns(monitors: Sequence[str]) -> list[str]:
    return [f"best {name}" for name in monitors]


def _best_cells(row: Row, monitors: Sequence[str]) -> list[str]:
    """Return a cell for each monitored tag. Only the cell of the tag that the job monitors has a value."""
    return [_number(row.value) if row.monitor == name and math.isfinite(row.value) else "" for name in monitors]


def _seconds(row: Row) -> str:
    return "" if row.status == NOT_STARTED or not math.isfinite(row.seconds) else f"{row.seconds:.1f}"


def _markdown(rows: Sequence[Row], directory: Path, repeat_over: str | None) -> str:
    lines = [f"# {_count_rows(rows)}", ""]
    if best := best_line(rows, repeat_over=repeat_over):
        command = again_command(directory, best_of(rows, repeat_over=repeat_over))
        lines += [f"Best: {best}", "", "Run it again, with changes at the end:", "", f"    {command}", ""]
    header, cells = table_cells(rows, results=True)
    lines += markdown_table(header, cells, left=len(header))
    if repeat_over is not None:
        header, cells = repeat_cells(rows, over=repeat_over)
        lines += ["", f"## Over {repeat_over}", "", *markdown_table(header, cells, left=len(header))]
    return "\n".join(lines) + "\n"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
