"""Runs the jobs of a sweep on a cluster.

The sweep freezes each job, which means that it saves the complete config of the job. The sweep then submits the job,
and reads the result from the run directory.

    sweep                                        a node of the cluster
    freeze   in another process
    submit   -> the cluster's queue        ->    python -m exp.worker RUN_DIR, one process per rank
    ends     <- report.json, the failures of ranks, the state of the job in the cluster

Results and errors have the same format as those of jobs on this machine.
"""

from __future__ import annotations

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from exp.config.frozen import COMPOSITION, OUTPUT
from exp.config.settings import LaunchSettings, Settings
from exp.errors import ExpError, Interrupted, RunError
from exp.launch.failure import Failure, first_cause, read_failure
from exp.launch.job_process import Died
from exp.launch.supervision import end_of
from exp.run_report import Report, find_report
from exp.strategies.placement import Machine, Placement
from exp.sweeps.executor import End, Prepare
from exp.sweeps.job import JobProcesses, dead_job, interruption_of, report_bad_end
from exp.sweeps.jobs import Job

# Folder in the run directory through which ranks report to the sweep. It exists while the job runs.
EXCHANGE = ".launch-cluster"
# Seconds that the other ranks of a job have for their reports after one rank has ended.
SETTLE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A job with a frozen config, which can be submitted.

    Args:
        job: Number of the job.
        directory: Run directory.
        placement: Number of nodes and ranks, and the devices of each rank.
        resume: Newest complete checkpoint in the run directory. None: the run directory has no checkpoint.
        settings: Settings of the job.
    """

    job: int
    directory: Path
    placement: Placement
    resume: Path | None
    settings: Settings

    @property
    def exchange(self) -> Path:
        """The folder through which ranks report to the sweep."""
        return self.directory / EXCHANGE


@dataclass(kw_only=True)
class Submitted:
    """A job that was submitted.

    Args:
        frozen: The job.
        handle: Identifier of the job in the cluster.
        ended: Description of the final state of the job for messages. None: the job runs.
        since: Time, in seconds of the monotonic clock, at which the sweep noticed the end of the job. None: the job
            runs.
    """

    frozen: Frozen
    handle: Any
    ended: str | None = None
    since: float | None = None


def freeze_job(prepare: Prepare, config: DictConfig, job: int, gpus: float | None) -> Frozen | ExpError:
    """Freeze the config of a job, and return the job with the devices of its ranks.

    The config is written to the run directory, unless the directory already contains a frozen config.

    Args:
        prepare: The function exp.start.prepare, which writes the frozen config.
        config: Config of the job.
        job: Number of the job.
        gpus: Number of GPUs per node that the launcher requests. None: the number that launch.devices needs if
            launch.accelerator is cuda, else 0.

    Returns:
        The job, or the error if the job cannot be frozen.
    """
    from exp.check.plan import Plan, place, read_resolved
    from exp.check.starting_point import newest_of

    try:
        directory = Path(config[COMPOSITION].directory)
        resume = newest_of(directory).path
        if (directory / "config.yaml").is_file():
            decided = Plan(resolved=read_resolved(directory))
        else:
            decided, directory = prepare(config)
        launch = decided.settings.launch
        machine = Machine(gpus=_gpus(launch, gpus))
        return Frozen(
            job=job,
            directory=directory,
            placement=place(decided.settings, decided.strategy, machine=machine),
            resume=resume,
            settings=decided.settings,
        )
    except ExpError as error:
        error.__cause__ = error.__context__ = None
        return error


def _gpus(launch: LaunchSettings, gpus: float | None) -> int:
    if gpus is not None:
        return math.ceil(gpus)
    devices = launch.devices
    if launch.accelerator != "cuda":
        return 0
    return devices if isinstance(devices, int) else 1 if isinstance(devices, str) else max(devices) + 1


def output_of(directory: Path, rank: int) -> Path:
    """Return the path of the file to which a rank writes its output."""
    return directory / (f"train.rank{rank}.log" if rank else OUTPUT)


class ClusterExecutor(ABC):
    """Base class of executors that run each job of a sweep in separate processes on a cluster.

    Args:
        slots: Largest number of jobs that are queued or running at the same time.
        processes: Starts the processes that freeze the configs of jobs.
        prepare: See `freeze_job`. The function must be importable by name, because another process calls it.
        gpus: See `freeze_job`.
        poll_seconds: Seconds between two reads of the run directories.
    """

    # Several jobs are never trained together in one process (a stack), because each job has a separate node.
    stacks = False

    def __init__(
        self, *, slots: int, processes: JobProcesses, prepare: Prepare, gpus: float | None, poll_seconds: float
    ) -> None:
        self.slots = slots
        self._processes, self._prepare, self._gpus, self._poll_seconds = processes, prepare, gpus, poll_seconds
        self._running: list[Submitted] = []
        self._failed: list[End] = []
        self._signum: int | None = None
        self._is_killed = False

    @abstractmethod
    def _check(self, frozen: Frozen) -> None:
        """Raise ConfigError if this cluster cannot run a job."""

    @abstractmethod
    def _submit(self, frozen: Frozen) -> Any:
        """Submit a job, and return the job's identifier in the cluster.

        If an earlier sweep submitted the same job and the job still runs, return the identifier of the running job.

        Raises:
            RunError: The cluster rejects the job.
        """

    @abstractmethod
    def _states(self) -> Mapping[Any, str]:
        """Return the final states of the jobs in `_running` that ended, as descriptions by identifier of the job."""

    @abstractmethod
    def _signal(self, jobs: list[Submitted], signum: int) -> None:
        """Send a signal to jobs. Tasks ignore a repeated signal."""

    @abstractmethod
    def _kill(self, jobs: list[Submitted]) -> None:
        """End jobs immediately."""

    def start(self, jobs: Sequence[Job]) -> None:
        """Freeze and submit a job.

        Args:
            jobs: A single job, because this executor does not train several jobs together.
        """
        (first,) = jobs
        job, config = first.number, first.new_config()
        try:
            frozen = self._processes.call(freeze_job, self._prepare, config, job, self._gpus)
            if isinstance(frozen, ExpError):
                raise frozen
            self._check(frozen)
            handle = self._submit(frozen)
        except Died as error:
            self._failed.append(End(job=job, outcome=RunError(f"the process that writes the job's config {error}")))
        except Interrupted:
            raise  # the sweep puts the job back into its queue
        except ExpError as error:
            report_bad_end(Path(config[COMPOSITION].directory), error)
            self._failed.append(End(job=job, outcome=error))
        else:
            self._running.append(Submitted(frozen=frozen, handle=handle))

    def ends(self, timeout: float) -> list[End]:
        """Wait for the end of a job, and return the ends of all jobs that ended.

        The call returns after at most `timeout` seconds, even if no job ended. Because the sweep must react to signals,
        it also returns after half a second, or after `poll_seconds` if that is longer.
        """
        limit = time.monotonic() + min(timeout, max(0.5, self._poll_seconds))
        while True:
            ends, self._failed = self._failed, []
            ends += self._collect_ends()
            if ends or time.monotonic() >= limit:
                return ends
            time.sleep(min(self._poll_seconds, max(0.0, limit - time.monotonic())))

    def end(self, signum: int) -> None:
        """Send a signal to every running job. The second call kills the jobs instead."""
        if self._signum is None:
            self._signum = signum
            self._signal(self._running, signum)
        else:
            self._is_killed = True
            self._kill(self._running)

    def close(self) -> None:
        """End all jobs immediately."""
        if self._running:
            self._kill(self._running)
        for submitted in self._running:
            shutil.rmtree(submitted.frozen.exchange, ignore_errors=True)
        self._running = []

    def _collect_ends(self) -> list[End]:
        states = self._states()
        ends = []
        for submitted in list(self._running):
            if submitted.ended is None and submitted.handle in states:
                submitted.ended, submitted.since = states[submitted.handle], None
            outcome = self._outcome(submitted)
            if outcome is not None:
                self._running.remove(submitted)
                shutil.rmtree(submitted.frozen.exchange, ignore_errors=True)
                ends.append(End(job=submitted.frozen.job, outcome=outcome))
        return ends

    def _outcome(self, submitted: Submitted) -> Report | ExpError | None:
        """Return the report or the error of a job.

        The result is None while the job runs, and while its ranks may still report.
        """
        frozen, has_ended = submitted.frozen, submitted.ended is not None
        report = find_report(frozen.directory)
        is_done = report is not None and report.status not in ("failed", "interrupted")
        if submitted.since is None and (is_done or has_ended):
            submitted.since = time.monotonic()
        if is_done:
            # The ranks exit shortly after the report is written, and the cluster may show their exit late.
            return report if has_ended or self._is_late(submitted) else None
        ranks = range(frozen.placement.world_size)
        failures = [one for rank in ranks if (one := read_failure(frozen.exchange, rank=rank)) is not None]
        if not has_ended:
            # If a rank died, the other ranks wait for it in a collective operation until they are killed.
            first = min((failure.time for failure in failures if failure.kind != "interrupted"), default=math.inf)
            if len(ranks) > 1 and time.time() > first + SETTLE_SECONDS:
                self._kill([submitted])
            return None
        error = self._error(submitted, report, failures)
        if error is not None:
            report_bad_end(frozen.directory, error)
        return error

    def _is_late(self, submitted: Submitted) -> bool:
        """Return whether a job ended more than SETTLE_SECONDS ago, so that no more files of its ranks will appear.

        On a shared disk, files may appear a few seconds after they are written.
        """
        return submitted.since is not None and time.monotonic() > submitted.since + SETTLE_SECONDS

    def _error(self, submitted: Submitted, report: Report | None, failures: list[Failure]) -> ExpError | None:
        """Return the error of a job that was not completed; None while its ranks may still report.

        Args:
            submitted: The job.
            report: Content of report.json. None: the file does not exist.
            failures: Messages of the ranks that failed.
        """
        if report is None and not failures and self._signum is None and not self._is_late(submitted):
            return None
        directory, ranks = submitted.frozen.directory, range(submitted.frozen.placement.world_size)
        if self._signum is not None and not any(failure.kind in ("config", "known", "bug") for failure in failures):
            return interruption_of(directory, self._signum)
        if len(ranks) > 1:
            return _first_cause(submitted, failures)
        kind = failures[0].kind if failures else "death"
        if kind not in ("config", "interrupted") and report is not None and report.error is not None:
            return RunError(report.error["message"])
        if kind != "death":
            return failures[0].error()
        return dead_job(directory, Died(failures[0].reason if failures else submitted.ended))


def _first_cause(submitted: Submitted, failures: list[Failure]) -> ExpError:
    """Return the error of the rank that ended first, because errors of other ranks follow from this error."""
    # A rank that was killed together with its task reports nothing. All reports then come from other ranks.
    if all(failure.kind == "peer" for failure in failures):
        reported = {failure.rank for failure in failures}
        silent = [rank for rank in range(submitted.frozen.placement.world_size) if rank not in reported]
        reason = f"ended without a message: {submitted.ended}"
        failures = failures + [Failure(rank=rank, time=time.time(), kind="death", reason=reason) for rank in silent[:1]]
    cause = first_cause(failures, silent=())
    if cause.kind == "death":
        cause = replace(cause, detail=end_of(output_of(submitted.frozen.directory, cause.rank)))
    return cause.error()
