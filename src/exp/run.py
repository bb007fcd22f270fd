"""Run a frozen config as one rank, from its plan to its report.

5 build     build, from check.plan
6 fit       Lightning's Trainer; 7 log and 8 save are callbacks in it: engine.recording, engine.checkpointing
9 report    run_report

start.py has the steps before.
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
from exp.check.plan import Plan, adopt, frozen
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
    """Run a frozen config as one rank of it. Rank 0 writes the report, also of a run that fails or is interrupted.

    resume: a checkpoint to go on from, instead of the config's.
    decided: the plan, where this process has made it already. join: meets the other ranks, once there is a plan.
    requeues: of a job that its scheduler may start again: it goes on from the newest checkpoint here, and where its
        time is over, SLURM queues it again so many times. None: as runtime.autoresume says, which sets no bound.
    Raises: whatever ended the run.
    """
    directory = Path(directory).absolute()
    resolved = frozen(directory) if decided is None else decided.resolved
    block_launches(resolved.settings.runtime.cuda_blocking)
    overrides = read_overrides(directory)
    forget_peak_memory()
    ongoing = Ongoing(directory, resolved.settings, overrides=overrides, world_size=rank.world_size)
    parts = None
    # Of ranks it is known where their launcher has looked at the network.
    operator = None if decided is None else decided.operator
    is_again = resolved.settings.runtime.autoresume or requeues is not None
    if resume is None and is_again:
        # torchrun and SLURM start the ranks of the same directory again.
        resume = newest_of(directory).path
    logged = run_log(directory, rank=rank, not_written=ongoing.not_written)
    with logged, _alive(directory, rank), raise_on_signal() as raised_by_signal:
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
            report = ongoing.ended("pruned" if _is_pruned(parts) else "completed", parts=parts)
            if rank.is_first:
                write_end(report, parts.trainer.loggers)
        except BaseException as error:
            told = explain(find_interruption(error, raised_by_signal), ongoing, parts=parts)
            if rank.is_first:
                write_bad_end(ongoing, told, parts=parts)
                if is_again:
                    requeue(told, most=requeues)
            raise told from told.__cause__
    return report


def _alive(directory: Path, rank: Rank) -> AbstractContextManager[None]:
    """Lets other programs know that the run is still going on: none goes on from its checkpoints by itself."""
    return hold_lock(directory / "config.yaml") if rank.is_first else nullcontext()


def _start_lines(decided: Plan, parts: Parts, overrides: Sequence[str]) -> Iterator[str]:
    """Yield the lines of train.log about config, data, parameters and device."""
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
    unsized = " and more, of layers without a size yet" if len(known) < len(list(parts.module.parameters())) else ""
    yield f"parameters: {trained:,} trained" + (f", {held:,} frozen" if held else "") + unsized
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
        return "samples"  # a stream, or a length that its own code cannot tell: the loader says what is wrong with it


def _work(decided: Plan, parts: Parts, resume: Path | None) -> None:
    """Train, then test the best weights; or evaluate what the run starts from."""
    settings, trainer = decided.settings, parts.trainer
    start = str(resume) if resume is not None else settings.resume
    if settings.train:
        _on(parts, start, trainer.fit)
    if _is_pruned(parts):
        return
    if settings.validate:
        if "val" not in parts.stages:
            raise RunError("validate=true, and the data, or the module, has no val part; expected one")
        _on(parts, start, trainer.validate, verbose=False)
    if settings.predict:
        _on(parts, start, trainer.predict, return_predictions=False)
    if settings.test and "test" not in parts.stages:
        if decided.own is None or decided.own.has("test"):  # else the plan's notes have said it
            log.warning("the data has no test part: the test stage is left out")
    elif settings.test:
        weights = _best_weights(decided, parts) if settings.train else start
        _on(parts, weights, trainer.test, verbose=False)
        best = parts.checkpointing.best
        if best is not None and weights == best["checkpoint"]:
            note_metrics(best, parts.recording.latest, stage="test")


def _on(parts: Parts, start: str | None, stage: Callable[..., object], **settings: bool) -> None:
    """Run a stage of the Trainer from a checkpoint; None starts from the weights as they are."""
    stage(parts.module, datamodule=parts.data, ckpt_path=start, weights_only=True, **settings)


def _is_pruned(parts: Parts) -> bool:
    return parts.pruning is not None and parts.pruning.has_pruned


def _best_weights(decided: Plan, parts: Parts) -> str | None:
    """The best checkpoint; None, for the weights as they are, where there is none."""
    path = parts.checkpointing.best_path
    if path.is_file():
        return str(path)
    if decided.settings.checkpoint.save_best and decided.settings.monitor is not None:
        why = "was never measured, so no" if parts.checkpointing.best is None else "has no longer a"
        log.warning("%s %s best.ckpt: the last weights are tested", decided.settings.monitor, why)
    return None


def _describe(decided: Plan, parts: Parts, directory: Path, *, overrides: Sequence[str]) -> None:
    """Give the loggers the hyperparameters, the whole config, the command and the revision."""
    description = description_of(decided.plain, directory, overrides=overrides)
    for logger in parts.trainer.loggers:
        if isinstance(logger, RunLogger):
            logger.describe(description)
        else:
            logger.log_hyperparams(dict(description.hyperparameters))
