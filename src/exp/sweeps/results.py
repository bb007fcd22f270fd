"""The table of a sweep: one row per job, rewritten after each job, and printed at the end with the best job.

If jobs are repeats over a key such as the seed, a second table has one row per group of repeats, with mean, deviation
and number. The best group is the group with the best mean.
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
from exp.spelling import among

if TYPE_CHECKING:
    from rich.table import Table

NOT_STARTED = "not started"
# Jobs of several folds are repeats, if sweep.repeat_over names no other key.
FOLD = "data.split.fold"
# The word for no repeats.
NONE = "none"
# The value of a key that no override and no config has.
DEFAULT = "(default)"
# The statuses of jobs that ended as they should and are not run again.
FINISHED = ("completed", "pruned")
# Characters of a swept number, and of any other swept value, on the screen.
LONGEST_NUMBER, LONGEST = 10, 28


@dataclass(frozen=True, kw_only=True)
class Row:
    """The result of one job, or of one run that is compared with other runs.

    Attributes:
        swept: Values of the swept keys as text.
        status: Status of the report, or `NOT_STARTED`.
        value: Monitored value. nan without one.
        step: Optimizer step of the value.
        seconds: Time from start to end. nan if it is unknown.
        peak_memory_mib: None if it was not measured.
        directory: Run directory, relative to the directory of the sweep.
        is_job: Whether tables name the row by its number. Other runs are named by their directories.
    """

    job: int
    swept: Mapping[str, str]
    status: str
    monitor: str | None
    mode: Mode
    value: float
    step: int | None = None
    metrics: Mapping[str, float] = field(default_factory=dict)
    seconds: float = 0.0
    peak_memory_mib: float | None = None
    directory: str = ""
    error: str = ""
    is_job: bool = True

    @property
    def has_value(self) -> bool:
        """Return whether the value is compared with the values of other rows."""
        return self.status == "completed" and math.isfinite(self.value)

    @property
    def name(self) -> str:
        return f"job {self.job}" if self.is_job else self.directory


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Jobs that differ in the repeated key alone. swept: The values that they share."""

    swept: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def values(self) -> list[float]:
        """The values of the completed jobs."""
        return [row.value for row in self.rows if row.has_value]

    @property
    def mean(self) -> float:
        """The mean of the values. nan if no job has a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation of the sample, over n - 1. nan for fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan


def best_row(rows: Sequence[Row]) -> Row | None:
    """Return the completed job with the best value. Return None without one, or if jobs watch different tags."""
    done = [row for row in rows if row.has_value]
    if not done or _watch_several(rows):
        return None
    return min(done, key=lambda row: _sign(rows) * row.value)


def _watch_several(rows: Sequence[Row]) -> bool:
    return len({(row.monitor, row.mode) for row in rows}) > 1


def _sign(rows: Sequence[Row]) -> int:
    """Return the factor of a value with which the best row is the smallest."""
    return -1 if rows[0].mode == "max" else 1


def repeats_of(rows: Sequence[Row], *, over: str) -> list[Repeats]:
    """Return the rows grouped by the values of all keys except the repeated key `over`."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple((key, value) for key, value in row.swept.items() if key != over), []).append(row)
    return [Repeats(swept=dict(shared), rows=members) for shared, members in groups.items()]


def best_repeats(rows: Sequence[Row], *, over: str) -> Repeats | None:
    """Return the repeats with the best mean among those of which most completed: one lucky seed of three does not win.

    Return None if no job has a value, or if jobs watch different tags.
    """
    groups = repeats_of(rows, over=over)
    most = max((len(group.values) for group in groups), default=0)
    if not most or _watch_several(rows):
        return None
    return min((one for one in groups if len(one.values) == most), key=lambda group: _sign(rows) * group.mean)


def best_of(rows: Sequence[Row], *, repeat_over: str | None = None) -> Row | None:
    """Return the best job. With repeats, return the best job of the repeats with the best mean."""
    group = None if repeat_over is None else best_repeats(rows, over=repeat_over)
    return best_row(rows) if repeat_over is None else None if group is None else best_row(group.rows)


def again_command(directory: Path, row: Row | None) -> str:
    """Return the command that starts from the config of a job below a directory. Return "" for None."""
    return "" if row is None else train_command([], key="from_run", path=str(directory / row.directory))


def write_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Write table.csv with all values, and table.md with losses and metrics, each whole or not at all.

    repeat_over: The key whose jobs are repeats. Their mean, deviation and number are columns of table.csv and a table
        of table.md.
    """
    header, cells = table_cells(rows)
    if repeat_over is not None:
        header = [*header, *_repeat_columns(rows)]
        groups = repeats_of(rows, over=repeat_over)
        figures = {row.job: _repeat_figures(group) for group in groups for row in group.rows}
        cells = [[*line, *figures[row.job]] for row, line in zip(rows, cells, strict=True)]
    text = io.StringIO()
    csv.writer(text, lineterminator="\n").writerows([header, *cells])
    write_atomic(directory / "table.csv", text.getvalue())
    write_atomic(directory / "table.md", _markdown(rows, directory, repeat_over))


def print_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Print the table, the best job, and commands that show more. repeat_over: As of `write_table`."""
    from rich.console import Console

    console = Console(highlight=False)
    for table in rich_tables(rows, repeat_over=repeat_over, width=console.width):
        console.print(table)
    lines = []
    if unstarted := [str(row.job) for row in rows if row.status == NOT_STARTED]:
        lines.append(f"not started: job{'' if len(unstarted) == 1 else 's'} {', '.join(unstarted)}")
    lines += [f"job {row.job} {row.status}: {row.error}" for row in rows if row.error]
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
    """Return the best job, or the best group of repeats, in one line. Return "" if no row has a value."""
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


def rich_tables(rows: Sequence[Row], *, width: int, repeat_over: str | None = None) -> list[Table]:
    """Return the table of jobs and, if there are repeats, the table of repeats, with the best in bold.

    Jobs are sorted by number. Other runs are sorted by value, the best first.

    Args:
        rows: Rows of jobs, or of other runs.
        width: Columns of the screen.
        repeat_over: As of `write_table`.
    """
    if _kind(rows) == "run" and not _watch_several(rows):
        sign = _sign(rows)
        rows = sorted(rows, key=lambda row: sign * row.value if row.has_value else math.inf)
    best = best_row(rows)
    header, cells = table_cells(rows, brief=True)
    tables = [_rich(_count_rows(rows), header, cells, bold=[row is best for row in rows], width=width)]
    if repeat_over is not None:
        top = best_repeats(rows, over=repeat_over)
        bold = [top is not None and group.rows == top.rows for group in repeats_of(rows, over=repeat_over)]
        header, cells = repeat_cells(rows, over=repeat_over)
        tables.append(_rich(f"over {repeat_over}", header, cells, bold=bold, width=width))
    return tables


def _rich(
    title: str, header: Sequence[str], cells: Sequence[Sequence[str]], *, bold: Sequence[bool], width: int
) -> Table:
    """Return a table with one line for each row. Its title names the columns that have no room."""
    from rich.markup import escape
    from rich.table import Table

    texts = [[" ".join(cell.split()) for cell in line] for line in cells]
    needed = {
        name: 3 + max(map(len, [name, *column])) for name, column in zip(header, zip(*texts, strict=True), strict=True)
    }
    kept: list[str] = []
    for name in sorted(header, key=lambda name: not name.startswith((header[0], "status", "best ", "mean "))):
        if 1 + sum(needed[one] for one in (*kept, name)) <= width or name == header[0]:
            kept.append(name)
    if left_out := [name for name in header if name not in kept]:
        title = f"{title}; columns left out: {among(left_out)}"
    table = Table(title=title, title_justify="left")
    places = [place for place, name in enumerate(header) if name in kept]
    for place in places:
        table.add_column(header[place], no_wrap=True, overflow="ellipsis")
    for line, is_best in zip(texts, bold, strict=True):
        table.add_row(*(escape(line[place]) for place in places), style="bold" if is_best else None)
    return table


def differing_keys(rows: Sequence[Row]) -> list[str]:
    """Return the swept keys whose values differ; all swept keys of a single row."""
    keys = dict.fromkeys(key for row in rows for key in row.swept)
    return [key for key in keys if len(rows) == 1 or len({row.swept.get(key) for row in rows}) > 1]


def monitors_of(rows: Sequence[Row]) -> list[str]:
    """Return the monitored tags, each once."""
    return list(dict.fromkeys(row.monitor for row in rows if row.monitor is not None))


def _repeat_columns(rows: Sequence[Row]) -> list[str]:
    return [f"mean {' '.join(monitors_of(rows))}".rstrip(), "deviation", "n"]


def _repeat_figures(group: Repeats) -> list[str]:
    numbers = [_number(value) if math.isfinite(value) else "" for value in (group.mean, group.deviation)]
    return [*numbers, str(len(group.values))]


def repeat_cells(rows: Sequence[Row], *, over: str) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of repeats: their values, mean, deviation and number."""
    keys = [key for key in differing_keys(rows) if key != over]
    groups = repeats_of(rows, over=over)
    cells = [[*(group.swept.get(key, "") for key in keys), *_repeat_figures(group)] for group in groups]
    return [*keys, *_repeat_columns(rows)], cells


def table_cells(
    rows: Sequence[Row], *, results: bool = False, brief: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of jobs, or of other runs.

    Args:
        rows: Rows of the table.
        results: Whether to leave out all tags except losses and metrics.
        brief: Whether to leave out all tags except those of validation, and empty columns.
    """
    swept, monitors = differing_keys(rows), monitors_of(rows)
    metrics = sorted({tag for row in rows for tag in row.metrics})
    if results:
        # <metric>/<stage> and loss/<stage>/<term>. Hooks log dozens of tags per layer, a metric one per class.
        metrics = [tag for tag in metrics if tag.split("/")[1:2] and tag.split("/")[1] in STAGES]
        metrics = [tag for tag in metrics if tag.count("/") == 1 or tag.startswith("loss/")]
    if brief:
        metrics = [tag for tag in metrics if tag.endswith("/val") and tag not in monitors]
    best = [f"best {name}" for name in monitors]
    header = [_kind(rows), "status", *swept, *best, "step", *metrics, "seconds", "peak_mib"]
    cells = []
    for row in rows:
        is_finite = math.isfinite(row.value)
        values = (row.swept.get(key, "") for key in swept)
        line = [str(row.job) if row.is_job else row.directory, row.status]
        line += map(_shorten, values) if brief else values
        # A job that was not completed has no best.
        line += [_number(row.value) if row.monitor == name and is_finite else "" for name in monitors]
        line.append("" if row.step is None or not is_finite else str(row.step))
        line += [_number(row.metrics[tag]) if tag in row.metrics else "" for tag in metrics]
        line.append("" if row.status == NOT_STARTED or not math.isfinite(row.seconds) else f"{row.seconds:.1f}")
        line.append("" if row.peak_memory_mib is None else f"{row.peak_memory_mib:.0f}")
        cells.append(line if brief else [*line, row.directory, row.error])
    if not brief:
        return [*header, "directory", "error"], cells
    filled = [place for place, name in enumerate(header) if name in swept or any(line[place] for line in cells)]
    return [header[place] for place in filled], [[line[place] for place in filled] for line in cells]


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


def _shorten(text: str) -> str:
    """Return a swept value for the screen: a number with six digits, other text cut. table.csv has the whole text."""
    try:
        return text if len(text) <= LONGEST_NUMBER else _number(float(text))
    except ValueError:
        return text if len(text) <= LONGEST else f"{text[: LONGEST - 1]}…"


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
