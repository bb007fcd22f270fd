"""The table of a sweep: one row per job, rewritten after each job, and printed at the end with the best job.

If jobs are repeats over a key such as the seed, a second table has one row per group of repeats, with mean, deviation
and number. The best group is the group with the best mean.
"""

from __future__ import annotations

import csv
import io
import math
import os
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

from exp.files import write_whole
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
# The value of a key that nobody typed, where no config says it.
DEFAULT = "(default)"
# Characters of a swept number on the screen.
LONGEST = 10
# Letters of a cell on the screen, behind the first one.
MOST_LETTERS = 28
# Of named runs: columns on the screen, and the share of runs in which a column has another value than in most.
MOST_COLUMNS, LEAST_VARIETY = 6, 0.1
# Columns that a narrow screen goes without first.
LEAST = ("peak_mib", "seconds", "step")
# Who ended as they should, need not be run again, and have a value.
FINISHED = ("completed", "pruned")


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
        """Whether the value is compared with the values of other rows."""
        return self.status == "completed" and math.isfinite(self.value)

    @property
    def name(self) -> str:
        return f"job {self.job}" if self.is_job else self.directory


@dataclass(frozen=True, kw_only=True)
class Repeats:
    """Jobs that differ in the repeated key alone. swept: what they share."""

    swept: Mapping[str, str]
    rows: Sequence[Row]

    @property
    def values(self) -> list[float]:
        """Of the completed jobs."""
        return [row.value for row in self.rows if row.has_value]

    @property
    def mean(self) -> float:
        """nan where no job has a value."""
        return statistics.fmean(self.values) if self.values else math.nan

    @property
    def deviation(self) -> float:
        """The standard deviation of the sample, over n - 1; nan of fewer than two values."""
        return statistics.stdev(self.values) if len(self.values) > 1 else math.nan

    @property
    def monitor(self) -> str | None:
        """The tag of the values; None where no job has one."""
        return next(iter(monitors_of(self.rows)), None)


def best_row(rows: Sequence[Row]) -> Row | None:
    """The completed job with the best monitored value; None where there is none, or where jobs watch different tags."""
    done = [row for row in rows if row.has_value]
    if not done or len({(row.monitor, row.mode) for row in rows}) > 1:
        return None
    pick = min if done[0].mode == "min" else max
    return pick(done, key=lambda row: row.value)


def repeats_of(rows: Sequence[Row], *, over: str) -> list[Repeats]:
    """The rows by what they share, in the order in which that comes first. over: the repeated key."""
    groups: dict[tuple[tuple[str, str], ...], list[Row]] = {}
    for row in rows:
        groups.setdefault(tuple((key, value) for key, value in row.swept.items() if key != over), []).append(row)
    return [Repeats(swept=dict(shared), rows=members) for shared, members in groups.items()]


def best_repeats(rows: Sequence[Row], *, over: str) -> Repeats | None:
    """The repeats with the best mean, among those of which most completed: one lucky seed of three is no winner.

    None where there is none, or where jobs watch different tags.
    """
    groups = repeats_of(rows, over=over)
    most = max((len(group.values) for group in groups), default=0)
    if not most or len({(row.monitor, row.mode) for row in rows}) > 1:
        return None
    pick = min if rows[0].mode == "min" else max
    return pick((group for group in groups if len(group.values) == most), key=lambda group: group.mean)


def best_of(rows: Sequence[Row], *, repeat_over: str | None = None) -> Row | None:
    """The best job; of repeats, the best one of those with the best mean."""
    if repeat_over is None:
        return best_row(rows)
    group = best_repeats(rows, over=repeat_over)
    return None if group is None else best_row(group.rows)


def again_command(directory: Path, row: Row | None) -> str:
    """What starts from the config of a job, for overrides to be typed behind it; nothing of None.

    directory: below which the row's own is.
    """
    return "" if row is None else train_command([], key="from_run", path=str(directory / row.directory))


def write_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Writes table.csv with every value that a job had last, and table.md with losses and metrics, for readers.

    Each whole or not at all. repeat_over: the key whose jobs are repeats; their mean, deviation and n are columns of
    table.csv and a table of their own in table.md.
    """
    header, cells = table_cells(rows)
    if repeat_over is not None:
        names = repeat_columns(rows)
        groups, tags = repeats_of(rows, over=repeat_over), monitors_of(rows)
        told = {row.job: _repeat_figures(group, tags) for group in groups for row in group.rows}
        header, cells = [*header, *names], [[*line, *told[row.job]] for row, line in zip(rows, cells, strict=True)]
    text = io.StringIO()
    writer = csv.writer(text, lineterminator="\n")
    writer.writerow(header)
    writer.writerows(cells)
    write_whole(directory / "table.csv", text.getvalue())
    write_whole(directory / "table.md", _markdown(rows, directory, repeat_over))


def print_table(directory: Path, rows: Sequence[Row], *, repeat_over: str | None = None) -> None:
    """Prints the table, the best job, and how to look further. repeat_over: as of `write_table`."""
    from rich.console import Console

    console = Console(highlight=False)

    def say(line: str) -> None:
        console.print(line, markup=False, soft_wrap=True)

    for table in rich_tables(rows, repeat_over=repeat_over, width=console.width):
        console.print(table)
    unstarted = [str(row.job) for row in rows if row.status == NOT_STARTED]
    if unstarted:
        say(f"not started: job{'' if len(unstarted) == 1 else 's'} {', '.join(unstarted)}")
    for row in rows:
        if row.error:
            say(f"job {row.job} {row.status}: {row.error}")
    shown = os.path.relpath(directory)
    best = best_line(rows, repeat_over=repeat_over)
    if best:
        say(f"best       {best}")
        say(f"again      {again_command(directory, best_of(rows, repeat_over=repeat_over))}")
    say(f"results    {shown}")
    say(f"compare    python -m exp.report {shown}")
    say(f"dashboard  python -m exp.dashboard {shown}")


def best_line(rows: Sequence[Row], *, repeat_over: str | None = None) -> str:
    """Return the best job, or the best group of repeats, in one line. Return "" if no row has a value."""
    shown = differing(rows)
    if repeat_over is None:
        best = best_row(rows)
        if best is None:
            return ""
        swept = _typed(best.swept, shown)
        return f"{best.name}, {best.monitor} {best.value:.6g}  {swept}".rstrip()
    group = best_repeats(rows, over=repeat_over)
    if group is None:
        return ""
    swept = _typed(group.swept, shown)
    called = ", ".join(row.name for row in group.rows if row.has_value)
    deviation = f" ± {group.deviation:.2g}" if math.isfinite(group.deviation) else ""
    mean = f"{rows[0].monitor} {group.mean:.6g}{deviation}, the mean of {len(group.values)} over {repeat_over}"
    return f"{called}: {mean}  {swept}".rstrip()


def _typed(swept: Mapping[str, str], shown: Sequence[str]) -> str:
    return " ".join(f"{key}={value}" for key, value in swept.items() if key in shown and value != DEFAULT)


def _counted(rows: Sequence[Row]) -> str:
    return f"{len(rows)} {_kind(rows)}{'s' if len(rows) != 1 else ''}"


def _kind(rows: Sequence[Row]) -> str:
    return "job" if all(row.is_job for row in rows) else "run"


def rich_tables(rows: Sequence[Row], *, width: int, repeat_over: str | None = None) -> list[Table]:
    """Return the table of jobs and, if there are repeats, the table of repeats, with the best in bold.

    Jobs are sorted by number. Other runs are sorted by value, the best first, and have few columns.

    Args:
        rows: Rows of jobs, or of other runs.
        width: Columns of the screen.
        repeat_over: As of `write_table`.
    """
    are_jobs = _kind(rows) == "job"
    if not are_jobs:
        rows = [rows[place] for place in _ranked(rows, [row.value if row.has_value else math.nan for row in rows])]
    best = best_row(rows)
    header, cells = table_cells(rows, brief=True)
    title = _counted(rows)
    columns = dict(zip(header, zip(*cells, strict=True), strict=True))
    keys = sorted(differing(rows), key=lambda key: -_variety(columns[key]))
    first = [header[0], *(name for name in header if name.startswith("best "))]
    others = ["status", *keys, *(name for name in header if name.endswith("/val")), *reversed(LEAST)]
    others = [name for name in dict.fromkeys(others) if name in header and name not in first]
    most = len(header)
    if not are_jobs and len(rows) > 1:
        most, least = MOST_COLUMNS, {"status": 0.0}
        others = [name for name in others if _variety(columns[name]) > least.get(name, LEAST_VARIETY)]
    bold = [row is best for row in rows]
    tables = [_rich(title, header, cells, first=first, others=others, bold=bold, width=width, most=most)]
    if repeat_over is not None:
        groups = repeats_of(rows, over=repeat_over)
        if not are_jobs:
            groups = [groups[place] for place in _ranked(rows, [group.mean for group in groups])]
        top = best_repeats(rows, over=repeat_over)
        bold = [top is not None and group.rows == top.rows for group in groups]
        header, cells = repeat_cells([row for group in groups for row in group.rows], over=repeat_over)
        first, keys = repeat_columns(rows), [key for key in keys if key in header]
        title = f"over {repeat_over}"
        tables.append(_rich(title, header, cells, first=first, others=keys, bold=bold, width=width, most=most))
    return tables


def _ranked(rows: Sequence[Row], values: Sequence[float]) -> list[int]:
    """Return the places of values, the best first, those without one last; as they are if rows watch different tags."""
    if len({(row.monitor, row.mode) for row in rows}) > 1:
        return list(range(len(values)))
    sign = -1 if rows[0].mode == "max" else 1
    return sorted(range(len(values)), key=lambda at: sign * values[at] if math.isfinite(values[at]) else math.inf)


def _variety(cells: Sequence[str]) -> float:
    """Return the share of cells that hold something else than most do."""
    return 1 - max(Counter(cells).values()) / len(cells)


def _rich(
    title: str,
    header: Sequence[str],
    cells: Sequence[Sequence[str]],
    *,
    first: Sequence[str],
    others: Sequence[str],
    bold: Sequence[bool],
    width: int,
    most: int,
) -> Table:
    """A table with a line a row. Columns that have no room are left out, and named.

    first: columns that are there in any case. others: further ones, what matters most first. most: columns.
    """
    from rich.markup import escape
    from rich.table import Table

    columns = {name: [name, *map(_cut, column)] for name, *column in zip(header, *cells, strict=True)}
    columns[header[0]] = [header[0], *(line[0] for line in cells)]  # what a run is called is copied
    if _needed(columns.values()) > width:
        columns = {name: [re.sub(r"([/.])| ", "\\1\n", name), *column[1:]] for name, column in columns.items()}
    kept = list(first)
    for name in others:
        if len(kept) < most and _needed([columns[one] for one in (*kept, name)]) <= width:
            kept.append(name)
    left_out = [name for name in header if name not in kept]
    if left_out:
        title = f"{title}; columns left out: {among(left_out)}"
    table = Table(title=title, title_justify="left")
    shown = [columns[name] for name in header if name in kept]
    for column in shown:
        table.add_column(column[0], no_wrap=True)
    for place, is_best in enumerate(bold, 1):
        table.add_row(*(escape(column[place]) for column in shown), style="bold" if is_best else None)
    return table


def _cut(text: str) -> str:
    line = " ".join(text.split())
    return line if len(line) <= MOST_LETTERS else f"{line[: MOST_LETTERS - 1]}…"


def _needed(columns: Iterable[Sequence[str]]) -> int:
    """Columns of a screen that a table needs."""
    return 1 + sum(3 + max(len(line) for cell in column for line in [*cell.splitlines(), ""]) for column in columns)


def differing(rows: Sequence[Row]) -> list[str]:
    """The swept keys whose values differ; all of them where there is one row, and nothing to differ from."""
    keys = dict.fromkeys(key for row in rows for key in row.swept)
    return [key for key in keys if len(rows) == 1 or len({row.swept.get(key) for row in rows}) > 1]


def monitors_of(rows: Sequence[Row]) -> list[str]:
    """The monitored tags, each once."""
    return list(dict.fromkeys(row.monitor for row in rows if row.monitor is not None))


def repeat_columns(rows: Sequence[Row]) -> list[str]:
    """The names of what is said of repeats: a mean of each monitored tag."""
    return [*(f"mean {tag}" for tag in monitors_of(rows) or ["value"]), "deviation", "n"]


def _repeat_figures(group: Repeats, tags: Sequence[str]) -> list[str]:
    mean, deviation = (_number(value) if math.isfinite(value) else "" for value in (group.mean, group.deviation))
    means = [mean if tag == group.monitor else "" for tag in tags] or [mean]
    return [*means, deviation, str(len(group.values))]


def repeat_cells(rows: Sequence[Row], *, over: str) -> tuple[list[str], list[list[str]]]:
    """The header and the cells of the table of repeats."""
    keys, tags = [key for key in differing(rows) if key != over], monitors_of(rows)
    cells = [
        [*(group.swept.get(key, "") for key in keys), *_repeat_figures(group, tags)]
        for group in repeats_of(rows, over=over)
    ]
    return [*keys, *repeat_columns(rows)], cells


def table_cells(
    rows: Sequence[Row], *, results: bool = False, brief: bool = False
) -> tuple[list[str], list[list[str]]]:
    """Return the header and the cells of the table of jobs, or of other runs.

    Args:
        rows: Rows of the table.
        results: Whether to leave out all tags except losses and metrics.
        brief: Whether to leave out all tags except those of validation, and empty columns.
    """
    swept, monitors = differing(rows), monitors_of(rows)
    metrics = sorted({tag for row in rows for tag in row.metrics})
    if results:
        # <metric>/<stage>, loss/<stage>/<term>: hooks log dozens of tags a parameter or a layer, a metric one a class.
        metrics = [tag for tag in metrics if tag.split("/")[1:2] and tag.split("/")[1] in STAGES]
        metrics = [tag for tag in metrics if tag.count("/") == 1 or tag.startswith("loss/")]
    if brief:
        metrics = [tag for tag in metrics if tag.endswith("/val") and tag not in monitors]
    best = [f"best {name}" for name in monitors]
    header = [_kind(rows), "status", *swept, *best, "step", *metrics, "seconds", "peak_mib"]
    cells = []
    for row in rows:
        values = (row.swept.get(key, "") for key in swept)
        name = str(row.job) if row.is_job else row.directory
        line = [name, row.status, *(map(_shortened, values) if brief else values)]
        # A job that was not completed has no best.
        line += [_number(row.value) if row.monitor == name and math.isfinite(row.value) else "" for name in monitors]
        line.append("" if row.step is None or not math.isfinite(row.value) else str(row.step))
        line += [_number(row.metrics[tag]) if tag in row.metrics else "" for tag in metrics]
        line.append("" if row.status == NOT_STARTED or not math.isfinite(row.seconds) else f"{row.seconds:.1f}")
        line.append("" if row.peak_memory_mib is None else f"{row.peak_memory_mib:.0f}")
        cells.append(line if brief else [*line, row.directory, row.error])
    if not brief:
        return [*header, "directory", "error"], cells
    filled = [place for place, name in enumerate(header) if name in swept or any(line[place] for line in cells)]
    return [header[place] for place in filled], [[line[place] for place in filled] for line in cells]


def _markdown(rows: Sequence[Row], directory: Path, repeat_over: str | None) -> str:
    lines = [f"# {_counted(rows)}", ""]
    best = best_line(rows, repeat_over=repeat_over)
    if best:
        lines += [f"Best: {best}", ""]
        lines += ["Again, with what you change behind it:", ""]
        lines += [f"    {again_command(directory, best_of(rows, repeat_over=repeat_over))}", ""]
    lines += _markdown_table(*table_cells(rows, results=True))
    if repeat_over is not None:
        lines += ["", f"## Over {repeat_over}", "", *_markdown_table(*repeat_cells(rows, over=repeat_over))]
    return "\n".join(lines) + "\n"


def _markdown_table(header: Sequence[str], cells: Sequence[Sequence[str]]) -> list[str]:
    return [_line(header), "|---" * len(header) + "|", *map(_line, cells)]


def _line(values: Sequence[str]) -> str:
    escaped = (" ".join(value.replace("|", "\\|").split()) for value in values)
    return "| " + " | ".join(escaped) + " |"


def _shortened(text: str) -> str:
    """A drawn number, which has all of its digits in table.csv, with six of them; any other text as it is."""
    if len(text) <= LONGEST:
        return text
    try:
        return _number(float(text))
    except ValueError:
        return text


def _number(value: float) -> str:
    return f"{value:.6g}" if math.isfinite(value) else str(value)
