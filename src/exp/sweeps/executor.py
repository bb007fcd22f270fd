"""The interface between a sweep and the machines that run its jobs: this machine, or the nodes of a cluster.

A sweep decides which jobs exist and in which order they start. An executor runs the jobs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omegaconf import DictConfig

from exp.errors import ExpError, RunError

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.run_report import Report
    from exp.sweeps.jobs import Job

# Function that checks and freezes the config of a job, and returns its plan and its run directory.
Prepare = Callable[[DictConfig], tuple["Plan", Path]]


@dataclass(frozen=True, kw_only=True)
class End:
    """The result of a job that has ended.

    Attributes:
        job: Number of the job.
        outcome: Report of the job, or the error that ended the job. A RunError means that the process of the job died.
            Interrupted means that a signal ended the job. Unstacked means that the job has to run again, alone.
    """

    job: int
    outcome: Report | ExpError


class Unstacked(RunError):
    """Error of a job that was started in a stack and has to run again in a separate process.

    The message states the reason.
    """


class Executor(Protocol):
    """Interface for running jobs in separate processes, so that the crash of a job does not affect other jobs.

    A process runs one job, or a stack: several jobs that are trained together.
    """

    @property
    def stacks(self) -> bool:
        """Return whether one process can train several jobs together."""

    @property
    def slots(self) -> int:
        """Return the number of processes that can run at the same time."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Start a process for one job or one stack, and return at once.

        The caller ensures that at most `slots` processes run at the same time.

        Args:
            jobs: Checked jobs: one job, or the jobs of a stack. A job resumes from its newest checkpoint if its run
                directory has a config.yaml.
        """

    def ends(self, timeout: float) -> list[End]:
        """Wait until a job ends, a signal arrives, or the timeout passes.

        Args:
            timeout: Longest time to wait, in seconds.

        Returns:
            Jobs that ended since the last call, in the order in which they ended. Each started job is returned exactly
            once. The report.json of a job is already written, unless the job has no run directory.
        """

    def end(self, signum: int) -> None:
        """Send a signal to every running job.

        After the first call, jobs save their state and end. A second call kills the jobs.
        """

    def close(self) -> None:
        """Kill the jobs that still run, and remove the executor's files outside of run directories."""
