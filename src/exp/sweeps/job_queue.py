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
    """A queue of jobs that are all known in advance, in groups. One process runs each group.

    Args:
        groups: Groups of jobs.

    Attributes:
        total: Number of jobs.
    """

    def __init__(self, groups: Iterable[Sequence[Job]]) -> None:
        self._groups = deque(groups)
        self.total = sum(map(len, self._groups))

    def next(self) -> Sequence[Job]:
        """Return the jobs that the next process runs. Return an empty sequence if no job is left or known yet."""
        return self._groups.popleft() if self._groups else ()

    def again(self, job: Job) -> None:
        """Add a job to the end of the queue that did not run, or has to run again in a separate process."""
        self._groups.append([replace(job, is_known=True, is_stacked=False)])

    def end(self, row: Row) -> None:
        """Accept the result of a job. This queue ignores the result."""

    def rest(self) -> Sequence[Job]:
        """Return the known jobs that were not started."""
        return [job for group in self._groups for job in group]


class Searched(Queue):
    """A queue of jobs that a search proposes. A trial has one job, or several repeats with different values of one key.

    Only jobs that are known at the same time can be in one group, so groups do not depend on the order in which jobs
    end. If proposals do not depend on results, all jobs are known at once. Otherwise, only the repeats of one trial are
    known at the same time.

    Args:
        search: Proposes trials.
        make: Returns a job, from its number, the number of its trial, and the values of its axes.
        repeats: Values of the repeated key.
        group: Checks jobs, and groups the jobs that one process trains together.
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
    """Return the value of a tag for the search: the best value of the monitored tag, or the last value of any other."""
    if tag == row.monitor:
        return row.value
    return float(row.metrics[tag]) if tag in row.metrics else math.nan
