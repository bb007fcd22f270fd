"""Start a run: check a composed config, freeze it in a run directory, and launch the ranks.

The stages of a run up to the launch, with the module that implements each (run.py has the later stages):

1 compose   check.stages.compose, called before this module
2 check     check.resolution, check.examination
3 freeze    config.freeze
4 launch    launch.launcher if the run needs several processes, else run.run
"""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from exp.check.examination import examine, plan
from exp.check.first_samples import refuse_other_data
from exp.check.plan import Plan, read_resolved
from exp.check.resolution import resolve
from exp.check.starting_point import Found, newest_of, remove_leftovers
from exp.config.freeze import clear, freeze, take_directory
from exp.config.frozen import COMPOSITION, OUTPUT_DIR, read_overrides
from exp.config.plain_tree import text_values
from exp.config.reading import raw_values
from exp.engine.console import run_log
from exp.engine.runtime import block_launches, threads_of
from exp.errors import ExpError, RunError
from exp.launch.launcher import in_process, launch, requeue
from exp.run import run
from exp.run_report import Ongoing, Report, read_report, write_bad_end
from exp.strategies.rank import ALONE

log = logging.getLogger(__name__)


def fit(config: DictConfig, *, begin: Callable[[Path], Path] | None = None) -> Report:
    """Check a composed config, write it to a new run directory, and train. Processes are started as needed.

    Args:
        config: Composed config.
        begin: Function that writes a checkpoint into the run directory and returns the checkpoint's path. The run
            resumes from this checkpoint. The argument of the function is the run directory. None: the config decides
            how the run starts.

    Returns:
        The report, which is also written to the run directory.

    Raises:
        ConfigError: The config has errors. Nothing was built.
        RunError, RankError: The run failed.
        Interrupted: A signal ended the run. The state is saved.
    """
    decided, directory = prepare(config)
    start = None if begin is None else begin(directory)
    return _start(directory, decided, start)


def resume_run(directory: Path, found: Found | None = None) -> Report:
    """Resume an interrupted run in its run directory, from its newest intact checkpoint.

    Args:
        directory: Run directory.
        found: Checkpoints that `newest_of` found in the directory. None: `newest_of` is called.

    Returns:
        The report, as `fit` returns it.

    Raises:
        RunError: The run directory contains no intact checkpoint.
        Exception: Any error that `fit` raises.
    """
    decided = plan(read_resolved(directory))
    found = newest_of(directory) if found is None else found
    if found.path is None:
        raise RunError(f"{directory} has no intact checkpoint to resume from")
    with run_log(directory, rank=ALONE):
        for note in (*found.notes, f"resuming from {found.path}"):
            log.warning("%s", note)
    # The report of the interrupted run is removed, because it does not describe the resumed run.
    (directory / "report.json").unlink(missing_ok=True)
    return _start(directory, decided, found.path)


def fit_job(config: DictConfig) -> Report:
    """Run a job of a sweep. If the run directory contains a checkpoint, resume the job from it.

    The function returns the same report and raises the same errors as `fit`.
    """
    directory = Path(config[COMPOSITION].directory)
    if (directory / "config.yaml").is_file():
        found = newest_of(directory)
        if found.path is not None:
            return resume_run(directory, found)
        clear(directory)
        take_directory(config, directory)
    return fit(config)


def _start(directory: Path, decided: Plan, start: Path | None) -> Report:
    """Run a frozen config in this process or, if needed, in a new process for each rank.

    Args:
        directory: Run directory.
        decided: Plan of the run.
        start: Checkpoint to resume from. None: the config decides how the run starts.
    """
    placement, settings = decided.placement, decided.settings
    if in_process(placement, max_restarts=settings.launch.max_restarts, step_timeout=settings.runtime.step_timeout):
        return run(directory, decided=decided, resume=start)
    threads = threads_of(settings.runtime.threads, operator=decided.operator)
    del decided  # frees the memory of the data, because each rank reads the data itself
    ongoing = Ongoing(directory, settings, overrides=read_overrides(directory), world_size=placement.world_size)
    try:
        launch(
            directory,
            placement=placement,
            max_restarts=settings.launch.max_restarts,
            threads=threads,
            grace_seconds=settings.launch.grace_seconds,
            resume=start,
            allow=settings.security.allow,
        )
    except ExpError as error:
        # The report is written again, because a killed rank writes no report, and the report of another rank states the
        # wrong cause.
        write_bad_end(ongoing, error, has_ranks=True)
        if settings.runtime.autoresume:
            requeue(error)
        raise
    return read_report(directory)


def prepare(config: DictConfig) -> tuple[Plan, Path]:
    """Check a composed config, and write it to a new run directory (freeze it).

    Notes of the check are written to train.log.

    Returns:
        The plan of the run.
        The run directory.

    Raises:
        ConfigError: The config has errors. Nothing was written.
    """
    block_launches(OmegaConf.select(config, "runtime.cuda_blocking"))
    examined = examine(resolve(config))
    decided = examined.plan()
    notes = (*examined.notes, *refuse_other_data(decided))
    resolved = decided.resolved.config
    wanted = Path(resolved[COMPOSITION].directory)
    directory = freeze(resolved)
    texts = text_values(raw_values(resolved))
    if directory != wanted.absolute() and any(OUTPUT_DIR in text for _, text in texts):
        decided = plan(read_resolved(directory))
    remove_leftovers(directory, str(decided.settings.name))
    if notes:
        with run_log(directory, rank=ALONE):
            for note in notes:
                log.warning("%s", note)
    return decided, directory
