"""One run, from a composed config to its report. Read `fit` for the parent's part and `run` for a rank's."""

from __future__ import annotations

import logging
from pathlib import Path

from omegaconf import DictConfig, OmegaConf

from exp.build import Parts, build
from exp.config.chosen import chosen_values
from exp.config.freeze import freeze, read_frozen, read_overrides
from exp.engine.console import run_log
from exp.engine.launch import in_process, launch
from exp.engine.threads import set_threads
from exp.errors import ConfigError, ExpError, Interrupted, RunError
from exp.report import Ongoing, Report, Status, find_report, read_report, write_report
from exp.strategies.placement import Placement, adopted
from exp.strategies.rank import ALONE, Rank
from exp.tensorboard.logger import TensorBoardLogger
from exp.validation import examine

log = logging.getLogger(__name__)


def fit(config: DictConfig) -> Report:
    """Checks a composed config, freezes it in a run directory, and runs it there, in as many processes as it asks for.

    Returns: the report that is also in the run directory.
    Raises: ConfigError before anything is built; RunError, RankError for a run that fails; Interrupted for one that a
        signal ended with its state saved.
    """
    examination = examine(config)
    placement = examination.placement
    if examination.faults or placement is None:
        raise ConfigError(examination.faults)
    directory = freeze(config)
    restarts = config.launch.max_restarts
    if in_process(placement, max_restarts=restarts):
        return run(directory)
    ongoing = _ongoing(directory, config, world_size=placement.world_size)
    try:
        launch(directory, placement=placement, max_restarts=restarts, threads=config.runtime.threads)
    except ExpError as error:
        # A rank that was killed wrote no report, and a neighbour's report names the wrong reason.
        write_report(ongoing.ended(_status(error), error=error, before=find_report(directory)))
        raise
    return read_report(directory)


def run(directory: Path | str, *, rank: Rank = ALONE, resume: Path | None = None) -> Report:
    """Runs a frozen config as one rank of it. Rank 0 writes the report, also of a run that fails or is interrupted.

    resume: a checkpoint to go on from, instead of the config's.
    Raises: whatever ended the run.
    """
    directory = Path(directory).absolute()
    config = read_frozen(directory)
    ongoing = _ongoing(directory, config, world_size=rank.world_size)
    parts = None
    with run_log(directory, rank=rank):
        try:
            parts = build(config, directory, rank=rank, placement=_placement(config, rank))
            set_threads(config.runtime.threads, network=parts.module.network, batch_size=config.data.batch_size)
            _describe(parts, config, directory)
            _work(parts, config, resume)
        except BaseException as error:
            if rank.is_first:
                _end_badly(ongoing, parts, error)
            raise
        report = ongoing.ended("completed", parts=parts)
        if rank.is_first:
            _end(parts, report)
    return report


def _ongoing(directory: Path, config: DictConfig, *, world_size: int) -> Ongoing:
    return Ongoing(directory, config, overrides=read_overrides(directory), world_size=world_size)


def _placement(config: DictConfig, rank: Rank) -> Placement:
    return adopted(
        rank,
        config.strategy.name,
        devices=OmegaConf.to_container(config.launch)["devices"],
        nodes=config.launch.nodes,
        accelerator=config.launch.accelerator,
    )


def _work(parts: Parts, config: DictConfig, resume: Path | None) -> None:
    """Trains, then tests the best weights; or only one of the two."""
    start = str(resume) if resume is not None else config.resume
    trainer = parts.trainer
    if config.train:
        trainer.fit(parts.module, datamodule=parts.data, ckpt_path=start, weights_only=True)
    if config.test and "test" not in parts.data.data.stages:
        log.warning("the data has no test part: the test stage is left out")
    elif config.test:
        best = parts.checkpointing.best_path
        weights = str(best) if config.train and best.is_file() else start if not config.train else None
        trainer.test(parts.module, datamodule=parts.data, ckpt_path=weights, weights_only=True, verbose=False)


def _describe(parts: Parts, config: DictConfig, directory: Path) -> None:
    """What TensorBoard shows beside the curves: hyperparameters and the whole config as text."""
    values = chosen_values(config, read_overrides(directory))
    stages = [stage for stage in ("train", "val", "test") if stage in config.metric_stages]
    columns = dict.fromkeys([config.monitor, *(f"{name}/{stage}" for name in config.metrics for stage in stages)])
    for logger in parts.trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.log_hyperparams(values, metrics=list(columns))
            logger.log_text("config", f"```yaml\n{OmegaConf.to_yaml(config)}\n```")
        else:
            logger.log_hyperparams(values)


def _end(parts: Parts, report: Report) -> None:
    for logger in parts.trainer.loggers:
        if isinstance(logger, TensorBoardLogger):
            logger.end(report.status)
    write_report(report)


def _end_badly(ongoing: Ongoing, parts: Parts | None, error: BaseException) -> None:
    report = ongoing.ended(_status(error), parts=parts, error=error)
    # To train.log alone: whoever called says it on the screen.
    log.info("the run %s", report.status, exc_info=error)
    try:
        write_report(report)
        if parts is not None:
            _end(parts, report)
    except RunError as second:
        # The first error is the one to tell; where the disk is full, this one follows from it.
        log.error("%s", second)


def _status(error: BaseException) -> Status:
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
