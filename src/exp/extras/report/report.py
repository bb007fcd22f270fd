"""python -m exp.report DIR...: compares runs and sweeps in one HTML page with pictures.

    python -m exp.report outputs/train/sweeps/2026-01-31/12-00-00         a sweep; writes to report/ in its directory
    python -m exp.report outputs --metric accuracy/val                    all runs below outputs/, by this tag
    python -m exp.report outputs/a/2026-01-31/12-00-00 outputs/b          one run, and all runs below outputs/b

The report also has rows for runs that are running, were killed or are damaged. Their status states this.
"""

from __future__ import annotations

import argparse
import datetime
import os
import time
from collections.abc import Sequence
from pathlib import Path

from exp.config.freeze import make_exclusively
from exp.errors import MissingExtraError, RunError
from exp.extras.report.charts import Chart, draw
from exp.extras.report.report_page import page
from exp.extras.report.run_comparison import Comparison, ReportError, compare, tags_of
from exp.extras.report.run_records import Found, find_runs, read_run
from exp.files import remove_partial_files, write_atomic
from exp.output import command
from exp.sweeps.ledger import is_sweep
from exp.sweeps.results import again_command, best_line, rich_tables

PAGE = "report.html"
EXPECTED = "a run directory, a sweep directory, or a folder above them, such as outputs of python -m exp.train"


@command()
def main(argv: Sequence[str]) -> int:
    """Write the report, and print a table, the best run, and a command that starts from the config of the best run.

    Returns:
        Exit status: 0, 1 if the report cannot be written, or 2 if no run is found.
    """
    arguments = parser().parse_args(argv)
    for place in arguments.directories:
        _refuse_missing(place)
    found = find_runs(arguments.directories)
    if not found.runs:
        raise _nothing(arguments.directories, found)
    comparison = comparison_of(found, arguments)
    charts: Sequence[Chart] = ()
    try:
        charts, notes = draw(comparison, tags=tags_of(arguments.metric))
    except MissingExtraError as error:
        notes = [f"no pictures: {error}"]
    notes += comparison.notes
    about = f"Written by python -m exp.report on {datetime.datetime.now().astimezone():%Y-%m-%d at %H:%M:%S %Z}."
    directory = _write(arguments, page(comparison, charts, notes=notes, about=about), charts)
    _print(comparison, notes, directory)
    return 0


def comparison_of(found: Found, arguments: argparse.Namespace) -> Comparison:
    """Return the comparison of the runs that were found.

    Args:
        found: The runs.
        arguments: The parsed command line.

    Raises:
        ReportError: No run has a tag of --metric, or the runs do not differ in the key of --repeat-over.
    """
    records = [read_run(run, tags=tags_of(arguments.metric)) for run in found.runs]
    trained = [record for record in records if record.value_of("train") != "false"] or records
    problems = list(found.problems)
    if len(trained) < len(records):
        problems.append(f"evaluations are left out: {len(records) - len(trained)}")
    return compare(trained, repeat_over=arguments.repeat_over, metrics=arguments.metric, problems=problems)


def _write(arguments: argparse.Namespace, text: str, charts: Sequence[Chart]) -> Path:
    """Write the page and the pictures to a directory, and return the directory.

    The directory is the value of --output. If --output is missing and the command compares one sweep, it is report/ in
    the directory of the sweep. Otherwise it is a new directory below outputs/reports.
    """
    places = arguments.directories
    directory = arguments.output or places[0] / "report"
    try:
        if arguments.output is None and (len(places) > 1 or not is_sweep(places[0])):
            directory = make_exclusively(Path("outputs", "reports", *time.strftime("%Y-%m-%d %H-%M-%S").split()))
        directory.mkdir(parents=True, exist_ok=True)
        remove_partial_files(directory)
        for chart in charts:
            write_atomic(directory / f"{chart.name}.png", chart.png, is_synced=False)
        write_atomic(directory / PAGE, text, is_synced=False)
    except OSError as error:
        where = f"{error.filename or directory}: {error.strerror or error}"
        raise RunError(f"the report cannot be written to {where}. Choose another --output") from error
    return Path(directory)


def _print(comparison: Comparison, notes: Sequence[str], directory: Path) -> None:
    from rich.console import Console

    console = Console(highlight=False)
    over = comparison.repeat_over
    for table in rich_tables(comparison.rows, repeat_over=over):
        console.print(table)
    lines = [f"{row.name} {row.status}: {row.error}" for row in comparison.rows if row.error]
    lines += notes
    if comparison.best is not None:
        lines.append(f"best    {best_line(comparison.rows, repeat_over=over)}")
        lines.append(f"again   {again_command(comparison.base, comparison.best)}")
    lines.append(f"report  {os.path.relpath(directory / PAGE)}")
    for line in lines:
        console.print(line, markup=False, soft_wrap=True)


def _refuse_missing(place: Path) -> None:
    """Raise ReportError if a path of the command line is not a directory."""
    if not os.path.isdir(place):
        there = "is a file" if os.path.exists(place) else "does not exist"
        raise ReportError(f"{place} {there}; expected {EXPECTED}")


def _nothing(places: Sequence[Path], found: Found) -> ReportError:
    """Return the error that no run was found in the directories of the command line."""
    problems = "".join(f"\n  {problem}" for problem in found.problems)
    return ReportError(f"{' '.join(map(str, places))}: no run found; expected {EXPECTED}{problems}")


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    found = argparse.ArgumentParser(
        prog="python -m exp.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("directories", nargs="+", type=Path, metavar="DIR", help="runs, sweeps, or folders above them")
    add("--output", type=Path, metavar="DIR", help="default: report/ of one sweep, else outputs/reports/DATE/TIME")
    add("--repeat-over", metavar="KEY", help="runs that differ only in KEY are repeats; none: no repeats")
    more = "compare by this tag, and draw it; TAG:max if larger is better. Further tags are drawn"
    add("--metric", action="append", default=[], metavar="TAG", help=more)
    return found
