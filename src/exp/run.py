"""Run the frozen config of a run directory as one rank: build the objects, train, and write the report.

The stages of a run after the launch, with the module that implements each (start.py has the earlier stages):

5 build     build, from check.plan
6 fit       Lightning's Trainer, with callbacks for 7 log (engine.recording) and 8 save (engine.checkpointing)
9 report    run_report
"""

from __future__ import annotations

import logging
import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

import torch
from torch.nn.parameter import is_lazy

from exp.build import Parts, build
from exp.check.plan import Plan, adopt, read_resolved
from exp.check.starting_point import newest_of
from exp.config.frozen import read_overrides
from exp.data.in_memory import AnyDataset, samples_in
from exp.engine.checkpointing import note_metrics
from exp.engine.console import run_log
from exp.engine.datamodule import StagedData
from exp.engine.runtime import block_launches, set_threads, threads_of
from exp.errors import RunError, UserCodeError
from exp.files import hold_lock
from exp.launch.launcher import requeue
from exp.loggers.run_logger import RunLogger, description_of
from exp.run_report import Ongoing, Report, explain, forget_peak_memory, write_bad_end, write_end
from exp.signals import find_interruption, raise_on_signal
from exp.strategies.rank import ALONE, Rank

log = logging.getLogger(__name__)


def run(
    directory: Path | str,
    *,
    rank: Rank = ALONE,
    resume: Path | None = None,
    decided: Plan | None = None,
    join: Callable[[Plan], None] | None = None,
    requeues: int | None = None,
) -> Report:
    """Run the frozen config of a run directory as one rank, and return the report.

    Rank 0 writes the report, even if the run fails or is interrupted. The error that ended a run is raised again.

    Args:
        directory: Run directory.
        rank: Rank of this process. Default: the only rank of the run.
        resume: Checkpoint to resume from. None: the value of the key `resume` in the config.
        decided: Plan of the run. None: the plan is made from the frozen config.
        join: Function that joins the process group. Its argument is the plan. None: there is no process group to join.
        requeues: Maximum number of times that SLURM queues the job again after its time limit. If set, the run resumes
            from the newest checkpoint in the run directory. None: no limit if `runtime.autoresume` is true, otherwise
            the job is not queued again.
    """
    directory = Path(directory).absolute()
    resolved = read_resolved(directory) if decided is None else decided.resolved
    block_launches(resolved.settings.runtime.cuda_blocking)
    overrides = read_overrides(directory)
    forget_peak_memory()
    ongoing = Ongoing(directory, resolved.settings, overrides=overrides, world_size=rank.world_size)
    parts = None
    # If `decided` is None, the launcher has already measured the network's operators to choose the number of threads.
    operator = None if decided is None else decided.operator
    is_again = resolved.settings.runtime.autoresume or requeues is not None
    if resume is None and is_again:
        # A restart by torchrun or SLURM uses the same run directory, which may have newer checkpoints.
        resume = newest_of(directory).path
    logged = run_log(directory, rank=rank, not_written=ongoing.not_written)
    with logged, _hold_run(directory, rank), raise_on_signal() as raised_by_signal:
        try:
            if decided is None:
                decided = adopt(resolved, rank=rank)
            if join is not None:
                join(decided)
            parts = build(decided, directory, rank=rank, resume=resume)
            set_threads(threads_of(decided.settings.runtime.threads, operator=operator))
            _describe(decided, parts, directory, overrides=overrides)
            for line in _start_lines(decided, parts, overrides) if rank.is_first else ():
                log.info("%s", line)
            _work(decided, parts, resume)
            if parts.stopping.ended_by is not None:
                log.info("the training ended by %s", parts.stopping.ended_by)
            report = ongoing.end_report("pruned" if _is_pruned(parts) else "completed", parts=parts)
            if rank.is_first:
                write_end(report, parts.trainer.loggers)
        except BaseException as error:
            explained = explain(find_interruption(error, raised_by_signal), ongoing, parts=parts)
            if rank.is_first:
                write_bad_end(ongoing, explained, parts=parts)
                if is_again:
                    requeue(explained, most=requeues)
            raise explained from explained.__cause__
    return report


def _hold_run(directory: Path, rank: Rank) -> AbstractContextManager[None]:
    """Return a context in which rank 0 locks the run directory.

    The lock prevents other programs from resuming the run at the same time. On other ranks, the context has no effect.
    """
    return hold_lock(directory / "config.yaml") if rank.is_first else nullcontext()


def _start_lines(decided: Plan, parts: Parts, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the first lines of train.log: config, data, parameters and device."""
    settings, placement = decided.settings, decided.placement
    yield f"config: {shlex.join(overrides) or 'the defaults'}, seed {settings.seed}"
    if isinstance(parts.data, StagedData):
        data = parts.data.data
        sizes = ", ".join(f"{stage} {_size(data.part(stage))}" for stage in data.stages)
        yield f"data: {sizes}; batches of {data.batch_size}"
    else:
        yield f"data: {type(parts.data).__name__}"
    known = [parameter for parameter in parts.module.parameters() if not is_lazy(parameter)]
    trained = sum(parameter.numel() for parameter in known if parameter.requires_grad)
    held = sum(parameter.numel() for parameter in known) - trained
    yield f"parameters: {trained:,} trained" + (f", {held:,} frozen" if held else "")
    ranks = f", {placement.world_size} ranks" if placement.world_size > 1 else ""
    device = torch.cuda.get_device_name() if placement.accelerator == "cuda" else placement.accelerator
    yield (
        f"device: {device}{ranks}, strategy {placement.strategy}, precision {settings.precision.word}, "
        f"{torch.get_num_threads()} threads, torch {torch.__version__}"
    )


def _size(part: AnyDataset) -> str:
    try:
        return f"{samples_in(part):,}"
    except (TypeError, NotImplementedError, UserCodeError):
        # The size of a streamed data set is unknown. An error in a user's data set is reported later, by the data
        # loader.
        return "samples"


def _work(decided: Plan, parts: Parts, resume: Path | None) -> None:
    """Run the stages that the config selects: train, validate, predict and test.

    After training, the test stage uses the best weights. Without training, all stages use the weights from which the
    run starts.

    Args:
        decided: Plan of the run.
        parts: Objects of the run.
        resume: Checkpoint to resume from. None: the value of the key `resume` in the config.
    """
    settings, trainer = decided.settings, parts.trainer
    start = str(resume) if resume is not None else settings.resume
    if settings.train:
        _run_stage(parts, start, trainer.fit)
    if _is_pruned(parts):
        return
    if settings.validate:
        if "val" not in parts.stages:
            raise RunError("validate=true needs a validation split and, for a module, a validation_step")
        _run_stage(parts, start, trainer.validate, verbose=False)
    if settings.predict:
        _run_stage(parts, start, trainer.predict, return_predictions=False)
    if settings.test and "test" not in parts.stages:
        if decided.own is None or decided.own.has("test"):  # otherwise a note of the check reports it
            log.warning("the test stage is left out, because the data has no test split")
    elif settings.test:
        weights = _best_weights(decided, parts) if settings.train else start
        _run_stage(parts, weights, trainer.test, verbose=False)
        best = parts.checkpointing.best
        if best is not None and weights == best["checkpoint"]:
            note_metrics(best, parts.recording.latest, stage="test")


def _run_stage(parts: Parts, start: str | None, stage: Callable[..., object], **settings: bool) -> None:
    """Run one stage of Lightning's Trainer.

    Args:
        parts: Objects of the run.
        start: Path of the checkpoint to load before the stage. None: the stage uses the current weights.
        stage: Method of the Trainer, such as `fit`.
        **settings: Additional arguments of the method.
    """
    stage(parts.module, datamodule=parts.data, ckpt_path=start, weights_only=True, **settings)


def _is_pruned(parts: Parts) -> bool:
    return parts.pruning is not None and parts.pruning.has_pruned


def _best_weights(decided: Plan, parts: Parts) -> str | None:
    """Return the path of the best checkpoint; None if it does not exist.

    If it does not exist, the current weights are tested. A warning is then logged if the config enables best
    checkpoints.
    """
    path = parts.checkpointing.best_path
    if path.is_file():
        return str(path)
    if decided.settings.checkpoint.save_best and decided.settings.monitor is not None:
        why = "was never measured, so there is no" if parts.checkpointing.best is None else "no longer has a"
        log.warning("%s %s best.ckpt. The test uses the last weights", decided.settings.monitor, why)
    return None


def _describe(decided: Plan, parts: Parts, directory: Path, *, overrides: Sequence[str]) -> None:
    """Log the hyperparameters of the run. Loggers of exp also log the config, the command and the git revision."""
    description = description_of(decided.plain, directory, overrides=overrides)
    for logger in parts.trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.describe(description)
        else:
            logger.log_hyperparams(dict(description.hyperparameters))
