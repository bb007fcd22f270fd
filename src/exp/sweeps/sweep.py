"""The command `python -m exp.train -m ...`, which runs a sweep. The function `sweep` runs the whole command.

sweep_settings   the settings of the sweep, and the swept keys
jobs, search     the jobs of a grid or of a search, composed and checked
sweep_runner     runs the jobs of a queue through an executor, and records them in the ledger
sweep_view       the table, the lines on the screen, and TensorBoard's HParams page
"""

from __future__ import annotations

import contextlib
import os
import shutil
import signal
import sys
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING

from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import open_dict

from exp.check.stages import early_errors
from exp.config.compose import Composition, composition_of
from exp.config.freeze import make_exclusively
from exp.config.groups import PRIMARY
from exp.config.hydra_adapter import error_of, job_return, run_sweeper
from exp.config.plain_tree import with_changes
from exp.config.reading import plain_values
from exp.errors import ConfigError, ErrorDetails, Interrupted, RunError, raise_errors
from exp.files import remove_partial_files
from exp.output import describe_write_error
from exp.signals import handle_signals
from exp.sweeps.executor import Executor
from exp.sweeps.job_queue import Queue, Searched
from exp.sweeps.jobs import READ_ONCE, Check, Job, Jobs, job_errors, pack
from exp.sweeps.ledger import AUTO, JOBS, Ledger, find_sweep, identity_of, lock_sweep, sweeps_of
from exp.sweeps.search import Search
from exp.sweeps.space import Combination, no_job
from exp.sweeps.stacking import group_jobs
from exp.sweeps.sweep_runner import SweepRunner
from exp.sweeps.sweep_settings import read_settings, refuse_settings, wanted_directory
from exp.sweeps.sweep_view import SweepView

if TYPE_CHECKING:
    from omegaconf import DictConfig

# Smallest number of jobs for a stack: fewer jobs are faster in separate processes.
LEAST_STACKED = 4


class Sweep:
    """The jobs of a sweep: they are composed, checked and run. Hydra's sweepers call `launch`.

    Args:
        master: Result of `compose_sweep`.
        directory: Directory of the sweep.
        executor: Executor that runs the jobs.
        check: Function that checks several configs; see `exp.sweeps.jobs.Check`.
        is_dry: Whether the sweep only checks its jobs, and reports all their errors.

    Attributes:
        planned: Jobs of a grid. In a dry run of a search, the jobs that `Space.corners` returns.
        view: Object that shows the results.
    """

    def __init__(
        self,
        *,
        master: Composition,
        directory: Path,
        executor: Executor,
        check: Check,
        is_dry: bool = False,
    ) -> None:
        self.settings = settings = read_settings(master)
        self._directory, self._executor, self._is_dry = directory, executor, is_dry
        is_compared = settings.is_search and settings.values["monitor"] is None
        reads = (*READ_ONCE, "monitor", "mode") if is_compared else READ_ONCE
        self._jobs = Jobs(master=master, directory=directory, check=check, everything=is_dry, reads=reads)
        # Identity of the shared config of all jobs of a search.
        self._shared = identity_of(plain_values(master.config)) if settings.is_search else None
        self._ledger = Ledger(directory)
        self.view = SweepView(directory, settings)
        self._runner = SweepRunner(directory, settings, executor=executor, ledger=self._ledger, view=self.view)
        self.planned: list[Job] = []

    def begin(self) -> None:
        """Write sweep.json with the settings of this sweep.

        Raises:
            ConfigError: One of the two sweeps is a grid and the other is a search, or the two searches have different
                settings.
        """
        settings, search = self.settings, None
        if settings.is_search:
            search = {"sampler": settings.values["sampler"], "repeat_over": settings.repeat_over}
            search |= {"axes": [repr(axis) for axis in settings.space.axes], "seed": settings.seed}
            search |= {"objectives": dict(settings.objectives), "config": self._shared}
        self._ledger.begin(settings.overrides, search)

    def go_over_space(self) -> None:
        """Run the grid or the search that the overrides define.

        Raises:
            ConfigError: A job has an error. In this case, no job was started.
            Interrupted: A signal arrived.
        """
        settings = self.settings
        raise_errors(settings.errors())
        if settings.is_search:
            self._search()
        else:
            self.launch([settings.space.overrides(values) for values in settings.space.grid()], first=0)

    def launch(self, batch: Sequence[Sequence[str]], *, first: int) -> list[JobReturn]:
        """Run a batch of jobs. Hydra's sweepers call this method through the launcher.

        Args:
            batch: Overrides of each job.
            first: Number of the first job.

        Returns:
            Hydra's JobReturn of each job, with the monitored value of the job. The value is nan if the job failed.

        Raises:
            ConfigError: A job of the first batch has an error.
            Interrupted: A signal arrived.
        """
        rows = self.view.rows
        jobs = [
            self._find_known(self._jobs.compose(number, overrides)) for number, overrides in enumerate(batch, first)
        ]
        jobs = self._check_jobs(jobs, is_first=not rows)
        self.planned += jobs
        if not self._is_dry:
            self.view.declare(jobs)
            self._runner.run(Queue(self._group(jobs)))
        return [
            job_return(
                overrides=job.overrides,
                config=job.new_config() if job.error is None else None,
                directory=str(self._directory / rows[job.number].directory) if job.number in rows else "",
                value=rows[job.number].value if job.number in rows else 0.0,
            )
            for job in jobs
        ]

    def _check_jobs(self, jobs: Sequence[Job], *, is_first: bool) -> list[Job]:
        """Return the jobs after all checks.

        Args:
            jobs: Composed jobs.
            is_first: Whether these are the first jobs of the sweep. In this case, errors of jobs are raised, so that no
                job starts.

        Raises:
            ConfigError: One of the first jobs has an error.
        """
        # If the first jobs already have errors, skip the check that imports torch, because the sweep does not start.
        if not is_first or self._jobs.everything or not any(job.error for job in jobs):
            jobs = self._jobs.check(jobs)
        if is_first and any(job.error for job in jobs):
            raise ConfigError(list(dict.fromkeys(job_errors(jobs))))
        return list(jobs)

    def _find_known(self, job: Job) -> Job:
        """Return the job with the number and the run directory that it had in an earlier sweep in this directory.

        If the earlier sweep did not start the job, a job of a search is returned unchanged. A job of a grid gets the
        next free number.
        """
        if job.error is not None or not self._ledger.has_jobs:
            return job
        entry = self._ledger.claim(identity_of(job.plain))
        if entry is not None:
            directory = self._directory.absolute() / entry.directory
            return replace(job, number=entry.job, directory=directory, is_known=True)
        return job if self.settings.is_search else self._jobs.compose(self._ledger.next_number(), job.overrides)

    def _group(self, jobs: Sequence[Job]) -> list[list[Job]]:
        """Return a list of jobs for each process. A list with several jobs is a stack."""
        wanted, count = self.settings.values["stack"], sum(job.error is None for job in jobs)
        if wanted is not False and self._executor.stacks and count >= LEAST_STACKED:
            return group_jobs(jobs, is_left=self._runner.is_left, slots=self._executor.slots)
        if wanted is True and count:
            why = f"fewer than {LEAST_STACKED} jobs are known at a time, or the launcher cannot stack jobs"
            self.view.say_once(f"sweep.stack=true: jobs run in separate processes, because {why}")
        return [[job] for job in jobs]

    def _search(self) -> None:
        """Check jobs at the limits of all swept values, then run the jobs that the search proposes."""
        settings, directory = self.settings, self._directory
        corners = [
            self._jobs.compose(place, settings.space.overrides(values))
            for place, values in enumerate(settings.space.corners())
        ]
        corners = self._check_jobs(corners, is_first=True)
        if self._is_dry:
            self.planned = corners
            return
        self.view.declare(corners)
        slots = self._executor.slots
        search = Search(
            settings.drawn,
            sampler=settings.sampler,
            trials=settings.trials,
            seed=settings.seed,
            width=self._ledger.keep("width", 1 if slots == 1 else 2 * slots),
            objectives=settings.objectives,
            directory=directory,
        )

        def make(number: int, trial: int, values: Combination) -> Job:
            job = self._jobs.compose(number, settings.space.overrides(values))
            if job.error is not None:
                return job
            config = job.new_config()
            value = {"number": trial, "sweep": os.path.relpath(directory, job.directory)}
            with open_dict(config):
                config.sweep.trial = value
            # `plain` is changed, too, because a stack freezes these values.
            return replace(job, packed=pack(config), plain=with_changes(job.plain, {("sweep", "trial"): value}))

        def group(jobs: Sequence[Job]) -> list[list[Job]]:
            return self._group([self._find_known(job) for job in self._jobs.check(jobs)])

        repeated = settings.repeated
        repeats = [{}] if repeated is None else [{repeated.key: text} for text in repeated.texts]
        self._runner.run(Searched(search, make=make, repeats=repeats, group=group))


def compose_sweep(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    check: Callable[[DictConfig], Sequence[ErrorDetails]] = early_errors,
) -> Composition:
    """Compose the config that all jobs of a sweep share.

    Args:
        overrides: Overrides of the command.
        config_dir: Additional directory of configs.
        config_name: Name of the primary config.
        check: Function that returns errors found without torch; see exp.check.stages.compose.

    Raises:
        ConfigError: The shared config has errors that can be found without importing torch.
    """
    master = composition_of(overrides, config_dir=config_dir, config_name=config_name, multirun=True, check=check)
    refuse_settings(master)
    return master


def sweep(master: Composition, *, executor: Executor, check: Check) -> int:
    """Run every job of a sweep.

    Args:
        master: Result of `compose_sweep`.
        executor: Runs the jobs.
        check: Function that checks several configs; see `exp.sweeps.jobs.Check`.

    Returns:
        Exit status: 0 if every job was completed or pruned, 128 + n if signal n ended the sweep, and 1 otherwise.

    Raises:
        ConfigError: A job of the first batch has an error.
        RunError: No job was started, or a file cannot be written.
    """
    wanted = wanted_directory(master)
    resumed = _find_resumed(master, wanted)
    with handle_signals(_leave, over=(signal.SIG_DFL, signal.default_int_handler)):
        try:
            # The directory depends only on the shared config. Therefore, a swept `name` does not change the directory.
            directory = make_exclusively(wanted) if resumed is None else resumed
        except OSError as error:
            raise RunError(f"the sweep directory {wanted} cannot be created: {error.strerror or error}") from error
        with lock_sweep(directory):
            if resumed is not None:
                # Two levels: the run directories of the jobs, and the directories inside of them.
                remove_partial_files(directory, levels=2)
            return _run(master, directory, executor=executor, check=check)


def _find_resumed(master: Composition, wanted: Path) -> Path | None:
    """Return the directory of the sweep to resume. Return None if a new sweep has to start.

    Args:
        master: Result of `compose_sweep`.
        wanted: Directory that a new sweep would use.
    """
    resume = master.config.sweep.resume
    found = None if resume is None else find_sweep(resume, new=wanted)
    if found is None and resume == AUTO:
        print(f"sweep.resume=auto: there is no sweep in {os.path.relpath(sweeps_of(wanted))}, so a new sweep starts")
    return found


def _leave(signum: int, frame: FrameType | None) -> None:
    # Raise KeyboardInterrupt, because code that composes configs or draws values may catch every Exception.
    raise KeyboardInterrupt from Interrupted(signum=signum, checkpoint=None)


def _run(master: Composition, directory: Path, *, executor: Executor, check: Check) -> int:
    jobs: Sweep | None = None
    is_dry = bool(master.config.sweep.dry_run)
    try:
        jobs = Sweep(master=master, directory=directory, executor=executor, check=check, is_dry=is_dry)
        jobs.begin()
        run_sweeper(master.config, jobs, directory=directory)
    except (Interrupted, KeyboardInterrupt) as error:
        return _end_interrupted(error, jobs, directory)
    except Exception as error:
        with contextlib.suppress(OSError):  # raise the first error, not an error of writing the table
            _finish(jobs, directory)
        if isinstance(error, HydraException):
            raise ConfigError([error_of(error)]) from error
        if isinstance(error, OSError):
            what, here = describe_write_error(error.filename or directory, error), os.path.relpath(directory)
            raise RunError(f"the sweep ended: {what}. Resume it with sweep.resume={here}") from error
        raise
    if is_dry:
        _print_plan(jobs)
    try:
        _finish(jobs, directory)
    except KeyboardInterrupt as error:
        return _interruption_of(error).exit_status
    if not jobs.view.rows and not is_dry:
        if jobs.view.ended_early:
            raise RunError(f"the sweep was {jobs.view.ended_early}")
        raise ConfigError([no_job("hydra.sweeper")])
    return int(not jobs.view.is_whole)


def _end_interrupted(error: BaseException, jobs: Sweep | None, directory: Path) -> int:
    """Print the results of an interrupted sweep and the command to resume the sweep. Return the exit status."""
    interrupted = _interruption_of(error)
    print(f"{interrupted}\nthe sweep has ended", file=sys.stderr)
    _finish(jobs, directory)
    if interrupted.command is not None and jobs is not None and jobs.view.rows:
        print(f"resume     {interrupted.command}")
    return interrupted.exit_status


def _interruption_of(error: BaseException) -> Interrupted:
    """Return the Interrupted error in an exception: the exception itself or its cause.

    If neither is an Interrupted error, return a new one for SIGINT.
    """
    for one in (error, error.__cause__):
        if isinstance(one, Interrupted):
            return one
    return Interrupted(signum=signal.SIGINT, checkpoint=None)


def _print_plan(jobs: Sweep) -> None:
    """Print the jobs of a dry run."""
    what = "the corners of the space, all checked" if jobs.settings.is_search else "all checked"
    for job in jobs.planned:
        print(f"job {job.number}  {' '.join(f'{key}={value}' for key, value in job.swept.items())}".rstrip())
    count = len(jobs.planned)
    print(f"{count} job{'s' if count != 1 else ''}, {what}. No job was run, because of sweep.dry_run=true")


def _finish(jobs: Sweep | None, directory: Path) -> None:
    """Write and print the table. If no job was started, remove the directory of the sweep instead."""
    if jobs is None or not jobs.view.rows:
        _remove_unused(directory)
        return
    jobs.view.write()
    jobs.view.print()


def _remove_unused(directory: Path) -> None:
    """Remove the directory of a sweep without a started job, and its empty parent directories."""
    if (directory / JOBS).is_file():
        return  # keep the directory, because it contains jobs of an earlier sweep
    shutil.rmtree(directory, ignore_errors=True)
    # If another sweep runs at the same time, a directory may be in use or already removed.
    with contextlib.suppress(OSError):
        for path in directory.parents:
            if path == Path.cwd():
                return
            path.rmdir()
