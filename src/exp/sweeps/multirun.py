"""Run a sweep, `python -m exp.train -m ...`: from its overrides to its table."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

from hydra.errors import HydraException
from omegaconf import DictConfig

from exp.config.compose import composition_of
from exp.config.diagnosis import fault_of
from exp.config.freeze import make_exclusively
from exp.config.groups import PRIMARY
from exp.config.hydra_adapter import hydra_config, run_sweeper
from exp.errors import ConfigError, Interrupted, RunError
from exp.report import Report
from exp.sweeps.results import print_table
from exp.sweeps.sweep import Sweep

OUR_LAUNCHER = "hydra_plugins.exp.launcher.ExpLauncher"


def sweep(
    overrides: Sequence[str],
    *,
    run: Callable[[DictConfig], Report],
    validate: Callable[[DictConfig], None],
    config_dir: str | None = None,
    config_name: str = PRIMARY,
) -> int:
    """Runs every job that the sweeper names.

    run: runs one job, exp.run.fit. validate: checks one job, exp.check.plan.validate.
    Returns: the exit status: 0 where every job completed, else 1; 128 + n where signal n ended it, and 130 where a job
        left the program.
    Raises: ConfigError before the first job, where any job of the first batch has a fault.
    """
    master = composition_of(overrides, config_dir=config_dir, config_name=config_name, multirun=True)
    with hydra_config(master.config):
        wanted = Path(master.config.hydra.sweep.dir)
    try:
        # Fixed before the first job: with `-m name=a,b` the name is another in every job.
        directory = make_exclusively(wanted)
    except OSError as error:
        raise RunError(f"the sweep directory {wanted} cannot be made: {error.strerror or error}") from error
    jobs = Sweep(master=master, directory=directory, run=run, validate=validate)
    master.loader.tries_jobs = master.config.hydra.launcher._target_ != OUR_LAUNCHER
    try:
        run_sweeper(master.config, master.loader, jobs, directory=directory)
    except Interrupted as error:
        print(f"{error}\nthe sweep ends here", file=sys.stderr)
        return _finish(jobs, directory, error.exit_status)
    except (KeyboardInterrupt, SystemExit) as error:
        status = error.__cause__.exit_status if isinstance(error.__cause__, Interrupted) else 130
        return _finish(jobs, directory, status)
    except Exception as error:
        _finish(jobs, directory, 1)
        if not jobs.rows:
            _remove_unused(directory)
        if isinstance(error, HydraException):
            raise ConfigError([fault_of(error)]) from error
        raise
    return _finish(jobs, directory, 0)


def _finish(jobs: Sweep, directory: Path, status: int) -> int:
    jobs.collect()
    if jobs.rows:
        print()
        print_table(directory, jobs.rows)
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
