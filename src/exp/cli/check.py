"""python -m exp.check [flags] [overrides]: report the errors of a config, or print ok.

Nothing is trained, and no file is written.
"""

from __future__ import annotations

import argparse
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import ConfigError, RunError, raise_errors
from exp.lighter_imports import pause_garbage_collection
from exp.output import command

if TYPE_CHECKING:
    from exp.check.plan import Plan

PROGRAM = "python -m exp.check"


@command()
def main(argv: Sequence[str]) -> int:
    """Check the run that `python -m exp.train` would start with the same arguments. With -m, check all jobs of a sweep.

    Returns:
        Exit status: 0 if the config has no errors, 2 if it has errors.
    """
    # These slow imports are inside the function, so that the command also handles Ctrl-C while they run.
    from exp.cli.command_line import answer_question, parse_arguments

    arguments = parse_arguments(argv, program=PROGRAM)
    if answer_question(arguments):
        return 0
    print(_check_sweep(arguments) if arguments.multirun else _check_run(arguments))
    return 0


def _check_run(arguments: argparse.Namespace) -> str:
    from exp.config.compose import composition_of, job_config

    with pause_garbage_collection():
        from exp.check.examination import config_errors, examine
        from exp.check.first_samples import compare_with_data
        from exp.check.resolution import resolve

    where = {"config_dir": arguments.config_dir, "config_name": arguments.config_name}
    config = job_config(composition_of(arguments.overrides, **where, check=config_errors))
    examined = examine(resolve(config))
    decided = examined.plan()
    errors, notes = compare_with_data(decided)
    raise_errors(errors)
    for note in (*examined.notes, *notes):
        print(note, file=sys.stderr)
    return summary(decided)


def summary(plan: Plan) -> str:
    """Return a line that begins with `ok` and describes a plan: number of parameters, data, strategy and precision."""
    settings, placed = plan.settings, plan.placement
    ranks = f"{placed.world_size} rank{'s' if placed.world_size > 1 else ''} on {placed.accelerator}"
    placing = f"{placed.strategy} with {ranks}, {settings.precision.word}"
    if plan.own is not None:
        count = sum(parameter.numel() for parameter in plan.own.network.parameters())
        module, data = settings.module and settings.module["_target_"], settings.data["_target_"]
        return f"ok: {count:,} parameters of {module}, fed by {data}, {placing}"
    inputs = ", ".join(f"{name} {list(one.shape)} {one.dtype}" for name, one in plan.spec.inputs.items())
    return f"ok: {plan.shapes.parameters:,} parameters, {inputs}, batch {settings.data['batch_size']}, {placing}"


def _check_sweep(arguments: argparse.Namespace) -> str:
    """Return a line that begins with `ok` and states the number of jobs.

    Raises:
        ConfigError: Jobs have errors. The errors of all jobs are reported together.
        RunError: The jobs cannot be listed.
    """
    from hydra.errors import HydraException

    from exp.check.examination import config_errors
    from exp.cli.train import fit, validate
    from exp.config.hydra_adapter import error_of, run_sweeper
    from exp.sweeps.job import JobProcesses
    from exp.sweeps.local import LocalExecutor
    from exp.sweeps.sweep import Sweep, compose_sweep

    master = compose_sweep(
        arguments.overrides,
        config_dir=arguments.config_dir,
        config_name=arguments.config_name,
        check=config_errors,
    )
    processes = JobProcesses(fit, validate)
    # The directory is not created. The check accepts only a path below the working directory.
    jobs = Sweep(
        master=master,
        directory=Path.cwd() / "check",
        executor=LocalExecutor(processes),
        check=processes.check,
        is_dry=True,
    )
    try:
        # The directory is temporary, because Hydra's sweeper writes a file and the working directory may be read-only.
        with tempfile.TemporaryDirectory(prefix="exp-check-") as directory:
            run_sweeper(master.config, jobs, directory=Path(directory))
    except HydraException as error:
        raise ConfigError([error_of(error)]) from error
    except OSError as error:
        raise RunError(
            f"the jobs of the sweep cannot be listed: {error}. Set TMPDIR to a writable directory"
        ) from error
    return f"ok: {len(jobs.planned)} jobs"
