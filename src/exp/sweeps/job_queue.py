"""The queues that supply the jobs of a sweep."""

from __future__ import annotations

import itertools
import math
import statistics
import sys
from collections import deque
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from exp.sweeps.jobs import Job
from exp.sweeps.results import Row
from exp.sweeps.search import Search
from exp.sweeps.space import Combination


class Queue:
    """A queue of jobs that are all known in advance.

    Args:
        groups: Groups of jobs. One process runs each group.

    Attributes:
        total: Number of jobs.
    """

    def __init__(self, groups: Iterable[Sequence[Job]]) -> None:
        self._groups = deque(groups)
        self.total = sum(map(len, self._groups))

    def next(self) -> Sequence[Job]:
        """Return the group of jobs that the next process runs. Return an empty sequence if no job is available now."""
        return self._groups.popleft() if self._groups else ()

    def again(self, job: Job) -> None:
        """Add a job to the end of the queue. The job was not run, or has to run again in a separate process."""
        self._groups.append([replace(job, is_known=True, is_stacked=False)])

    def end(self, row: Row) -> None:
        """Do nothing with the result of a job. `Searched` passes the result to the search."""

    def rest(self) -> Sequence[Job]:
        """Return the known jobs that were not started."""
        return [job for group in self._groups for job in group]


class Searched(Queue):
    """A queue of the jobs of a search.

    Each trial of the search has one job, or several repeats that differ in the value of one key. If the sampler ignores
    results, all jobs are proposed at once and can be grouped. Otherwise, only the repeats of one trial are grouped. The
    groups therefore do not depend on the order in which jobs end.

    Args:
        search: Search that proposes trials.
        make: Function that returns a job. Its arguments are the number of the job, the number of the trial, and the
            values of the swept keys.
        repeats: For each repeat of a trial, a dict with the value of the repeated key. One empty dict if there are no
            repeats.
        group: Function that checks jobs and returns groups of jobs. One process trains each group.
    """

    def __init__(
        self,
        search: Search,
        *,
        make: Callable[[int, int, Combination], Job],
        repeats: Sequence[Combination],
        group: Callable[[Sequence[Job]], Iterable[Sequence[Job]]],
    ) -> None:
        super().__init__(())
        self._search, self._make, self._repeats, self._group = search, make, repeats, group
        self.total = search.trials * len(repeats)
        self._rows: dict[int, list[Row]] = {}

    def next(self) -> Sequence[Job]:
        if not self._groups:
            asked = itertools.islice(iter(self._search.ask, None), None if self._search.is_blind else 1)
            jobs = [job for number, values in asked for job in self._jobs(number, values)]
            self._groups.extend(self._group(jobs) if jobs else ())
        return super().next()

    def _jobs(self, trial: int, values: Combination) -> Iterable[Job]:
        self._rows[trial] = []
        for number, repeat in enumerate(self._repeats, trial * len(self._repeats)):
            yield self._make(number, trial, {**values, **repeat})

    def end(self, row: Row) -> None:
        trial = row.job // len(self._repeats)
        self._rows[trial].append(row)
        if len(self._rows[trial]) == len(self._repeats):
            rows = self._rows.pop(trial)
            values = [statistics.fmean(_objective(row, tag) for row in rows) for tag in self._search.objectives]
            statuses = {row.status for row in rows}
            missing = [tag for tag, value in zip(self._search.objectives, values, strict=True) if math.isnan(value)]
            if statuses == {"completed"} and missing:
                print(f"trial {trial} counts as failed: it has no value of {', '.join(missing)}", file=sys.stderr)
            if statuses == {"completed"} and all(map(math.isfinite, values)):
                self._search.tell(trial, "completed", values)
            elif "interrupted" not in statuses:  # an interrupted trial has no result yet, because it can be resumed
                self._search.tell(trial, "pruned" if statuses == {"pruned"} else "failed", values)


def _objective(row: Row, tag: str) -> float:
    """Return the value of a tag that the search compares.

    For the monitored tag, this is the best value. For any other tag, this is the value in the report, or nan if the tag
    has no value.
    """
    if tag == row.monitor:
        return row.value
    return float(row.metrics[tag]) if tag in row.metrics else math.nan
