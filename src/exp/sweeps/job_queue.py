"""The jobs of a sweep that are still to come, and those that run."""

from __future__ import annotations

import itertools
import math
import signal
import sys
import time
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from typing import Protocol

from exp.sweeps.executor import End, Executor
from exp.sweeps.jobs import Job
from exp.sweeps.results import Row
from exp.sweeps.search import Proposal, Search
from exp.sweeps.space import Combination

WAIT_SECONDS = 0.5


class Queue(Protocol):
    """The jobs that are still to come, and who waits for their ends."""

    total: int | None

    def next(self) -> Sequence[Job]:
        """The jobs that one process starts now; empty where there are none, or none yet."""
        ...

    def again(self, job: Job) -> None:
        """Take back a job that is to be run alone."""
        ...

    def end(self, row: Row) -> None:
        """Hear how a job has ended."""
        ...

    def rest(self) -> Sequence[Job]:
        """The known jobs that were not started."""
        ...


class Listed:
    """Jobs that are all known, in groups of which each has a process."""

    def __init__(self, groups: Iterable[Sequence[Job]]) -> None:
        self._groups = deque(groups)
        self.total: int | None = sum(map(len, self._groups))

    def next(self) -> Sequence[Job]:
        return self._groups.popleft() if self._groups else ()

    def again(self, job: Job) -> None:
        self._groups.append([replace(job, is_known=True, is_stacked=False)])

    def end(self, row: Row) -> None:
        """Nothing follows from it."""

    def rest(self) -> Sequence[Job]:
        return [job for group in self._groups for job in group]


class Searched:
    """Jobs that a search proposes, one a trial, or several that repeat it with other values of one key.

    Grouped are those that are known together whatever ends first: of a search that waits for no result all, of any
    other the repeats of a trial.

    make: the job of a number, a trial and the values of its axes. repeats: the values of the key, the key's name.
    group: checks jobs, and puts those together that one process trains together.
    """

    def __init__(
        self,
        search: Search,
        *,
        make: Callable[[int, int, Combination], Job],
        repeats: Sequence[Combination],
        group: Callable[[Sequence[Job]], Iterable[Sequence[Job]]],
    ) -> None:
        self._search, self._make, self._repeats, self._group = search, make, repeats, group
        self.total: int | None = search.trials * len(repeats)
        self._waiting: deque[Sequence[Job]] = deque()
        self._rows: dict[int, list[Row]] = {}

    def next(self) -> Sequence[Job]:
        if not self._waiting:
            asked = itertools.islice(iter(self._search.ask, None), None if self._search.is_blind else 1)
            jobs = [job for proposal in asked for job in self._jobs(proposal)]
            self._waiting.extend(self._group(jobs) if jobs else ())
        return self._waiting.popleft() if self._waiting else ()

    def _jobs(self, proposal: Proposal) -> Iterable[Job]:
        self._rows[proposal.number] = []
        for place, repeat in enumerate(self._repeats):
            number = proposal.number * len(self._repeats) + place
            yield self._make(number, proposal.number, {**proposal.values, **repeat})

    def again(self, job: Job) -> None:
        self._waiting.append([replace(job, is_known=True, is_stacked=False)])

    def end(self, row: Row) -> None:
        trial = row.job // len(self._repeats)
        self._rows[trial].append(row)
        if len(self._rows[trial]) == len(self._repeats):
            rows = self._rows.pop(trial)
            values = [_mean(_objective(row, tag) for row in rows) for tag in self._search.objectives]
            statuses = {row.status for row in rows}
            missing = [tag for tag, value in zip(self._search.objectives, values, strict=True) if math.isnan(value)]
            if statuses == {"completed"} and missing:
                print(f"trial {trial} has no {' and no '.join(missing)}: to the search it failed", file=sys.stderr)
            if statuses == {"completed"} and all(map(math.isfinite, values)):
                self._search.tell(trial, "completed", values)
            elif "interrupted" not in statuses:  # that one goes on another time
                self._search.tell(trial, "pruned" if statuses == {"pruned"} else "failed", values)

    def rest(self) -> Sequence[Job]:
        return [job for group in self._waiting for job in group]


class Running:
    """The jobs that run, and the works that they are of. received: signals to this process, which are passed on."""

    def __init__(self, executor: Executor, received: Sequence[int]) -> None:
        self.received = received
        # By number: the job, and when it was started.
        self.jobs: dict[int, tuple[Job, float]] = {}
        self._executor = executor
        self._works: list[set[int]] = []
        self._passed_on = 0

    @property
    def works(self) -> int:
        """How many processes run."""
        return len(self._works)

    def add(self, jobs: Sequence[Job], started: float) -> None:
        """Add the jobs of one process."""
        self._works.append({job.number for job in jobs})
        self.jobs |= {job.number: (job, started) for job in jobs}

    def ends(self) -> list[tuple[Job, End, float]]:
        """Wait for ends, or a moment: each job that has ended, and its seconds."""
        for signum in self.received[self._passed_on :]:
            self._executor.end(signum)
            self._passed_on += 1
        found = []
        for end in self._executor.ends(WAIT_SECONDS):
            job, started = self.jobs.pop(end.job)
            self._works = [rest for work in self._works if (rest := work - {end.job})]
            found.append((job, end, time.perf_counter() - started))
        return found

    def ended(self) -> list[tuple[Job, End, float]]:
        """End all as a signal does, and wait for it; a signal to here ends them at once."""
        if self.jobs and not self._passed_on:
            self._executor.end(signal.SIGTERM)
        found = []
        while self.jobs:
            found += self.ends()
        return found


def _mean(values: Iterable[float]) -> float:
    found = list(values)
    return math.fsum(found) / len(found)


def _objective(row: Row, tag: str) -> float:
    """The value of a tag that a search compares: the best of the monitored one, the last of any other."""
    if tag == row.monitor:
        return row.value
    return float(row.metrics[tag]) if tag in row.metrics else math.nan
