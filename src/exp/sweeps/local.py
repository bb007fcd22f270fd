"""The executor that runs several jobs of a sweep at the same time on this machine.

Each process is forked from a server process. Its output is appended to output.log in the run directory of its first
job. Run directories are created before the jobs start.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from omegaconf import DictConfig

from exp.config.freeze import make_exclusively, take_directory
from exp.config.frozen import OUTPUT
from exp.errors import ExpError, RunError, describe_exception
from exp.launch.job_process import Died, JobProcess, wait
from exp.sweeps.devices import Devices, Jobs, Need, need_settings, slots, threads, visible_gpus
from exp.sweeps.executor import End, Unstacked
from exp.sweeps.job import JobProcesses, dead_job, interruption_of, report_bad_end, run_job

if TYPE_CHECKING:
    from exp.run_report import Report
    from exp.sweeps.jobs import Job
# Longest time in seconds that `ends` waits, so that the caller can check for signals.
SIGNAL_SECONDS = 0.1


def outcomes(
    jobs: Sequence[Job],
    most_threads: int,
    fit: Callable[[DictConfig], Report],
) -> Iterator[tuple[int, Report | ExpError]]:
    """Run a job or a stack of jobs in this process, and yield the results.

    Args:
        jobs: Jobs with existing run directories.
        most_threads: Largest number of CPU threads per rank for operators, for configs that set no number.
        fit: Function that runs a job that is not in a stack.

    Yields:
        The index of a job that ended, and its report or error.
    """
    import torch

    each = min(most_threads, torch.get_num_threads())
    torch.set_num_threads(each)
    os.environ["OMP_NUM_THREADS"] = str(each)  # the ranks of a job read this variable
    if not jobs[0].is_stacked:
        yield 0, run_job(fit, _config_in_place(jobs[0]))
        return
    from exp.sweeps.stack import train
    from exp.sweeps.stacked_network import Unstackable

    left = set(range(len(jobs)))
    try:
        for place, outcome in train(jobs):
            left.remove(place)
            yield place, outcome
    except Unstackable as reason:
        yield from ((place, Unstacked(str(reason))) for place in sorted(left))


def _config_in_place(job: Job) -> DictConfig:
    """Return the config of a job, with the existing run directory of the job as its directory.

    If the directory has no config.yaml, the run writes the config to this directory.
    """
    config, directory = job.new_config(), cast(Path, job.directory)
    if not (directory / "config.yaml").is_file():
        take_directory(config, directory)
    return config


@dataclass(kw_only=True)
class _Running:
    """A process that runs a job or a stack of jobs.

    Attributes:
        jobs: The jobs.
        process: The process.
        need: CPU processes and GPUs that the process needs.
        gpus: Names of the GPUs that the process uses.
        waiting: Indices of the jobs that are still running.
    """

    jobs: Sequence[Job]
    process: JobProcess[tuple[int, Report | ExpError]]
    need: Need
    gpus: tuple[str, ...]
    waiting: list[int]


class LocalExecutor:
    """Executor that runs jobs at the same time on this machine.

    Args:
        processes: Object that checks jobs and starts the server.
        jobs: Value of `sweep.jobs`. `auto` derives the number from the needs of the checked jobs.
    """

    stacks = True

    def __init__(self, processes: JobProcesses, *, jobs: Jobs = "auto") -> None:
        self._processes, self._jobs = processes, jobs
        self._running: list[_Running] = []
        self._ended: list[End] = []
        self._devices: Devices | None = None
        self._signals: list[int] = []

    @property
    def slots(self) -> int:
        """Number of processes that can run at the same time. The checked job with the largest need determines it."""
        asked = self._processes.needs.values()
        if not asked:
            return 1 if self._jobs == "auto" else self._jobs
        return slots({need for need, _ in asked}, jobs=self._jobs, machine=next(iter(asked))[1])

    def start(self, jobs: Sequence[Job]) -> None:
        """Start a process for one job or one stack, and return at once."""
        try:
            jobs = list(map(_in_own_directory, jobs))
            output = cast(Path, jobs[0].directory) / OUTPUT
            output.touch()
        except OSError as error:
            failed = RunError(f"the job could not start: {describe_exception(error)}")
            self._ended += [End(job=job.number, outcome=failed) for job in jobs]
            return
        need, machine = self._processes.needs[need_settings(jobs[0].new_config())]
        if self._devices is None:
            self._devices = Devices.of(machine, os.environ)
        gpus = self._devices.take(need)
        self._processes.start()
        process = JobProcess(
            outcomes,
            jobs,
            threads(need, slots=self.slots, machine=machine),
            self._processes.fit,
            output=output,
            environment=visible_gpus(gpus),
        )
        waiting = list(range(len(jobs)))
        self._running.append(_Running(jobs=jobs, process=process, need=need, gpus=gpus, waiting=waiting))

    def ends(self, timeout: float) -> list[End]:
        """Wait until a job ends, and return the jobs that have ended. See `Executor.ends`.

        Args:
            timeout: Longest time to wait, in seconds. The method never waits longer than SIGNAL_SECONDS.
        """
        limit = time.monotonic() + min(timeout, SIGNAL_SECONDS)
        while True:
            self._take_in()
            left = limit - time.monotonic()
            if self._ended or left <= 0:
                break
            wait([one.process for one in self._running], left)
        found, self._ended = self._ended, []
        return found

    def end(self, signum: int) -> None:
        """Send a signal to every running job.

        The first call lets jobs save their state; a second call kills the jobs.
        """
        self._signals.append(signum)
        for one in self._running:
            one.process.signal(signum if len(self._signals) == 1 else signal.SIGKILL)

    def close(self) -> None:
        """Kill the jobs that still run."""
        for one in self._running:
            one.process.kill()

    def _take_in(self) -> None:
        for one in tuple(self._running):
            for place, outcome in one.process.values:
                one.waiting.remove(place)
                self._ended.append(End(job=one.jobs[place].number, outcome=outcome))
            one.process.values.clear()
            died = one.process.died
            if died is None:
                continue
            self._running.remove(one)
            if self._devices is not None:
                self._devices.release(one.gpus, one.need)
            for job in map(one.jobs.__getitem__, one.waiting):
                if job.is_stacked and not self._signals:
                    # Any job of the stack may have crashed the process. Each job runs again alone, so that only the job
                    # with the error fails.
                    outcome = Unstacked(f"the process of the stack {died}")
                else:
                    outcome = self._bad_end(cast(Path, job.directory), died)
                self._ended.append(End(job=job.number, outcome=outcome))

    def _bad_end(self, directory: Path, died: Died) -> ExpError:
        """Return the error of a job after its process died, and write the report of the job."""
        error: ExpError = interruption_of(directory, self._signals[0]) if self._signals else dead_job(directory, died)
        error.__cause__ = died
        report_bad_end(directory, error)
        return error


def _in_own_directory(job: Job) -> Job:
    """Return the job with an existing run directory. Create the directory unless an earlier sweep created it."""
    directory = cast(Path, job.directory)
    return job if (directory / "config.yaml").is_file() else replace(job, directory=make_exclusively(directory))
