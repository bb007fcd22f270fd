"""A sweep, `python -m exp.train -m ...`: its jobs, all checked before the first starts, then run one after another."""

from __future__ import annotations

import contextlib
import json
import math
import os
import platform
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, cast

from hydra.core.override_parser.types import Override
from hydra.core.utils import JobReturn
from hydra.errors import HydraException
from omegaconf import DictConfig, OmegaConf

from exp.check.stages import config_faults, early_faults, refuse_early
from exp.config.compose import Composition, composition_of, job_config
from exp.config.freeze import COMPOSITION, make_exclusively
from exp.config.groups import PRIMARY
from exp.config.hydra_adapter import (
    fault_of,
    hydra_config,
    job_return,
    parse_override,
    run_sweeper,
    task_overrides,
    values_by_key,
)
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError
from exp.files import write_whole
from exp.secrets import redacted
from exp.sweeps.results import NOT_STARTED, Row, print_table, write_table

if TYPE_CHECKING:
    from exp.run_report import Report

MAX_FAULTS = 30
MAX_JOBS = 10_000
ROW_FILES = ".row.*.json"
OUR_LAUNCHER = "hydra_plugins.exp.launcher.ExpLauncher"
# Of the configs of several jobs, the faults of each; None where there is none.
Check = Callable[[Sequence[DictConfig]], Sequence[ConfigError | None]]


@dataclass(frozen=True, kw_only=True)
class Job:
    """One job of a batch. error: why it cannot be run; None where config can."""

    number: int
    overrides: tuple[str, ...]
    config: DictConfig | None
    error: ConfigError | None


class Sweep:
    """A sweep as Hydra's sweeper and our launcher share it.

    Plain data, so that a launcher of other processes can carry it.

    run: what runs one job, such as JobProcesses. check: the faults of each of several, such as JobProcesses.check.
    everything: where a job has faults that need no torch, look for the others, too.
    """

    def __init__(
        self,
        *,
        master: Composition,
        directory: Path,
        run: Callable[[DictConfig], Report],
        check: Check,
        everything: bool = False,
    ) -> None:
        self.directory, self.run, self.check, self.everything = directory, run, check, everything
        self.config_dir, self.config_name = master.config_dir, master.config_name
        self.hydra_overrides = unresolved(master.config.hydra.overrides.hydra)
        fixed = [parse_override(text) for text in task_overrides(master.config)]
        fixed = [line for line in fixed if not line.is_sweep_override()]
        self.fixed = {line.get_key_element() for line in fixed}
        self.typed_security = [_setting(line) for line in fixed if _is_security(line)]
        self.monitor, self.mode = master.config.monitor, master.config.mode
        self.repeat_over: str | None = master.config.sweep.repeat_over
        self.rows: list[Row] = []
        self._home = _process()

    @property
    def has_failures(self) -> bool:
        return any(row.status != "completed" for row in self.rows)

    def launch(self, batch: Sequence[Sequence[str]], *, first: int) -> list[JobReturn]:
        """Runs a batch of jobs, numbered from `first`.

        Returns: Hydra's JobReturn of each: its monitored value, nan where it failed.
        Raises: ConfigError before the first job of the sweep where any has a fault; Interrupted.
        """
        jobs = self.composed(batch, first=first)
        if not self.rows and any(job.error for job in jobs):
            raise ConfigError(job_faults(jobs))
        results = []
        for job in jobs:
            shown = " ".join(f"{key}={value}" for key, value in self._swept(job.overrides).items())
            print(f"\njob {job.number} ({job.number - first + 1} of {len(jobs)})  {shown}".rstrip(), flush=True)
            try:
                row = self._run(job)
            except (Interrupted, KeyboardInterrupt):
                self._leave_out(jobs[job.number - first + 1 :])
                raise
            directory = str(self.directory / row.directory)
            results.append(job_return(overrides=job.overrides, config=job.config, directory=directory, value=row.value))
        return results

    def composed(self, batch: Sequence[Sequence[str]], *, first: int) -> list[Job]:
        """The jobs of a batch, numbered from `first`, each composed and checked, none started."""
        return self._checked([self._composed(first + count, overrides) for count, overrides in enumerate(batch)])

    def __call__(self, config: DictConfig) -> float:
        """One job of a launcher that is not ours, such as joblib's, which has made the directory already.

        Returns: the monitored value, nan where the job failed.
        Raises: KeyboardInterrupt where the job was interrupted; its cause is what the job raised.
        """
        from hydra.core.hydra_config import HydraConfig

        hydra = HydraConfig.get()
        directory = Path(hydra.runtime.output_dir)
        if directory.is_dir() and not any(directory.iterdir()):
            directory.rmdir()
        (job,) = self._checked([self._composed(hydra.job.num, unresolved(hydra.overrides.task))])
        if job.config is not None:
            job.config[COMPOSITION].directory = str(directory)
        try:
            return self._run(job).value
        except Interrupted as error:
            # A launcher takes any Exception for a job that failed, and starts the next one.
            raise KeyboardInterrupt from error

    def collect(self) -> None:
        """Takes in the rows of jobs that ran in other processes, and writes the table."""
        files = [*self.directory.glob(ROW_FILES)]
        if not files:
            return
        self.rows += [Row(**json.loads(file.read_text(encoding="utf-8"))) for file in files]
        self.rows.sort(key=lambda row: row.job)
        write_table(self.directory, self.rows, repeat_over=self.repeat_over)
        for file in files:
            file.unlink()

    def _composed(self, number: int, overrides: Sequence[str]) -> Job:
        try:
            self._refuse_security(overrides)
            composition = composition_of(
                [*self.hydra_overrides, *overrides],
                config_dir=self.config_dir,
                config_name=self.config_name,
                check=config_faults if self.everything else early_faults,
            )
            config = job_config(composition, job=number, sweep=str(self.directory))
            if not self.everything:
                refuse_early(config)
        except ConfigError as error:
            return Job(number=number, overrides=tuple(overrides), config=None, error=error)
        return Job(number=number, overrides=tuple(overrides), config=config, error=None)

    def _checked(self, jobs: Sequence[Job]) -> list[Job]:
        """The same jobs; those with a fault have it in the place of a config."""
        configs = {job.number: job.config for job in jobs if job.config is not None}
        if len(configs) < len(jobs) and not self.rows and not self.everything:
            return list(jobs)  # the sweep does not start, and what needs torch is looked at when it might
        errors = dict(zip(configs, self.check(list(configs.values())), strict=True))
        found = ((job, errors.get(job.number)) for job in jobs)
        return [job if error is None else replace(job, config=None, error=error) for job, error in found]

    def _refuse_security(self, overrides: Sequence[str]) -> None:
        """Rejects security keys in a job that were not typed: a sweeper may have read them in a file."""
        for line in map(parse_override, overrides):
            if _is_security(line) and _setting(line) not in self.typed_security:
                key, value = _setting(line)
                cure = "Write 'security.allow=[PACKAGE]' on the command line, if you trust it"
                fault = Fault(key=key, got=f"{value} in a job", expected="one value for the whole sweep", cure=cure)
                raise ConfigError([fault])

    def _run(self, job: Job) -> Row:
        started = time.perf_counter()
        row = self._row(job, status="failed")
        try:
            row = self._finished(row, self._report(job))
        except (Interrupted, KeyboardInterrupt) as error:
            self._record(replace(row, status="interrupted", error=_first_line(error)), started)
            raise
        except ExpError as error:
            print(redacted(str(error)), flush=True)
            row = replace(row, error=_first_line(error))
        except (Exception, SystemExit) as error:
            # A bug in one job, or in a user's own layer, must not cost the other jobs.
            print(redacted(traceback.format_exc()), file=sys.stderr)
            row = replace(row, error=f"{type(error).__name__}: {_first_line(error)}")
        return self._record(row, started)

    def _row(self, job: Job, *, status: str) -> Row:
        """The row of a job without a result."""
        monitor, mode = (self.monitor, self.mode) if job.config is None else (job.config.monitor, job.config.mode)
        return Row(
            job=job.number,
            swept=self._swept(job.overrides),
            status=status,
            value=math.nan,
            monitor=monitor,
            mode=mode,
            directory=self._shown(job),
        )

    def _leave_out(self, jobs: Sequence[Job]) -> None:
        """The jobs that an interruption left: rows without a directory, which was never made."""
        if jobs:
            self.rows += [replace(self._row(job, status=NOT_STARTED), directory="") for job in jobs]
            write_table(self.directory, self.rows, repeat_over=self.repeat_over)

    def _report(self, job: Job) -> Report:
        if job.config is None:
            raise job.error or AssertionError("a job has a config or an error")
        return self.run(job.config)

    def _finished(self, row: Row, report: Report) -> Row:
        error = report.error["message"].strip().splitlines() if report.error else []
        return replace(
            row,
            status=report.status,
            value=report.monitored if report.status == "completed" else math.nan,
            step=None if report.best is None else report.best["step"],
            metrics=report.metrics,
            peak_memory_mib=report.peak_memory_mib,
            directory=os.path.relpath(report.directory, self.directory),
            error=error[0] if error else "",
        )

    def _record(self, row: Row, started: float) -> Row:
        row = replace(row, seconds=time.perf_counter() - started)
        if _process() == self._home:
            self.rows.append(row)
            write_table(self.directory, self.rows, repeat_over=self.repeat_over)
        else:
            # A launcher's copy of this sweep in a process of its own, whose rows nobody sees.
            write_whole(self.directory / ROW_FILES.replace("*", str(row.job)), json.dumps(asdict(row)))
        return row

    def _swept(self, overrides: Sequence[str]) -> dict[str, str]:
        parsed = [(parse_override(text), text) for text in overrides]
        swept = [(line, text) for line, text in parsed if line.get_key_element() not in self.fixed]
        return {line.key_or_group: text.partition("=")[2] for line, text in swept}

    def _shown(self, job: Job) -> str:
        """The job's directory as the table shows it: relative to the sweep's."""
        return "" if job.config is None else os.path.relpath(job.config[COMPOSITION].directory, self.directory)


def unresolved(overrides: object) -> list[str]:
    """Overrides as they were typed, interpolations in them left alone."""
    return cast(list[str], OmegaConf.to_container(overrides, resolve=False))


def job_faults(jobs: Sequence[Job]) -> list[Fault]:
    """The faults of all jobs, one that several share told once, with the numbers of those jobs."""
    where: dict[Fault, list[int]] = {}
    for job in jobs:
        for fault in job.error.faults if job.error else ():
            where.setdefault(fault, []).append(job.number)
    faults = []
    for fault, numbers in where.items():
        many = f"jobs {', '.join(map(str, numbers[:6]))}{' ...' if len(numbers) > 6 else ''}"
        label = "every job" if len(numbers) == len(jobs) > 1 else many if len(numbers) > 1 else f"job {numbers[0]}"
        if len(numbers) == 1:
            overrides = next(job.overrides for job in jobs if job.number == numbers[0])
            label += f" ({' '.join(overrides)})"
        faults.append(replace(fault, source=f"{label}, {fault.source}" if fault.source else label))
    if len(faults) > MAX_FAULTS:
        rest = len(faults) - MAX_FAULTS
        faults = [*faults[:MAX_FAULTS], Fault(key="sweep", got=f"{rest} more faults", expected="none")]
    return faults


def _is_security(line: Override) -> bool:
    return line.key_or_group.partition(".")[0] == "security"


def _setting(line: Override) -> tuple[str, str]:
    return line.key_or_group, "nothing" if line.is_delete() else str(line.value())


def _process() -> tuple[str, int]:
    return platform.node(), os.getpid()


def _first_line(error: BaseException) -> str:
    if isinstance(error, ConfigError):
        return "; ".join(str(fault) for fault in error.faults)
    # Without the command that goes on with the run, which a table has no room for.
    lines = str(error.args[0] if isinstance(error, ExpError) else error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def refuse_size(master: Composition) -> None:
    """Reject a sweep without a job, and one of more jobs than anybody waits for, before they are listed."""
    counts = values_by_key(master.config, master.loader)
    if counts is None:
        return
    faults = [_no_job(key) for key, count in counts.items() if count == 0]
    jobs = math.prod(counts.values())
    if jobs > MAX_JOBS:
        key = max(counts, key=lambda key: counts[key])
        got = f"{counts[key]:,} values, which makes {jobs:,} jobs"
        cure = "Take fewer values, or make several sweeps of it; to draw from many is for a sweeper of another kind"
        faults.append(Fault(key=key.lstrip("+~"), got=got, expected=f"{MAX_JOBS:,} jobs at most", cure=cure))
    if faults:
        raise ConfigError(faults)


def _no_job(key: str) -> Fault:
    return Fault(key=key.lstrip("+~"), got="no value to sweep over, so no job", expected="one value or more")


def compose_sweep(
    overrides: Sequence[str],
    *,
    config_dir: str | None = None,
    config_name: str = PRIMARY,
    everything: bool = False,
) -> Composition:
    """Compose what all jobs of a sweep share. everything: as of exp.check.stages.compose.

    Raises: ConfigError with the faults that no job can do without, found without importing torch.
    """
    check = config_faults if everything else early_faults
    master = composition_of(overrides, config_dir=config_dir, config_name=config_name, multirun=True, check=check)
    refuse_size(master)
    return master


def sweep(master: Composition, *, run: Callable[[DictConfig], Report], check: Check) -> int:
    """Runs every job that the sweeper names.

    master: of `compose_sweep`.
    run: runs one job, such as JobProcesses. check: the faults of each of several, such as JobProcesses.check.
    Returns: the exit status: 0 where every job completed, else 1; 128 + n where signal n ended it.
    Raises: ConfigError before the first job, where any job of the first batch has a fault.
    """
    with hydra_config(master.config):
        wanted = Path(master.config.hydra.sweep.dir)
    try:
        # Fixed before the first job: with `-m name=a,b` the name is another in every job.
        directory = make_exclusively(wanted)
    except OSError as error:
        raise RunError(f"the sweep directory {wanted} cannot be made: {error.strerror or error}") from error
    jobs = Sweep(master=master, directory=directory, run=run, check=check)
    master.loader.tries_jobs = master.config.hydra.launcher._target_ != OUR_LAUNCHER
    try:
        run_sweeper(master.config, master.loader, jobs, directory=directory)
    except Interrupted as error:
        print(f"{error}\nthe sweep ends here", file=sys.stderr)
        return _finish(jobs, directory, error.exit_status)
    except KeyboardInterrupt as error:
        status = error.__cause__.exit_status if isinstance(error.__cause__, Interrupted) else 130
        return _finish(jobs, directory, status)
    except Exception as error:
        _finish(jobs, directory, 1)
        if isinstance(error, HydraException):
            raise ConfigError([fault_of(error)]) from error
        raise
    status = _finish(jobs, directory, 0)
    if not jobs.rows:
        raise ConfigError([_no_job("hydra.sweeper")])
    return status


def _finish(jobs: Sweep, directory: Path, status: int) -> int:
    jobs.collect()
    if jobs.rows:
        print()
        print_table(directory, jobs.rows, repeat_over=jobs.repeat_over)
    else:
        _remove_unused(directory)
    return status or int(jobs.has_failures)


def _remove_unused(directory: Path) -> None:
    """Takes away the directory of a sweep of which nothing was started, and the empty ones above it."""
    (directory / "multirun.yaml").unlink(missing_ok=True)
    # Not empty, or gone already, where another sweep is at work beside this one.
    with contextlib.suppress(OSError):
        for path in (directory, *directory.parents):
            if path == Path.cwd():
                return
            path.rmdir()
