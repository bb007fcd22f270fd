"""python -m exp.train [flags] [overrides]: one run, or with -m a sweep."""

from __future__ import annotations

import argparse
import contextlib
import importlib
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

from exp.errors import command_line_error, config_error, raise_errors
from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from pathlib import Path

    from omegaconf import DictConfig

    from exp.check.examination import Checked
    from exp.check.plan import Plan
    from exp.run_report import Report
    from exp.sweeps.executor import Executor, Prepare
    from exp.sweeps.job import JobProcesses


@command(interrupted="interrupted at once; if the run had begun, resume it from its last checkpoint")
def main(argv: Sequence[str]) -> int:
    """Train one run, or with -m all jobs of a sweep.

    Returns:
        Exit status: 0 on success; 2 if the config has errors; 1 if a run failed; 128 + n if signal n ended the command.
    """
    # These slow imports are inside the function, so that the command also handles Ctrl-C while they run.
    from exp.cli.command_line import answer_question, parse_arguments

    arguments = parse_arguments(argv)
    if answer_question(arguments):
        return 0
    refuse_ranks("exp.train")
    # The run continues if its output cannot be written, for example after `| head`.
    with survive_output_errors():
        return _sweep(arguments) if arguments.multirun else _run(arguments)


def refuse_ranks(command: str) -> None:
    """Raise ConfigError if torchrun started this process. Otherwise each rank would train a separate run.

    Args:
        command: Name of the command for the message, such as "exp.train".
    """
    if "TORCHELASTIC_RUN_ID" in os.environ:
        raise config_error(
            "torchrun",
            got=f"{command} in each rank",
            expected=f"{command} without torchrun, because {command} starts the ranks",
            fix=f"Write python -m {command} strategy=ddp, or on several machines torchrun ... -m exp.worker RUN_DIR",
        )


def _sweep(arguments: argparse.Namespace) -> int:
    from exp.sweeps.sweep import compose_sweep, sweep

    master = compose_sweep(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)

    # Imported after the composition of the config, so that its errors are reported without this slow import.
    from exp.sweeps.job import JobProcesses

    processes = JobProcesses(fit_job, validate)
    processes.start()  # imports torch while this process composes the jobs
    with contextlib.closing(executor_of(master.config, processes, prepare=prepare)) as executor:
        return sweep(master, executor=executor, check=processes.check)


def executor_of(config: DictConfig, processes: JobProcesses, *, prepare: Prepare) -> Executor:
    """Return the executor that hydra/launcher selects: the local executor, or the executor of a cluster.

    Args:
        config: Composed config, with its hydra node.
        processes: Processes that check, freeze and run jobs.
        prepare: Function that freezes a job. Other processes import the function by its name.
    """
    from omegaconf import OmegaConf

    from exp.config.clusters import CLUSTERS

    settings = cast("dict[str, Any]", OmegaConf.to_container(config.hydra.launcher, resolve=True))
    target, jobs = settings["_target_"], config.sweep.jobs
    if target not in CLUSTERS:
        from exp.sweeps.local import LocalExecutor

        return LocalExecutor(processes, jobs=jobs)
    module, _, name = CLUSTERS[target].executor.rpartition(".")
    executor = getattr(importlib.import_module(module), name)
    most = None if jobs == "auto" else jobs
    return cast("Executor", executor(settings=settings, processes=processes, prepare=prepare, jobs=most))


# The next functions import torch and lightning when they are called. Errors in the composition of the config are
# therefore reported before these slow imports.
def fit(config: DictConfig) -> Report:
    from exp import start

    return start.fit(config)


def fit_job(config: DictConfig) -> Report:
    from exp import start

    return start.fit_job(config)


def prepare(config: DictConfig) -> tuple[Plan, Path]:
    from exp import start

    return start.prepare(config)


def validate(config: DictConfig, before: Checked | None) -> Checked:
    from exp.check.examination import check_job

    return check_job(config, before)


def _run(arguments: argparse.Namespace) -> int:
    from exp.check.stages import compose, refuse_early
    from exp.config.frozen import frozen_yaml

    # A message is printed first, because the import takes most of the time before the first step.
    with pause_garbage_collection():
        config = compose(
            arguments.overrides,
            config_dir=arguments.config_dir,
            config_name=arguments.config_name,
        )
        refuse_early(config)
        _refuse_sweep_settings(arguments.overrides)
        importlib.import_module("exp.start")
    if config.print_config:
        print(frozen_yaml(config), end="")

    report = fit(config)

    from exp.run_report import print_report

    print_report(report)
    return 0 if report.status == "completed" else 1


def _refuse_sweep_settings(overrides: Sequence[str]) -> None:
    """Raise ConfigError if overrides of a single run set keys below `sweep`."""
    keys = [text.partition("=")[0].lstrip("+~") for text in overrides]
    expected, fix = "a sweep, because only sweeps use this key", "Put -m in front of the overrides"
    raise_errors(command_line_error(key, "set for one run", expected, fix) for key in keys if key.startswith("sweep."))
