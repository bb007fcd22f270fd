"""The place where a sweep's jobs run: cores and GPUs of this machine, a cluster's nodes. A sweep asks for no more than
`Executor`; which jobs there are, and in which order, is no concern of an executor's.
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

# Checks and freezes the config of a job, and returns its plan and its run directory.
Prepare = Callable[[DictConfig], tuple["Plan", Path]]


@dataclass(frozen=True, kw_only=True)
class Work:
    """The work of one process: a job, or several that are trained together.

    jobs: their numbers.
    configs: of each, checked; `_composition_.directory` is its own run directory, absolute. A directory that holds a
        config.yaml already is gone on with, in place, from its newest whole checkpoint.
    is_stack: they are trained together, or one is whose like have ended.
    """

    jobs: tuple[int, ...]
    configs: tuple[DictConfig, ...]
    is_stack: bool = False


@dataclass(frozen=True, kw_only=True)
class End:
    """The end of one job.

    outcome: its report; or what ended it: RunError with the last words of a process that died, Interrupted where it was
        ended by a signal, Unstacked where it has not begun, or was in the process of several that died.
    """

    job: int
    outcome: Report | ExpError


class Unstacked(RunError):
    """A job that was to be trained together with others and was not: it is to be run alone. The message says why."""


class Executor(Protocol):
    """Runs works, several at a time, each job in a process that cannot harm another one."""

    @property
    def stacks(self) -> bool:
        """Whether one process may train several jobs together here."""

    @property
    def slots(self) -> int:
        """How many works run at once here."""

    def start(self, work: Work) -> None:
        """Start a work and return at once. At most `slots` are running."""

    def ends(self, timeout: float) -> list[End]:
        """Wait until a job has ended, a signal has come or `timeout` seconds are over.

        Returns: the jobs that have ended since the last call, each once, in the order of their ends. Every job that was
            started ends, in whatever way; its report.json is written then, where its run directory was.
        """

    def end(self, signum: int) -> None:
        """Pass a signal on to every running job, which saves its state and leaves; a second call kills them."""

    def close(self) -> None:
        """End what is left, and leave nothing behind: no process, no file outside the run directories."""
