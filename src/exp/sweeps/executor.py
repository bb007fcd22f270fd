"""The interface between a sweep and the place where its jobs run: this machine, or the nodes of a cluster.

A sweep decides which jobs there are and in which order they start. An executor runs them.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Protocol

from omegaconf import DictConfig

from exp.errors import ExpError, RunError

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.run_report import Report
    from exp.sweeps.jobs import Job

# Checks and freezes the config of a job, and returns its plan and its run directory.
Prepare = Callable[[DictConfig], tuple["Plan", Path]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one process: a job, or several jobs that are trained together.

    Attributes:
        jobs: Checked jobs. A job whose directory has a config.yaml resumes there from its newest checkpoint.
        is_stack: Whether the jobs are trained together. A stack may have one job, if the others have ended.
    """

    jobs: tuple[Job, ...]
    is_stack: bool = False


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one job.

    Attributes:
        job: Number of the job.
        outcome: Its report or its error: RunError with the last words of a process that died, Interrupted after a
            signal, Unstacked if the job has to run alone.
    """

    job: int
    outcome: Report | ExpError


class Unstacked(RunError):
    """A job could not be trained together with others, and has to run alone. The message has the reason."""


class Executor(Protocol):
    """Runs works, several at a time, each job in a process that cannot harm other jobs."""

    @property
    def stacks(self) -> bool:
        """Return whether one process may train several jobs together."""

    @property
    def slots(self) -> int:
        """Return the number of works that run at a time."""

    def start(self, work: Work) -> None:
        """Start a work and return at once. At most `slots` works are running."""

    def ends(self, timeout: float) -> list[End]:
        """Wait until a job has ended, a signal has come or `timeout` seconds have passed.

        Returns:
            The jobs that have ended since the last call, each once, in the order of their ends. Every started job ends,
            and its report.json is written if its run directory existed.
        """

    def end(self, signum: int) -> None:
        """Pass a signal on to every running job, which saves its state and ends. A second call kills the jobs."""

    def close(self) -> None:
        """End the jobs that still run, and remove all files outside of run directories."""
