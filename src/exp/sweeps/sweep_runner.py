"""The loop that runs the jobs of a queue, several at a time, until the queue is empty or the sweep has to end."""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import cast

from exp.errors import ExpError, Interrupted
from exp.launch.supervision import collect_signals
from exp.run_report import Report
from exp.sweeps.executor import Executor, Unstacked
from exp.sweeps.job_queue import Queue
from exp.sweeps.jobs import Job
from exp.sweeps.ledger import Entry, Ledger, clear_unfrozen, identity_of
from exp.sweeps.results import NOT_STARTED, Row
from exp.sweeps.sweep_settings import SweepSettings
from exp.sweeps.sweep_view import SweepView

WAIT_SECONDS = 0.5


@dataclass(frozen=True, kw_only=True)
class _Running:
    """A running job.

    Attributes:
        job: The job.
        started: Start time, from `time.perf_counter`.
        process: Number of the process that runs the job. Jobs of one stack have the same number.
    """

    job: Job
    started: float
    process: int


class SweepRunner:
    """Loop that runs the jobs of a sweep.

    Args:
        directory: Directory of the sweep.
        settings: Settings of the sweep.
        executor: Executor that runs the jobs.
        ledger: Record to which the started jobs are added.
        view: Object that shows the results.
    """

    def __init__(
        self, directory: Path, settings: SweepSettings, *, executor: Executor, ledger: Ledger, view: SweepView
    ) -> None:
        self._directory, self._settings, self._executor = directory, settings, executor
        self._ledger, self._view = ledger, view
        self._running: dict[int, _Running] = {}
        self._processes = itertools.count()
        # Run directories of the jobs that this sweep has started.
        self._taken: set[Path] = set()
        # Number of signals that were sent to the jobs.
        self._passed_on = 0

    def run(self, queue: Queue) -> None:
        """Run jobs until the queue is empty or the sweep has to end.

        Raises:
            Interrupted: A signal arrived. All running jobs have ended.
        """
        self._passed_on = 0
        with collect_signals() as received:
            try:
                self._work_off(queue, received)
            except Exception:
                # The process of the sweep failed, for example because the disk is full.
                self._end_running(received)
                raise
        if received:
            interrupted = Interrupted(signum=received[0], checkpoint=str(self._directory))
            interrupted.command = self._settings.resume_command(os.path.relpath(self._directory))
            raise interrupted

    def _work_off(self, queue: Queue, received: Sequence[int]) -> None:
        begun = time.monotonic()
        while True:
            while not received and self._has_room and not self._why_it_ends(begun):
                if not self._start_next(queue, received):
                    break
            if not self._running:
                break
            for job, outcome, seconds in self._ends(received):
                if isinstance(outcome, Unstacked):
                    self._view.say_once(f"jobs run in separate processes: {outcome}")
                    queue.again(job)
                else:
                    row = self._view.row_of(job, outcome, seconds=seconds)
                    self._record(row, queue)
        for job in queue.rest():
            self._view.record(self._row_without_run(job) or self._view.row_of(job, None))
        self._view.write()
        done = sum(row.status != NOT_STARTED for row in self._view.rows.values())
        if not received and (why := self._why_it_ends(begun)) and done < queue.total:
            self._view.ended_early = f"{why}: {done} of {queue.total} jobs were run"

    @property
    def _has_room(self) -> bool:
        return len({one.process for one in self._running.values()}) < self._executor.slots

    def _why_it_ends(self, begun: float) -> str:
        """Return the reason why no more jobs may start. Return "" if jobs may start.

        Args:
            begun: Start of the sweep, from `time.monotonic`.
        """
        most, timeout = self._settings.values["max_failures"], self._settings.values["timeout"]
        if most is not None and sum(row.status == "failed" for row in self._view.rows.values()) >= most:
            return f"ended by sweep.max_failures={most}"
        return "" if time.monotonic() - begun < self._settings.seconds else f"ended by sweep.timeout={timeout}"

    def _start_next(self, queue: Queue, received: Sequence[int]) -> bool:
        """Take the next jobs from the queue. Start each job, or record its table row if it need not run.

        Returns:
            False if the queue had no job.
        """
        try:
            jobs = queue.next()
        except Interrupted:  # a signal arrived while a proposed job was checked
            return False
        left = []
        for job in jobs:
            if (row := self._row_without_run(job)) is None:
                left.append(job)
            else:
                self._record(row, queue)
        if left and not received:
            left = [self._place(job) for job in left]
            with contextlib.suppress(Interrupted):  # a signal arrived during the start
                self._start(left)
        for job in left:
            if job.number not in self._running:
                queue.again(job)
        return bool(jobs)

    def _start(self, jobs: Sequence[Job]) -> None:
        """Write the entries of jobs to the ledger, then start the jobs in one process."""
        started, process, entries = time.perf_counter(), next(self._processes), []
        for job in jobs:
            directory = cast(Path, job.directory)
            if job.is_known:
                clear_unfrozen(directory)
            else:
                shown = os.path.relpath(directory, self._directory)
                entries.append(Entry(job=job.number, identity=identity_of(job.plain), directory=shown))
        self._ledger.write(entries)
        self._executor.start(jobs)
        self._running |= {job.number: _Running(job=job, started=started, process=process) for job in jobs}

    def _place(self, job: Job) -> Job:
        """Return the job with an unused run directory.

        The directory of the job is changed only if hydra.sweep.subdir gave an earlier job the same directory.
        """
        if job.is_known:
            return job
        wanted = cast(Path, job.directory)
        names = itertools.chain([wanted.name], (f"{wanted.name}-{count}" for count in itertools.count(2)))
        free = next(path for path in map(wanted.with_name, names) if path not in self._taken and not path.exists())
        self._taken.add(free)
        return replace(job, directory=free)

    def _row_without_run(self, job: Job) -> Row | None:
        """Return the table row of a job that cannot run, or that an earlier sweep finished.

        Return None if the job has to run.
        """
        if job.error is not None:
            return self._view.row_of(job, job.error)
        if not job.is_known or job.number in self._view.rows:
            return None
        report = self._ledger.report_of(job, retries_failed=self._settings.values["retry_failed"])
        return None if report is None else self._view.row_of(job, report, seconds=report.wall_seconds)

    def is_left(self, job: Job) -> bool:
        """Return whether a job still has to run."""
        return self._row_without_run(job) is None

    def _record(self, row: Row, queue: Queue) -> None:
        self._view.record(row)
        queue.end(row)
        self._view.print_end(row)

    def _ends(self, received: Sequence[int]) -> Iterator[tuple[Job, Report | ExpError, float]]:
        """Pass new signals on to the jobs, wait at most WAIT_SECONDS, and yield the jobs that have ended.

        Yields:
            The job, its report or error, and its duration in seconds.
        """
        for signum in received[self._passed_on :]:
            self._executor.end(signum)
            self._passed_on += 1
        for end in self._executor.ends(WAIT_SECONDS):
            one = self._running.pop(end.job)
            yield one.job, end.outcome, time.perf_counter() - one.started

    def _end_running(self, received: Sequence[int]) -> None:
        """Send SIGTERM to all running jobs, and wait until the jobs have ended. A second signal kills the jobs."""
        if self._running and not self._passed_on:
            self._executor.end(signal.SIGTERM)
        while self._running:
            for job, outcome, seconds in self._ends(received):
                self._view.rows[job.number] = self._view.row_of(job, outcome, seconds=seconds)
