"""Build the objects of a run for one rank from the plan of the run."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from torch import nn

from exp.check.plan import Plan
from exp.config.settings import Settings
from exp.construct import (
    build_entries,
    build_freezing,
    build_loggers,
    build_module,
    build_network,
    build_optimization,
    build_run_precision,
    build_starting_network,
    construct,
)
from exp.engine.checkpoint import LARGEST_COPY, AtomicCheckpointIO, ThreadedCheckpointIO
from exp.engine.checkpointing import Checkpointing, position_in
from exp.engine.console import progress
from exp.engine.datamodule import PlainData, RunData
from exp.engine.lean_loop import report_stop_iterations, run_several_at_once
from exp.engine.module import TrainingModule
from exp.engine.non_finite import UndoneForward
from exp.engine.own_data import BatchesOfLoaders
from exp.engine.own_module import OwnModule
from exp.engine.own_recording import OwnRecording
from exp.engine.predictions import Predictions
from exp.engine.progress import Limits, take_limits
from exp.engine.recording import Recording, StepRecording
from exp.engine.runtime import switch_on
from exp.engine.start_hooks import StartHooks
from exp.engine.stopping import StepWatch, Stopping
from exp.engine.unfreezing import Unfreezing
from exp.launch.lifecycle import hang_path
from exp.loggers.run_logger import has_begun
from exp.models.freezing import held_norms
from exp.optim.phase import Phase
from exp.precision.plugin import RunPrecision
from exp.shared_types import STAGES, compared_tag
from exp.strategies.rank import Rank
from exp.strategies.strategy import Strategy, trainer_arguments

if TYPE_CHECKING:
    from exp.engine.pruning import Pruning


@dataclass(frozen=True, kw_only=True)
class Parts:
    """Objects of a run on one rank.

    Attributes:
        trainer: Lightning's Trainer.
        module: LightningModule that the Trainer trains.
        network: Network of the module. In a run of a user's LightningModule, it is the module itself.
        data: LightningDataModule from which the Trainer gets its data loaders.
        stages: Stages that can run, because the data has a split and the module has a step method for them.
        recording: Callback that records losses and metrics.
        checkpointing: Callback that writes the checkpoints.
        stopping: Callback that ends the training.
        pruning: Callback that ends a job of a search early if its values are bad. None: the job is never ended early.
    """

    trainer: Trainer
    module: LightningModule
    network: nn.Module
    data: LightningDataModule
    stages: Sequence[str]
    recording: StepRecording
    checkpointing: Checkpointing
    stopping: Stopping
    pruning: Pruning | None = None


def build(plan: Plan, directory: Path, *, rank: Rank, resume: Path | None = None) -> Parts:
    """Build the objects of a planned run for one rank.

    Args:
        plan: Plan of the run.
        directory: Run directory.
        rank: Rank of this process.
        resume: Checkpoint to resume from. None: the value of the key `resume` in the config.
    """
    settings, placement = plan.settings, plan.placement
    arguments, limits = take_limits(_trainer_values(plan))
    runtime = settings.runtime
    own = build_entries(settings, "callbacks").values()
    share = placement.data_rank(rank.global_rank)
    checkpointing = _checkpointing(plan, directory)
    module, network, batches, recording = (
        _build_trained(plan, directory, limits=limits, rank=share, resume=resume)
        if plan.own is None
        else _build_own(plan, directory, limits=limits, rank=share)
    )
    report_stop_iterations([recording, *own])
    stopping = Stopping(limits=limits, checkpointing=checkpointing)
    watch = _watch(settings, directory, rank=rank)
    pruning = _pruning(settings, directory)
    predictions = Predictions(directory=directory, share=share) if settings.predict else None
    precision = build_run_precision(settings, device_type=placement.accelerator)
    precision.is_whole = plan.own is not None
    trainer = _trainer(
        plan,
        arguments,
        precision=precision,
        directory=directory,
        rank=rank,
        # Recording comes first, because other callbacks read the values that it records.
        callbacks=[
            recording,
            *_guards(plan, network),
            checkpointing,
            stopping,
            StartHooks(),
            *own,
            *(one for one in (pruning, predictions, watch) if one is not None),
        ],
    )
    precision.represent(module)
    if isinstance(module, TrainingModule):
        run_several_at_once(trainer, steps_per_execution=runtime.steps_per_execution)
        switch_on(network, runtime, runs=module.runs())
    if isinstance(batches, BatchesOfLoaders):
        batches.follow(trainer)
    return Parts(
        trainer=trainer,
        module=module,
        network=network,
        data=_lightning_data(batches),
        stages=_stages(plan),
        recording=recording,
        checkpointing=checkpointing,
        stopping=stopping,
        pruning=pruning,
    )


def _stages(plan: Plan) -> Sequence[str]:
    if plan.own is None:
        return tuple(plan.data.stages)
    there = [stage for stage in STAGES if plan.own.data_kind is not None or stage in plan.data.stages]
    # A limit of 0 disables a stage.
    limits = {stage: getattr(plan.settings.trainer, f"limit_{stage}_batches") for stage in there}
    return [stage for stage in there if plan.own.has(stage) and limits[stage] != 0]


def _build_trained(
    plan: Plan, directory: Path, *, limits: Limits, rank: int, resume: Path | None
) -> tuple[TrainingModule, nn.Module, RunData, Recording]:
    """Build the module and the data of a run that trains the model in the config.

    Returns:
        LightningModule.
        Network of the module.
        Data.
        Callback that records losses and metrics.
    """
    settings = plan.settings
    kind, more = _module_kind(plan)
    data = RunData(data=plan.data, rank=rank, world_size=plan.placement.data_ranks)
    start = resume or settings.resume
    if settings.train and start is not None and (position := position_in(start)) is not None:
        limits = replace(limits, resumed=position)
    module = kind(
        network=_network(plan, resume),
        objective=plan.objective,
        optimization=build_optimization(settings),
        metrics=plan.metrics,
        metric_stages=settings.metric_stages,
        seed=settings.seed,
        rank=rank,
        limits=limits,
        inputs=tuple(plan.spec.inputs),
        **more,
    )
    recording = Recording(hooks=plan.hooks, directory=directory, skips=settings.runtime.non_finite == "skip")
    return module, module.network, data, recording


def _build_own(
    plan: Plan, directory: Path, *, limits: Limits, rank: int
) -> tuple[LightningModule, nn.Module, PlainData | BatchesOfLoaders, OwnRecording]:
    """Build the module and the data of a run that trains a user's LightningModule.

    Returns:
        LightningModule.
        Network, which is the module itself.
        Data.
        Callback that records the values that the module logs.
    """
    settings, world_size = plan.settings, plan.placement.data_ranks
    module, loaders = build_module(settings), plan.data_module
    batches: PlainData | BatchesOfLoaders = (
        PlainData(data=plan.data, rank=rank, world_size=world_size)
        if loaders is None
        else BatchesOfLoaders(loaders, seed=settings.seed, rank=rank, world_size=world_size)
    )
    own = OwnModule(module, seed=settings.seed, rank=rank, limits=limits, batches=batches)
    chooses = loaders is not None and settings.runtime.threads is None
    recording = OwnRecording(module=own, hooks=plan.hooks, directory=directory, chooses_threads=chooses)
    return module, module, batches, recording


def _lightning_data(batches: LightningDataModule | BatchesOfLoaders) -> LightningDataModule:
    return batches.data if isinstance(batches, BatchesOfLoaders) else batches


def _checkpointing(plan: Plan, directory: Path) -> Checkpointing:
    return Checkpointing(
        directory=directory,
        monitor=plan.settings.monitor,
        mode=plan.settings.mode,
        config=plan.resolved.yaml,
        **{key: value for key, value in vars(plan.settings.checkpoint).items() if key != "async_"},
    )


def _guards(plan: Plan, network: nn.Module) -> list[Callback]:
    """Return the callbacks that unfreeze parameters and undo skipped steps. If the run needs neither, return []."""
    freezing = build_freezing(network, plan.settings)
    learning = [Unfreezing(freezing)] if freezing.changes or held_norms(network) else []
    return [*learning, *([UndoneForward()] if plan.settings.runtime.non_finite == "skip" else [])]


def _network(plan: Plan, resume: Path | None) -> nn.Module:
    if resume is not None or plan.settings.resume is not None:
        return build_network(plan.settings, plan.spec)
    return build_starting_network(plan.settings, plan.spec)


def _watch(settings: Settings, directory: Path, *, rank: Rank) -> StepWatch | None:
    seconds = settings.runtime.step_timeout
    if seconds is None:
        return None
    return StepWatch(seconds=seconds, path=hang_path(directory, rank=rank))


def _pruning(settings: Settings, directory: Path) -> Pruning | None:
    """Return the callback that ends a job of a search early; None if the run is not a job of a search with a pruner."""
    sweep, monitor = settings.sweep, settings.monitor
    if sweep.trial is None or sweep.pruner == "none" or monitor is None:
        return None
    from exp.engine.pruning import Pruning

    return Pruning(
        trial=sweep.trial["number"],
        monitor=compared_tag(monitor),
        pruner=sweep.pruner,
        sweep=(directory / sweep.trial["sweep"]).resolve(),
    )


def _module_kind(plan: Plan) -> tuple[type[TrainingModule], dict[str, tuple[Phase, ...]]]:
    """Return the class of the LightningModule that trains the model in the config.

    Returns:
        Class of the LightningModule.
        Additional arguments of the class, by name.
    """
    if plan.phases:
        from exp.engine.phased_module import PhasedModule

        return PhasedModule, {"phases": plan.phases}
    if isinstance(plan.strategy, Strategy) and plan.strategy.schedules_step:
        from exp.engine.pipelined_module import PipelinedModule

        return PipelinedModule, {}
    return TrainingModule, {}


def _trainer(
    plan: Plan,
    arguments: Mapping[str, Any],
    *,
    precision: RunPrecision,
    directory: Path,
    rank: Rank,
    callbacks: Sequence[Callback],
) -> Trainer:
    """Build Lightning's Trainer with exp's devices, precision plug-in and checkpoint writer.

    Args:
        plan: Plan of the run.
        arguments: Arguments of the Trainer that the config sets, by name.
        precision: Precision plug-in.
        directory: Run directory.
        rank: Rank of this process.
        callbacks: Callbacks of the run. exp's progress bar is added to them.
    """
    placed = trainer_arguments(plan.strategy, placement=plan.placement, rank=rank)
    # A user's data loaders do not split the data over the ranks, so Lightning adds a distributed sampler.
    placed["use_distributed_sampler"] = plan.data_module is not None
    runtime = plan.settings.runtime
    checkpoint_io = _checkpoint_io(plan.settings.checkpoint.async_)
    loggers = build_loggers(plan.settings, directory)
    # exp's progress bar is used unless the config has one, because Lightning's default bar redraws at each batch.
    has_bar = any(isinstance(callback, ProgressBar) for callback in callbacks)
    shown = progress(arguments["enable_progress_bar"] and not has_bar, rank=rank)
    # Layers of torchao 0.18 do not run under autocast in inference mode (test_fp8.py).
    mode = {"inference_mode": False} if precision.word.float8 else {}
    trainer = Trainer(
        **{**mode, **arguments, "enable_progress_bar": has_bar},
        **{**placed, "plugins": [*placed["plugins"], precision, checkpoint_io]},
        callbacks=[*callbacks, *shown],
        logger=list(loggers.values()),
        # Lightning writes checkpoints only if the config has a Checkpoint callback, because exp writes its own.
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        default_root_dir=str(directory),
        deterministic=runtime.deterministic,
        benchmark=runtime.cudnn_benchmark,
    )
    # The loggers are opened after the Trainer is built. Only then does Lightning open them on rank 0 alone.
    trainer.loggers = [logger for name, logger in loggers.items() if has_begun(logger, name=f"logger.{name}")]
    return trainer


def _checkpoint_io(by_thread: bool | None) -> AtomicCheckpointIO:
    if by_thread is False:
        return AtomicCheckpointIO()
    return ThreadedCheckpointIO(largest=None if by_thread else LARGEST_COPY)


def _trainer_values(plan: Plan) -> dict[str, Any]:
    """Return the arguments of the Trainer that the config sets. Objects are built from nodes with a `_target_`."""
    return {
        key: construct(value, key=f"trainer.{key}", allow=plan.settings.security.allow)
        for key, value in plan.plain["trainer"].items()
        if key != "_target_"
    }
