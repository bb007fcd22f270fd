"""A frozen config becomes the objects of a run, each made by `construct`; config ends here."""

from __future__ import annotations

import functools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import Checkpoint
from lightning.pytorch.strategies import Strategy as LightningStrategy
from omegaconf import DictConfig, OmegaConf
from torch import Tensor, nn

from exp.check.phase_rules import OPTIMIZER_DEFAULTS, SCHEDULER_DEFAULTS, whole_phase
from exp.config.slots import slot_of
from exp.config.targets import resolve
from exp.construct import construct
from exp.data.data import Data
from exp.data.randomness import initialisation
from exp.engine.checkpoint import AtomicCheckpointIO
from exp.engine.checkpointing import Checkpointing
from exp.engine.console import progress
from exp.engine.datamodule import RunData
from exp.engine.lean_loop import run_several_at_once
from exp.engine.module import TrainingModule
from exp.engine.phased_module import PhasedModule
from exp.engine.pipelined_module import PipelinedModule
from exp.engine.progress import take_limits
from exp.engine.recording import Recording
from exp.engine.runtime import switch_on
from exp.engine.stopping import Stopping
from exp.hooks.offers import Origin, Workload
from exp.models.flops import FlopCount
from exp.models.inference import example_inputs, materialise
from exp.objectives.objective import Objective
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase
from exp.plan.flops import flops_of_a_sample
from exp.precision.plugin import RunPrecision, build_precision
from exp.strategies.placement import Placement, adopted, placement
from exp.strategies.rank import Rank
from exp.strategies.strategy import Strategy, demand_of_lightning, trainer_arguments
from exp.types import DataSpec

SPEC_KEYS = ("input_shape", "input_dtype", "num_outputs")


@dataclass(frozen=True, kw_only=True)
class Parts:
    """What a run is made of: Lightning's Trainer, what it trains, and the callbacks that know how it went."""

    trainer: Trainer
    module: TrainingModule
    data: RunData
    recording: Recording
    checkpointing: Checkpointing
    stopping: Stopping


def build(config: DictConfig, directory: Path, *, rank: Rank, placement: Placement) -> Parts:
    """Builds every object that a frozen config names, for one rank.

    Raises: ConfigError where a constructor refuses its values.
    """
    plain = plain_config(config)
    arguments, limits = take_limits(construct_trainer_arguments(plain))
    data = build_data(plain)
    kind, more = _module_kind(plain)
    module = kind(
        network=build_network(plain, data.spec),
        objective=build_objective(plain),
        optimization=build_optimization(plain),
        metrics=build_entries(plain, "metrics"),
        metric_stages=plain["metric_stages"],
        seed=plain["seed"],
        rank=placement.data_rank(rank.global_rank),
        limits=limits,
        **more,
    )
    origin = Origin(config=OmegaConf.to_yaml(config), allow=tuple(_allow(plain)))
    hooks = build_entries(plain, "hooks", workload=_workload(plain, data.spec, placement), origin=origin)
    recording = Recording(hooks=hooks, directory=directory)
    checkpointing = Checkpointing(
        directory=directory,
        monitor=plain["monitor"],
        mode=plain["mode"],
        config=origin.config,
        **plain["checkpoint"],
    )
    stopping = Stopping(limits=limits, checkpointing=checkpointing)
    trainer = build_trainer(
        plain,
        arguments,
        directory=directory,
        rank=rank,
        placement=placement,
        # Recording first, because the others look at the values that it publishes.
        callbacks=[recording, *build_entries(plain, "callbacks").values(), checkpointing, stopping],
    )
    trainer.precision_plugin.represent(module)
    switch_on(module, plain["runtime"])
    return Parts(
        trainer=trainer,
        module=module,
        data=RunData(data=data, rank=placement.data_rank(rank.global_rank), world_size=placement.data_ranks),
        recording=recording,
        checkpointing=checkpointing,
        stopping=stopping,
    )


def _module_kind(plain: Mapping[str, Any]) -> tuple[type[TrainingModule], dict[str, Any]]:
    """Its class, and what this takes beside a TrainingModule's parameters."""
    if plain["phases"]:
        return PhasedModule, {"phases": build_phases(plain)}
    strategy = build_strategy(plain)
    return PipelinedModule if isinstance(strategy, Strategy) and strategy.schedules_step else TrainingModule, {}


def _workload(plain: Mapping[str, Any], spec: DataSpec, placement: Placement) -> Workload:
    """What a step computes, counted when somebody asks."""

    def flops(data: Any) -> FlopCount:
        return flops_of_a_sample(
            data,
            network_factory=functools.partial(build_network, plain, spec, device="meta"),
            objective=build_objective(plain),
            phases=build_phases(plain),
        )

    devices = placement.world_size * placement.devices_per_rank
    return Workload(precision=plain["precision"]["word"], devices=devices, flops=flops)


def build_trainer(
    plain: Mapping[str, Any],
    arguments: Mapping[str, Any],
    *,
    directory: Path,
    rank: Rank,
    placement: Placement,
    callbacks: Sequence[Callback],
) -> Trainer:
    """Lightning's Trainer, placed, with our precision and checkpoint files in the place of its own."""
    placed = trainer_arguments(build_strategy(plain), placement=placement, rank=rank)
    runtime, precision = plain["runtime"], build_run_precision(plain, device_type=placement.accelerator)
    loggers = build_entries(plain, "logger", directory=str(directory), save_dir=str(directory))
    # The bar is ours: Lightning's redraws at every batch.
    shown = progress(arguments["enable_progress_bar"], rank=rank)
    trainer = Trainer(
        **{**arguments, "enable_progress_bar": False},
        **{**placed, "plugins": [*placed["plugins"], precision, AtomicCheckpointIO()]},
        callbacks=[*callbacks, *shown],
        logger=list(loggers.values()),
        # Lightning's own checkpoints only where the user's callbacks ask for them.
        enable_checkpointing=any(isinstance(callback, Checkpoint) for callback in callbacks),
        default_root_dir=str(directory),
        deterministic=runtime["deterministic"],
        benchmark=runtime["cudnn_benchmark"],
    )
    run_several_at_once(trainer, steps_per_execution=runtime["steps_per_execution"])
    return trainer


def build_run_precision(plain: Mapping[str, Any], *, device_type: str) -> RunPrecision:
    """The precision plugin, with the scaler that it asks for and runtime.matmul."""
    word, keep, scaler = (plain["precision"][key] for key in ("word", "keep", "scaler"))
    return build_precision(word, keep=keep, **scaler, device_type=device_type, matmul=plain["runtime"]["matmul"])


def build_strategy(plain: Mapping[str, Any]) -> Strategy | LightningStrategy:
    """Cheap: nothing is placed and no process started yet."""
    node = plain["strategy"]
    if not issubclass(resolve(node["_target_"], allow=_allow(plain)), Strategy):
        # The name is the report's word; a class of Lightning's own takes none, or anything.
        node = {key: value for key, value in node.items() if key != "name"}
    return construct(node, key="strategy", allow=_allow(plain))


def place(plain: Mapping[str, Any], *, rank: Rank | None = None) -> Placement:
    """Where a run goes; with a rank, what the launcher that started it made.

    Raises: ConfigError.
    """
    strategy, launch = build_strategy(plain), plain["launch"]
    where = {
        "devices": launch["devices"],
        "nodes": launch["nodes"],
        "accelerator": launch["accelerator"],
        "backend": launch["backend"],
        "demand": strategy.demand if isinstance(strategy, Strategy) else demand_of_lightning(strategy),
    }
    name = plain["strategy"]["name"]
    return placement(name, **where) if rank is None else adopted(rank, name, **where)


def construct_trainer_arguments(plain: Mapping[str, Any]) -> dict[str, Any]:
    """The trainer node's values, its own `_target_` left out: the Trainer is called by build_trainer alone."""
    return {
        key: construct(value, key=f"trainer.{key}", allow=_allow(plain))
        for key, value in plain["trainer"].items()
        if key != "_target_"
    }


def plain_config(config: DictConfig) -> dict[str, Any]:
    """The config as plain dicts and lists with every interpolation resolved."""
    return OmegaConf.to_container(config, resolve=True, throw_on_missing=True)


def describe(config: DictConfig) -> bool:
    """Fills in, in place, what a data set's YAML leaves to the data: input shape and dtype, outputs, classes.

    Builds the data set only where one of them is null.

    Returns: whether there was anything to fill in.
    Raises: ConfigError, RunError where the data set cannot be built.
    """
    if all(config.data[key] is not None for key in SPEC_KEYS):
        return False
    # Resolved alone: other nodes may interpolate what is filled in here.
    data = OmegaConf.to_container(config.data, resolve=True, throw_on_missing=True)
    spec = build_data({"data": data, "seed": config.seed, "security": OmegaConf.to_container(config.security)}).spec
    config.data.input_shape = list(spec.input_shape)
    config.data.input_dtype = spec.input_dtype
    config.data.num_outputs = spec.num_outputs
    config.data.num_classes = spec.num_classes
    return True


def build_data(plain: Mapping[str, Any]) -> Data:
    return construct(plain["data"], key="data", allow=_allow(plain), seed=plain["seed"])


def build_network(plain: Mapping[str, Any], spec: DataSpec, *, device: str = "cpu") -> nn.Module:
    """The model, seeded, with its lazy layers sized by the data.

    device: "meta" builds it without memory, to check shapes.
    """
    initialisation(plain["seed"])
    with torch.device(device):
        network = construct(plain["model"], key="model", allow=_allow(plain))
        materialise(network, example_inputs(spec, device=device))
    return network


def network_on_meta(plain: Mapping[str, Any], spec: DataSpec) -> tuple[nn.Module, tuple[Tensor, ...]]:
    """The model without memory, and inputs that fit it: to be looked at."""
    return build_network(plain, spec, device="meta"), example_inputs(spec, device="meta")


def build_objective(plain: Mapping[str, Any]) -> Objective:
    """The weighted sum of the named terms; a bare loss becomes a term of weight 1."""
    return Objective(terms=build_entries(plain, "objective"))


def build_optimization(
    plain: Mapping[str, Any], *, optimizer: str = "optimizer", scheduler: str = "scheduler"
) -> Optimization:
    """optimizer, scheduler: the dotted keys of their nodes."""
    allow = _allow(plain)
    own = {**OPTIMIZER_DEFAULTS, **_node(plain, optimizer)}
    when = {**SCHEDULER_DEFAULTS, **_node(plain, scheduler)}
    return Optimization(
        optimizer_factory=construct({**target_values(own, optimizer), "_partial_": True}, key=optimizer, allow=allow),
        groups=own["groups"],
        exempt_from_decay=own["exempt_from_decay"],
        schedule_factory=construct({**target_values(when, scheduler), "_partial_": True}, key=scheduler, allow=allow),
        interval=when["interval"],
        monitor=when["monitor"],
    )


def build_phases(plain: Mapping[str, Any]) -> list[Phase]:
    """In their order; an optimizer or a schedule that is not a phase's own is made from the one at the top."""
    phases = []
    for name, entry in plain["phases"].items():
        settings = whole_phase(entry)
        keys = {node: f"phases.{name}.{node}" for node in ("optimizer", "scheduler") if settings[node] is not None}
        owns = {f"owns_{node}": node in keys for node in ("optimizer", "scheduler")}
        rest = {key: value for key, value in settings.items() if key not in ("optimizer", "scheduler")}
        phases.append(Phase(name=name, optimization=build_optimization(plain, **keys), **owns, **rest))
    return phases


def target_values(node: Mapping[str, Any], key: str) -> dict[str, Any]:
    """The node at a key without the keys that exp reads itself: what its target is called with."""
    reserved = slot_of(key).reserved
    return {name: value for name, value in node.items() if name not in reserved}


def _node(plain: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    return functools.reduce(lambda node, name: node[name], key.split("."), plain)


def build_entries(plain: Mapping[str, Any], group: str, **offers: Any) -> dict[str, Any]:
    """Every named entry of a group of many, such as hooks."""
    allow = _allow(plain)
    return {name: construct(node, key=f"{group}.{name}", allow=allow, **offers) for name, node in plain[group].items()}


def _allow(plain: Mapping[str, Any]) -> Sequence[str]:
    return plain["security"]["allow"]
