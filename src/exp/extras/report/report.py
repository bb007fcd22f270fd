"""python -m exp.report DIR...: compares any runs and sweeps in one HTML page, and pictures.

    python -m exp.report outputs/train/sweeps/2026-01-31/12-00-00         into report/ of the sweep
    python -m exp.report outputs --metric accuracy/val                    every run below outputs/, by another tag
    python -m exp.report outputs/a/2026-01-31/12-00-00 outputs/b          some runs
    python -m exp.report outputs --watch                                  anew whenever something changed, until Ctrl-C

It reads what is there: a run that is going on, was killed or is damaged is a row that says so.
"""

from __future__ import annotations

import argparse
import datetime
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exp.config.freeze import make_exclusively
from exp.errors import MissingExtraError, RunError
from exp.extras.report.report_page import page, progress_line
from exp.extras.report.run_comparison import Comparison, ReportError, compare, tags_of
from exp.files import sweep_partial_files, write_whole
from exp.output import exit_status
from exp.signals import heed
from exp.spelling import nearest
from exp.sweeps.results import again_command, best_line, rich_tables
from exp.sweeps.run_records import MARKS, Found, RunRecord, find_runs, is_sweep, read_run, signature

if TYPE_CHECKING:
    from exp.extras.report.charts import Chart

PAGE = "report.html"
WATCH_SECONDS = 5.0
# On the screen; the page has all.
MOST_NOTES = 12
EXPECTED = "a run directory, a sweep's, or a folder above some, such as outputs, which python -m exp.train makes"


def main(argv: Sequence[str] | None = None) -> int:
    """Write the report, and print the table, the best run and the command that starts from it.

    Returns: 0; 2 where there is nothing to compare; 1 where the report cannot be written. With --watch 0 after Ctrl-C,
        and 128 + n after signal n.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    arguments = parser().parse_args(argv)
    if arguments.watch is None:
        found = find_runs(_existing(arguments.directories))
        if not found.runs:
            raise _nothing(arguments.directories, found)
        report = RunsReport(arguments)
        report.write(found)
        report.tell()
        return 0
    return watch(arguments)


def watch(arguments: argparse.Namespace) -> int:
    """Write the report anew whenever a file of a run has changed, until a signal.

    Returns: 0 after Ctrl-C, 128 + n after signal n.
    """
    ended = threading.Event()
    signals: list[int] = []

    def end(signum: int, frame: object) -> None:
        signals.append(signum)
        ended.set()

    places = _existing(arguments.directories)
    heed(end)
    report: RunsReport | None = None
    before: object = None
    while not ended.is_set():
        found = find_runs(places)
        now = [(run, signature(run)) for run in found.runs]
        if now != before and not found.runs:
            print(f"no runs yet in {' '.join(map(str, places))}", flush=True)
        elif now != before:
            report = RunsReport(arguments) if report is None else report
            try:
                report.write(found)
            except ReportError as error:  # such as a tag that no run has logged yet
                print(error, flush=True)
            else:
                report.tell()
        before = now
        ended.wait(arguments.watch)
    return 0 if signals[0] == signal.SIGINT else 128 + signals[0]


class RunsReport:
    """The report of one command: where it is written, and what was read of runs that have not changed since."""

    comparison: Comparison

    def __init__(self, arguments: argparse.Namespace) -> None:
        self._arguments = arguments
        self._known: dict[Path, tuple[object, RunRecord]] = {}
        self._notes: Sequence[str] = ()
        self._is_told = False
        self._directory: Path | None = None

    @property
    def directory(self) -> Path:
        """Where it is written, decided when first asked for; what a killed command left half written there goes."""
        if self._directory is None:
            self._directory = _output(self._arguments)
            sweep_partial_files(self._directory)
        return self._directory

    def write(self, found: Found) -> None:
        """Read the runs, and write the page and its pictures, each whole or not at all.

        Raises: ReportError where they are not to be compared so; RunError where the directory cannot be written.
        """
        self._known = {run: self._record(run) for run in found.runs}
        asked = self._arguments
        records = [record for _, record in self._known.values()]
        trained = [record for record in records if record.value_of("train") != "false"] or records
        problems = list(found.problems)
        if len(trained) < len(records):
            problems.append(f"evaluations, which train nothing, are left out: {len(records) - len(trained)}")
        self.comparison = compare(trained, repeat_over=asked.repeat_over, metrics=asked.metric, problems=problems)
        charts, notes = _drawn(self.comparison, tags_of(asked.metric))
        self._notes = [*notes, *self.comparison.notes]
        about = f"Written by python -m exp.report on {datetime.datetime.now().astimezone():%Y-%m-%d at %H:%M:%S %Z}."
        text = page(self.comparison, charts, notes=self._notes, about=about)
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            for chart in charts:
                write_whole(self.directory / f"{chart.name}.png", chart.png, is_synced=False)
            write_whole(self.directory / PAGE, text, is_synced=False)
        except OSError as error:
            raise _unwritable(self.directory, error) from error

    def tell(self) -> None:
        """Print the tables, the best run and where the page is, or how far it is now if that was printed before."""
        if self._is_told:
            print(f"{time.strftime('%H:%M:%S')}  {progress_line(self.comparison)}", flush=True)
            return
        self._is_told = True
        self._print()

    def _print(self) -> None:
        from rich.console import Console

        console = Console(highlight=False)
        comparison = self.comparison
        over, names = comparison.repeat_over, comparison.names
        for table in rich_tables(comparison.rows, width=console.width, repeat_over=over, names=names):
            console.print(table)
        lines = [
            f"{name} {row.status}: {row.error}" for name, row in zip(names, comparison.rows, strict=True) if row.error
        ]
        lines += self._notes
        if len(lines) > MOST_NOTES:
            lines = [*lines[: MOST_NOTES - 1], f"and {len(lines) - MOST_NOTES + 1} more notes, which the page has"]
        if comparison.best is not None:
            lines.append(f"best    {best_line(comparison.rows, repeat_over=over, names=names)}")
            lines.append(f"again   {again_command(comparison.base, comparison.best)}")
        lines.append(f"report  {os.path.relpath(self.directory / PAGE)}")
        for line in lines:
            console.print(line, markup=False, soft_wrap=True)
        sys.stdout.flush()

    def _record(self, run: Path) -> tuple[object, RunRecord]:
        """A run as it is now, read where it has changed."""
        now = signature(run)
        before, record = self._known.get(run, (None, None))
        if record is not None and before == now:
            return now, record
        return now, read_run(run, tags=tags_of(self._arguments.metric))


def _drawn(comparison: Comparison, tags: Sequence[str]) -> tuple[Sequence[Chart], Sequence[str]]:
    """The pictures, and what is not drawn; none, and why, without Matplotlib."""
    from exp.extras.report.charts import draw

    try:
        charts = draw(comparison, tags=tags)
    except MissingExtraError as error:
        return (), [f"no pictures: {error}"]
    return charts.drawn, charts.notes


def _existing(places: Sequence[Path]) -> Sequence[Path]:
    """Raises: ReportError where one is no directory."""
    for place in places:
        if os.path.isdir(place):
            continue
        is_file = os.path.exists(place)
        there = "is a file" if is_file else "is not there"
        near = [] if is_file else nearest(place.name, (path.name for path in place.parent.glob("*/")))
        cure = f". Did you mean {place.parent / near[0]}?" if near else ""
        raise ReportError(f"{place} {there}; expected {EXPECTED}{cure}")
    return places


def _nothing(places: Sequence[Path], found: Found) -> ReportError:
    """What to say where no run was found."""
    parents = [parent for place in places for parent in place.absolute().parents]
    above = next((parent for parent in parents if any(os.path.isfile(parent / name) for name in MARKS)), None)
    cure = "" if above is None else f". Did you mean {os.path.relpath(above)}?"
    problems = "".join(f"\n  {problem}" for problem in found.problems)
    return ReportError(f"{' '.join(map(str, places))}: no run is there; expected {EXPECTED}{cure}{problems}")


def _output(arguments: argparse.Namespace) -> Path:
    """Where the report is written: --output, report/ of the one sweep, or a directory of its own below outputs/."""
    if arguments.output is not None:
        return Path(arguments.output)
    places = arguments.directories
    if len(places) == 1 and is_sweep(places[0]):
        return Path(places[0]) / "report"
    wanted = Path("outputs", "reports", *time.strftime("%Y-%m-%d %H-%M-%S").split())
    try:
        return make_exclusively(wanted)
    except OSError as error:
        raise _unwritable(wanted, error) from error


def _unwritable(directory: Path, error: OSError) -> RunError:
    where = error.filename or directory
    return RunError(f"the report cannot be written to {where}: {error.strerror or error}. Choose another --output")


def parser() -> argparse.ArgumentParser:
    """What the command takes."""
    found = argparse.ArgumentParser(
        prog="python -m exp.report", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = found.add_argument
    add("directories", nargs="+", type=Path, metavar="DIR", help="runs, sweeps, or folders above them")
    add("--output", type=Path, metavar="DIR", help="by default report/ of one sweep, else outputs/reports/DATE/TIME")
    add("--repeat-over", metavar="KEY", help="runs that differ in it alone are repeats; none: no run is one")
    more = "compare by this tag, and draw it; TAG:max where more is better. Repeated, the tags are a Pareto front"
    add("--metric", action="append", default=[], metavar="TAG", help=more)
    every = f"write it anew when something changed, looked at so often; by default every {WATCH_SECONDS:g} s"
    add("--watch", nargs="?", type=seconds, const=WATCH_SECONDS, metavar="SECONDS", help=every)
    return found


def seconds(text: str) -> float:
    """A time to wait, above 0. Raises: ValueError."""
    value = float(text)
    if not 0 < value < float("inf"):
        raise ValueError(text)
    return value
