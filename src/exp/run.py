"""One run, from a composed config to its report. Read `fit` for the parent's part and `run` for a rank's."""

from __future__ import annotations

import logging
from functools import partial
from pathlib import Path

from omegaconf import DictConfig
from torch import nn

from exp.build import Parts, build, build_network, build_objective, network_on_meta, place, plain_config
from exp.config.chosen import chosen_values
from exp.config.freeze import freeze, read_frozen, read_overrides
from exp.engine.checkpoint import read_checkpoint
from exp.engine.console import run_log
from exp.engine.runtime import set_threads
from exp.errors import ConfigError, ExpError, Interrupted, RankError, RunError
from exp.hooks.allocations.out_of_memory import explained, is_out_of_memory
from exp.launch.launcher import in_process, last_checkpoint, launch
from exp.loggers.run_logger import Description, RunLogger, texts
from exp.plan.precision import report_precision
from exp.report import Ongoing, Report, Status, find_report, read_report, write_report
from exp.signals import interrupting
from exp.strategies.rank import ALONE, Rank
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
    for note in examination.notes:
        log.warning("%s", note)
    directory = freeze(config)
    restarts = config.launch.max_restarts
    if in_process(placement, max_restarts=restarts):
        return run(directory)
    ongoing = _ongoing(directory, config, world_size=placement.world_size)
    try:
        launch(
            directory,
            placement=placement,
            max_restarts=restarts,
            threads=config.runtime.threads,
            grace_seconds=config.launch.grace_seconds,
        )
    except ExpError as error:
        _say_how_to_go_on(ongoing, error)
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
    with run_log(directory, rank=rank), interrupting():
        try:
            parts = build(config, directory, rank=rank, placement=place(plain_config(config), rank=rank))
            set_threads(
                config.runtime.threads,
                network=parts.module.network,
                input_shape=parts.data.data.spec.input_shape,
                batch_size=-(-config.data.batch_size // parts.data.world_size),
            )
            _describe(parts, config, directory)
            if rank.is_first and config.train and config.precision.report:
                _report_precision(parts, config, directory, resume)
            _work(parts, config, resume)
            report = ongoing.ended("completed", parts=parts)
            if rank.is_first:
                _end(parts, report)
        except OSError as error:
            told = RunError(_unwritable(ongoing, error))
            if rank.is_first:
                _end_badly(ongoing, parts, told)
            raise told from error
        except BaseException as error:
            told = error
            if is_out_of_memory(error):
                told = RunError(explained(error, is_built=parts is not None))
                # Before it is raised, for the log tells where it came from.
                told.__cause__ = error
            if rank.is_first:
                _end_badly(ongoing, parts, told)
            raise told from told.__cause__
    return report


def _ongoing(directory: Path, config: DictConfig, *, world_size: int) -> Ongoing:
    return Ongoing(directory, config, overrides=read_overrides(directory), world_size=world_size)


def _work(parts: Parts, config: DictConfig, resume: Path | None) -> None:
    """Trains, then tests the best weights; or only one of the two."""
    start = str(resume) if resume is not None else config.resume
    trainer = parts.trainer
    if config.train:
        trainer.fit(parts.module, datamodule=parts.data, ckpt_path=start, weights_only=True)
    if config.test and "test" not in parts.data.data.stages:
        log.warning("the data has no test part: the test stage is left out")
    elif config.test:
        weights = _best_weights(parts, config) if config.train else start
        trainer.test(parts.module, datamodule=parts.data, ckpt_path=weights, weights_only=True, verbose=False)


def _report_precision(parts: Parts, config: DictConfig, directory: Path, resume: Path | None) -> None:
    """On networks of its own, with the weights that training begins with: nothing of the run is touched."""
    plain, start = plain_config(config), resume or config.resume

    def network() -> nn.Module:
        made = build_network(plain, parts.data.data.spec)
        if start is not None:
            states = read_checkpoint(start, map_location="cpu")["state_dict"]
            own = {name.removeprefix("network."): tensor for name, tensor in states.items()}
            made.load_state_dict({name: own[name] for name in made.state_dict()})
        return made

    report_precision(
        network_factory=network,
        objective=build_objective(plain),
        batch=next(iter(parts.data.data.loader("train", rank=parts.data.rank, world_size=parts.data.world_size))),
        precision=plain["precision"],
        device=parts.trainer.strategy.root_device,
        seed=config.seed,
        directory=directory,
    )


def _best_weights(parts: Parts, config: DictConfig) -> str | None:
    """The best checkpoint; None, for the weights as they are, where there is none."""
    path = parts.checkpointing.best_path
    if path.is_file():
        return str(path)
    if config.checkpoint.save_best:
        log.warning("%s was never measured, so no best.ckpt: the last weights are tested", config.monitor)
    return None


def _describe(parts: Parts, config: DictConfig, directory: Path) -> None:
    """What loggers show beside the curves: hyperparameters, the whole config, the command, the revision."""
    values = chosen_values(config, read_overrides(directory))
    if config.tags:
        values["tags"] = ", ".join(config.tags)
    stages = [stage for stage in ("train", "val", "test") if stage in config.metric_stages]
    columns = dict.fromkeys([config.monitor, *(f"{name}/{stage}" for name in config.metrics for stage in stages)])
    plain = plain_config(config)
    description = Description(
        hyperparameters=values,
        metrics=list(columns),
        config=plain,
        texts=texts(directory),
        tags=config.tags,
        network=partial(network_on_meta, plain, parts.data.data.spec),
    )
    for logger in parts.trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.describe(description)
        else:
            logger.log_hyperparams(values)


def _end(parts: Parts, report: Report) -> None:
    write_report(report)
    for logger in parts.trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.end(report.status)


def _end_badly(ongoing: Ongoing, parts: Parts | None, error: BaseException) -> None:
    _say_how_to_go_on(ongoing, error)
    report = ongoing.ended(_status(error), parts=parts, error=error)
    # To train.log alone: whoever called says it on the screen.
    log.info("the run %s", report.status, exc_info=error)
    try:
        if parts is None:
            write_report(report)
        else:
            _end(parts, report)
    except RunError as second:
        # The first error is the one to tell; where the disk is full, this one follows from it.
        log.error("%s", second)


def _say_how_to_go_on(ongoing: Ongoing, error: BaseException) -> None:
    if isinstance(error, Interrupted) and error.checkpoint is not None:
        error.command = ongoing.resume_command(error.checkpoint)
    elif isinstance(error, RankError) and (saved := last_checkpoint(ongoing.directory)) is not None:
        error.command = ongoing.resume_command(str(saved))


def _unwritable(ongoing: Ongoing, error: OSError) -> str:
    what = f"{error.filename or ongoing.directory}: {error.strerror or error}. The run ends here"
    saved = last_checkpoint(ongoing.directory)
    if saved is None:
        return f"{what}, before anything was saved. Make room there, or choose another place with hydra.run.dir"
    return f"{what}; what it had saved before is good. With room again, it goes on with\n  " + ongoing.resume_command(
        str(saved)
    )


def _status(error: BaseException) -> Status:
    return "interrupted" if isinstance(error, Interrupted | KeyboardInterrupt) else "failed"
