"""The output of a sweep: its table, the lines on the screen, and the HParams page of TensorBoard."""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Sequence
from functools import partial
from pathlib import Path

from exp.config.compose import job_overrides
from exp.config.frozen import chosen_values, compared_tags
from exp.errors import ConfigError, ExpError, Interrupted
from exp.output import describe_write_error
from exp.redaction import redact
from exp.run_report import Report
from exp.sweeps.jobs import Job
from exp.sweeps.results import FINISHED, NOT_STARTED, Row, print_table, write_table
from exp.sweeps.sweep_settings import SweepSettings

TENSORBOARD = "exp.tensorboard.logger.TensorBoardLogger"
# Shortest time in seconds between two writes of the table while jobs run. Writing 10,000 rows takes about 1 s.
TABLE_SECONDS = 5.0


class SweepView:
    """Display of the results of a sweep.

    Args:
        directory: Directory of the sweep.
        settings: Settings of the sweep.

    Attributes:
        rows: Rows of the table, by job number.
        ended_early: Reason why the sweep ended before all jobs were run. Empty if all jobs were run.
    """

    def __init__(self, directory: Path, settings: SweepSettings) -> None:
        self._directory, self._settings = directory, settings
        self.rows: dict[int, Row] = {}
        self.ended_early = ""
        self._written = -math.inf
        self._said = set[str]()

    @property
    def is_whole(self) -> bool:
        """Return whether all jobs were completed or pruned."""
        return all(row.status in FINISHED for row in self.rows.values())

    def row_of(self, job: Job, outcome: Report | ExpError | None, *, seconds: float = 0.0) -> Row:
        """Return the table row of a job.

        Args:
            job: The job.
            outcome: Report or error of the job. None if the job was not started.
            seconds: Duration of the job in seconds.
        """
        monitor, mode = self._settings.monitor, self._settings.mode
        if job.plain:
            monitor, mode = job.plain["monitor"], job.plain["mode"]
        row = partial(Row, job=job.number, swept=job.swept, monitor=monitor, mode=mode)
        if outcome is None:
            return row(status=NOT_STARTED)
        if isinstance(outcome, ExpError):
            directory = "" if job.directory is None else os.path.relpath(job.directory, self._directory)
            status = "interrupted" if isinstance(outcome, Interrupted) else "failed"
            return row(status=status, error=_first_line(outcome), seconds=seconds, directory=directory)
        error = outcome.error["message"].strip().splitlines() if outcome.error else []
        return row(
            status=outcome.status,
            value=outcome.monitored if outcome.status in FINISHED else math.nan,
            step=None if outcome.best is None else outcome.best["step"],
            metrics={**outcome.metrics, **outcome.best_metrics},
            seconds=seconds,
            peak_memory_mib=outcome.peak_memory_mib,
            directory=os.path.relpath(outcome.directory, self._directory),
            error=error[0] if error else "",
        )

    def record(self, row: Row) -> None:
        """Add a row, and write the table unless it was written recently."""
        self.rows[row.job] = row
        if time.monotonic() - self._written > TABLE_SECONDS:
            self.write()

    def print_end(self, row: Row) -> None:
        """Print a line for a job that has ended."""
        value = f"{row.monitor} {row.value:.6g}" if row.monitor is not None and math.isfinite(row.value) else ""
        swept = " ".join(f"{key}={text}" for key, text in row.swept.items())
        facts = [f"job {row.job}", row.status, value, swept, f"{row.seconds:.1f} s", row.error]
        print(redact("  ".join(filter(None, facts))), flush=True)

    def say_once(self, line: str) -> None:
        """Print a line unless this method has already printed it."""
        if line not in self._said:
            self._said.add(line)
            print(redact(line), flush=True)

    def write(self) -> None:
        """Write the table if it has rows."""
        if self.rows:
            write_table(self._directory, self._sorted_rows, repeat_over=self._settings.repeat_over)
        self._written = time.monotonic()

    def print(self) -> None:
        """Print the table, and the reason if the sweep ended early."""
        print()
        print_table(self._directory, self._sorted_rows, repeat_over=self._settings.repeat_over)
        if self.ended_early:
            print(self.ended_early)

    @property
    def _sorted_rows(self) -> list[Row]:
        return [self.rows[number] for number in sorted(self.rows)]

    def declare(self, jobs: Sequence[Job]) -> None:
        """Write the swept keys and the compared tags for TensorBoard's HParams page, once per sweep.

        Args:
            jobs: Jobs of the first batch. For a search, the jobs that `Space.corners` returns.
        """
        space = self._settings.space
        if self.rows or not space.axes or not any(map(_has_tensorboard, jobs)):
            return
        from exp.tensorboard.hparams import declaration, declare  # imports NumPy

        domains = {axis.name: domain for axis in space.axes if (domain := axis.domain()) is not None}
        values: dict[str, list[object]] = {}
        tags: list[str] = []
        seen = set[tuple[str, str]]()
        for job in jobs:
            # Skip jobs without a new value, because a sweep may have ten thousand jobs.
            if job.error is not None or seen >= job.swept.items():
                continue
            seen |= job.swept.items()
            for key, value in chosen_values(job.plain, job_overrides(job.overrides)).items():
                values.setdefault(key, []).append(value)
            tags += compared_tags(job.plain, is_trial=self._settings.is_search)
        try:
            declare(self._directory, declaration(values, [*dict.fromkeys(tags)], domains=domains))
        except OSError as error:
            place = describe_write_error(self._directory, error)
            print(f"the sweep cannot be shown in TensorBoard: {place}", file=sys.stderr)


def _has_tensorboard(job: Job) -> bool:
    return job.error is None and any(one["_target_"] == TENSORBOARD for one in job.plain["logger"].values())


def _first_line(error: ExpError) -> str:
    if isinstance(error, ConfigError):
        return "; ".join(str(one) for one in error.errors)
    # args[0] does not contain the command that resumes the run, which is too long for a table cell.
    lines = str(error.args[0]).strip().splitlines()
    return lines[0] if lines else type(error).__name__
