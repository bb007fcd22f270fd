"""Jobs of a sweep that a cluster runs: each is frozen here, handed over, and read again in its run directory.

    sweep                                        a node of the cluster
    freeze   in a process beside this one
    submit   -> the cluster's queue        ->    python -m exp.worker RUN_DIR, once a rank
    ends     <- report.json, the ranks' own words, the cluster's word for the job

What is said of a job's end is what the sweep would have said of it here.
"""

from __future__ import annotations

import math
import shutil
import time
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from omegaconf import DictConfig

from exp.config.freeze import COMPOSITION, OUTPUT
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError
from exp.launch.failure import Failure, death, first_cause, read_failure
from exp.launch.job_process import Died
from exp.launch.supervision import end_of
from exp.run_report import Report, find_report
from exp.strategies.placement import Machine, Placement
from exp.sweeps.executor import End, Prepare, Work
from exp.sweeps.job import JobProcesses, dead_job, interrupted, report_bad_end

# Below the run directory, as long as the job runs.
EXCHANGE = ".launch-cluster"
# How long the ranks of a job that one of them has ended have to say so.
SETTLE_SECONDS = 5.0


@dataclass(frozen=True, kw_only=True)
class Frozen:
    """A job that can be handed over.

    resume: the newest whole checkpoint of a directory that was there. settings: launch, runtime and security.
    """

    job: int
    directory: Path
    placement: Placement
    resume: Path | None
    settings: Mapping[str, Any]

    @property
    def exchange(self) -> Path:
        """Where its ranks and the sweep tell each other."""
        return self.directory / EXCHANGE


@dataclass(kw_only=True)
class Submitted:
    """A job that the cluster has.

    handle: the cluster's own. ended: what the cluster says of its end. since: the time at which it said so, or at which
    the job's report did.
    """

    frozen: Frozen
    handle: Any
    ended: str | None = None
    since: float | None = None


def freeze_job(prepare: Prepare, config: DictConfig, job: int, gpus: float | None) -> Frozen | ExpError:
    """Freeze a checked config in its run directory, unless it is there, and place its ranks on the cluster's node.

    prepare: exp.start.prepare, which freezes.
    gpus: that the launcher asks for on a node; None: those of launch.devices, where launch.accelerator=cuda.
    """
    from exp.check.plan import Plan, frozen, place
    from exp.check.starting_point import newest_of

    try:
        directory = Path(config[COMPOSITION].directory)
        resume = newest_of(directory).path
        if (directory / "config.yaml").is_file():
            decided = Plan(resolved=frozen(directory))
        else:
            decided, directory = prepare(config)
        launch = decided.plain["launch"]
        machine = Machine(gpus=_gpus(launch, gpus))
        return Frozen(
            job=job,
            directory=directory,
            placement=place(decided.plain, decided.strategy, machine=machine),
            resume=resume,
            settings={name: decided.plain[name] for name in ("launch", "runtime", "security")},
        )
    except ExpError as error:
        error.__cause__ = error.__context__ = None
        return error


def _gpus(launch: Mapping[str, Any], gpus: float | None) -> int:
    if gpus is not None:
        return math.ceil(gpus)
    devices = launch["devices"]
    if launch["accelerator"] != "cuda":
        return 0
    return devices if isinstance(devices, int) else 1 if isinstance(devices, str) else max(devices) + 1


def output_of(directory: Path, rank: int) -> Path:
    """The file of what a rank prints."""
    return directory / (f"train.rank{rank}.log" if rank else OUTPUT)


class ClusterExecutor(ABC):
    """Runs works of one job each on a cluster; what a cluster does its own way is abstract here.

    slots: jobs that are queued or run there at once. processes: starts those in which jobs are frozen.
    prepare, gpus: as of `freeze_job`; a function that another process finds by its name.
    poll_seconds: how often the run directories are looked at.
    """

    # A node of a cluster is asked for by the job.
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
        """Raise ConfigError for a job that this cluster cannot run."""

    @abstractmethod
    def _submit(self, frozen: Frozen) -> Any:
        """Hand a job over, or find it where it was handed over by a sweep that is gone. Returns: its handle.

        Raises: RunError where the cluster does not take it.
        """

    @abstractmethod
    def _states(self) -> Mapping[int, str]:
        """Of the jobs of `_running` that the cluster runs no more, by their places there, its word for their end."""

    @abstractmethod
    def _signal(self, jobs: list[Submitted], signum: int) -> None:
        """Pass a signal on, as often as this is called: tasks heed it once."""

    @abstractmethod
    def _kill(self, jobs: list[Submitted]) -> None:
        """End jobs at once."""

    def start(self, work: Work) -> None:
        """Freeze and submit a job. Raises: ConfigError for jobs that are to be trained together."""
        if len(work.jobs) > 1:
            fault = Fault(
                key="sweep.stack",
                got=f"{len(work.jobs)} jobs in one process, on a cluster",
                expected="jobs with a process of their own",
                cure="Write sweep.stack=false, or leave hydra/launcher as it is",
            )
            raise ConfigError([fault])
        (job,), (config,) = work.jobs, work.configs
        try:
            frozen = self._processes.call(freeze_job, self._prepare, config, job, self._gpus)
            if isinstance(frozen, ExpError):
                raise frozen
            self._check(frozen)
            handle = self._submit(frozen)
        except Died as error:
            self._failed.append(End(job=job, outcome=RunError(f"the process that freezes the job {error}")))
        except Interrupted:
            raise  # a signal: the job is put back
        except ExpError as error:
            directory = Path(config[COMPOSITION].directory)
            report_bad_end(directory, error)
            self._failed.append(End(job=job, outcome=error))
        else:
            self._running.append(Submitted(frozen=frozen, handle=handle))

    def ends(self, timeout: float) -> list[End]:
        """Wait for the end of a job, `timeout` seconds at most, and half a second where a signal may have come."""
        limit = time.monotonic() + min(timeout, max(0.5, self._poll_seconds))
        while True:
            ends, self._failed = self._failed, []
            ends += self._ended()
            if ends or time.monotonic() >= limit:
                return ends
            time.sleep(min(self._poll_seconds, max(0.0, limit - time.monotonic())))

    def end(self, signum: int) -> None:
        """Pass a signal on to every running job; a second call kills them."""
        if self._signum is None:
            self._signum = signum
            self._signal(self._running, signum)
        else:
            self._is_killed = True
            self._kill(self._running)

    def close(self) -> None:
        """End what is left."""
        if self._running:
            self._kill(self._running)
        for submitted in self._running:
            shutil.rmtree(submitted.frozen.exchange, ignore_errors=True)
        self._running = []

    def _ended(self) -> list[End]:
        states = self._states()
        ends = []
        for place, submitted in enumerate(list(self._running)):
            if place in states and submitted.ended is None:
                submitted.ended, submitted.since = states[place], None
            outcome = self._outcome(submitted)
            if outcome is not None:
                self._running.remove(submitted)
                shutil.rmtree(submitted.frozen.exchange, ignore_errors=True)
                ends.append(End(job=submitted.frozen.job, outcome=outcome))
        return ends

    def _outcome(self, submitted: Submitted) -> Report | ExpError | None:
        """What came of a job; None while it runs, and while words of its ranks may still come."""
        frozen, directory = submitted.frozen, submitted.frozen.directory
        report = find_report(directory)
        is_done = report is not None and report.status not in ("failed", "interrupted")
        if submitted.since is None and (is_done or submitted.ended is not None):
            submitted.since = time.monotonic()
        if is_done:
            # Its ranks leave a moment after it, and a cluster may be slow to say so.
            return report if submitted.ended is not None or self._is_late(submitted) else None
        ranks = range(frozen.placement.world_size)
        if submitted.ended is None and len(ranks) == 1:
            return None
        said = [read_failure(frozen.exchange, rank=rank) for rank in ranks]
        failures = [failure for failure in said if failure is not None]
        if submitted.ended is None:
            self._end_others(submitted, failures)
            return None
        error = self._error(submitted, report, failures)
        if error is not None:
            report_bad_end(directory, error)
        return error

    def _is_late(self, submitted: Submitted) -> bool:
        """Whether nothing more can be expected; on a disk that several machines share a file may come late."""
        return submitted.since is not None and time.monotonic() > submitted.since + SETTLE_SECONDS

    def _end_others(self, submitted: Submitted, failures: list[Failure]) -> None:
        """A rank that died takes its neighbours with it, which may wait for it in a collective for long."""
        first = min((failure.time for failure in failures if failure.kind != "interrupted"), default=math.inf)
        if time.time() > first + SETTLE_SECONDS:
            self._kill([submitted])

    def _error(self, submitted: Submitted, report: Report | None, failures: list[Failure]) -> ExpError | None:
        """What ended a job that was not completed; None while words of it may still come."""
        if report is None and not failures and self._signum is None and not self._is_late(submitted):
            return None
        directory = submitted.frozen.directory
        if self._signum is not None and not any(failure.kind in ("config", "known", "bug") for failure in failures):
            return interrupted(directory, self._signum)
        if submitted.frozen.placement.world_size > 1:
            return self._first_cause(submitted, failures)
        if failures and failures[0].kind in ("config", "interrupted"):
            return failures[0].error()
        if report is not None and report.error is not None:
            return RunError(report.error["message"])
        if failures and failures[0].kind != "death":
            return failures[0].error()
        how = failures[0].reason if failures else submitted.ended
        return dead_job(directory, Died(how))

    def _first_cause(self, submitted: Submitted, failures: list[Failure]) -> ExpError:
        heard = {failure.rank for failure in failures}
        # One that was killed with the process that would tell of it said nothing, and its neighbours complain.
        if all(failure.kind == "neighbour" for failure in failures):
            silent = [rank for rank in range(submitted.frozen.placement.world_size) if rank not in heard]
            for rank in silent[:1]:
                told = death(rank=rank, returncode=1, detail="")
                reason = f"ended without a word: {submitted.ended}"
                failures = [*failures, Failure(rank=rank, time=told.time, kind="death", reason=reason)]
        cause = first_cause(failures, silent=())
        if cause.kind != "death":
            return cause.error()
        detail = end_of(output_of(submitted.frozen.directory, cause.rank))
        return Failure(rank=cause.rank, time=cause.time, kind="death", reason=cause.reason, detail=detail).error()
