"""The plan of a run: the objects that exp builds from the config before the run starts.

These objects are placement, strategy, objective, phases, metrics and hooks, and the traces of the network's forwards on
the meta device. Each rank computes the plan from config.yaml in the run directory. exp.check.examination uses the same
objects to find and explain the errors of a config.
"""

from __future__ import annotations

import functools
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from omegaconf import DictConfig

from exp.check.meta_forward import MetaForward, run_on_meta
from exp.config.frozen import frozen_yaml, read_frozen
from exp.config.settings import PrecisionSettings, Settings, settings_of
from exp.errors import ErrorDetails, RunError
from exp.shared_types import DataSpec

if TYPE_CHECKING:
    from lightning.pytorch import LightningDataModule
    from lightning.pytorch.strategies import Strategy as LightningStrategy
    from torch import nn

    from exp.check.own_training import OwnTraining
    from exp.data.data import Data
    from exp.hooks.hook import Hook
    from exp.models.flop_count import FlopCount
    from exp.models.forward_trace import Arithmetic
    from exp.objectives.measures import Measure
    from exp.objectives.objective import Objective
    from exp.optim.phase import Phase
    from exp.strategies.placement import Machine, Placement
    from exp.strategies.rank import Rank
    from exp.strategies.strategy import Strategy


@dataclass(frozen=True, kw_only=True)
class Resolved:
    """A config that also contains the values that depend on the data.

    Attributes:
        config: Copy of the given config with four values of the data: shape, dtype, number of outputs, number of
            classes. The run stores this copy in config.yaml.
        plain: Values of the config as dicts and lists, with resolved interpolations. UNKNOWN replaces a value that
            could not be read.
        errors: Errors of values, keys, rules, targets and parameters. Default: no errors.
        notes: Remarks on the search for a checkpoint. Default: no remarks.
        data: The data set with its splits. None (default) if the config was complete without building the data set.
    """

    config: DictConfig
    plain: Mapping[str, Any]
    errors: tuple[ErrorDetails, ...] = ()
    notes: tuple[str, ...] = ()
    data: Data | None = None

    @functools.cached_property
    def settings(self) -> Settings:
        """The config as typed objects."""
        return settings_of(self.plain)

    @functools.cached_property
    def yaml(self) -> str:
        """Text of config.yaml."""
        return frozen_yaml(self.config)


@dataclass(frozen=True, kw_only=True)
class Plan:
    """The objects that exp builds from a config before a run starts.

    Each property builds its object at the first access and then returns the same object. The network is on the meta
    device, so it allocates no memory. A process has a single plan, and no code changes the plan.

    Attributes:
        resolved: Config from which all objects are built.
        rank: Rank of this process, if a launcher started the process. None (default) computes the placement from the
            config.
        machine: Description of the machine on which the run takes place. None (default): this machine.
    """

    resolved: Resolved
    rank: Rank | None = None
    machine: Machine | None = None

    @property
    def plain(self) -> Mapping[str, Any]:
        """Values of the config as dicts and lists."""
        return self.resolved.plain

    @property
    def settings(self) -> Settings:
        """The config as typed objects."""
        return self.resolved.settings

    @functools.cached_property
    def strategy(self) -> Strategy | LightningStrategy:
        """The strategy of the run."""
        from exp.construct import build_strategy

        return build_strategy(self.settings)

    @functools.cached_property
    def placement(self) -> Placement:
        """The assignment of ranks to devices."""
        return place(self.settings, self.strategy, rank=self.rank, machine=self.machine)

    @functools.cached_property
    def own(self) -> OwnTraining | None:
        """The user's LightningModule. None if the run trains a model of exp.

        If there is a LightningModule, objective, phases and metrics are empty, and shapes are unknown.
        """
        if self.settings.module is None:
            return None
        from exp.check.own_training import OwnTraining

        return OwnTraining(settings=self.settings)

    @functools.cached_property
    def spec(self) -> DataSpec:
        """The inputs of the network, and the number of outputs per sample."""
        return DataSpec.of(self.settings.data)

    @functools.cached_property
    def data(self) -> Data:
        """The data set with its splits."""
        from exp.construct import build_data

        return build_data(self.settings) if self.resolved.data is None else self.resolved.data

    @functools.cached_property
    def data_module(self) -> LightningDataModule | None:
        """The user's LightningDataModule. None if the run uses the data of exp."""
        from exp.construct import build_data_module

        return None if self.own is None or self.own.data_kind is None else build_data_module(self.settings)

    @property
    def network(self) -> nn.Module | None:
        """The network of the run on the meta device. None if the network cannot be built on this device."""
        return self.shapes.network if self.own is None else self.own.network

    @functools.cached_property
    def objective(self) -> Objective:
        from exp.construct import build_objective

        return build_objective(self.settings)

    @functools.cached_property
    def phases(self) -> tuple[Phase, ...]:
        from exp.construct import build_phases

        return tuple(build_phases(self.settings))

    @functools.cached_property
    def metrics(self) -> Mapping[str, Measure]:
        from exp.construct import build_measures

        return build_measures(self.settings)

    @functools.cached_property
    def shapes(self) -> MetaForward:
        """The network on the meta device, with the traces of its forwards."""
        from exp.construct import build_unsized_network, prepare

        return run_on_meta(
            network_factory=functools.partial(build_unsized_network, self.settings, device="meta"),
            spec=self.spec,
            objective=self.objective,
            phases=self.phases,
            prepare=functools.partial(prepare, settings=self.settings),
            arithmetic=_arithmetic(self.settings.precision),
        )

    @functools.cached_property
    def operator(self) -> float | None:
        """Typical number of multiply-adds of a single operator in the forward of a rank's samples.

        The number is the mean over all operators, weighted by their multiply-adds. For a user's LightningModule and for
        a network that cannot be traced, the number is an upper bound. It is None if the network or the batch size is
        unknown.
        """
        network = self.network
        if network is None or self.data_module is not None:
            return None
        samples: int = -(-self.settings.data["batch_size"] // self.placement.data_ranks)
        traces = self.shapes.traces.values() if self.own is None else ()
        sizes = [size for trace in traces for size in trace.multiply_adds]
        if sizes:
            return samples * sum(size**2 for size in sizes) / sum(sizes)
        from exp.engine.runtime import operator_at_most

        return samples * operator_at_most(network, positions=self.spec.positions)

    @functools.cached_property
    def hooks(self) -> Mapping[str, Hook]:
        """The hooks by name. Each hook can compute the FLOPs of a step."""
        from exp.construct import build_entries
        from exp.hooks.hook import Workload

        settings, placement = self.settings, self.placement
        devices = placement.world_size * placement.layers
        workload = Workload(precision=settings.precision.word, devices=devices, flops=self._flops)
        return build_entries(settings, "hooks", workload=workload)

    def _flops(self, data: object) -> FlopCount:
        from exp.check.step_flops import flops_of_a_sample
        from exp.construct import build_objective, build_phases

        if self.own is not None:
            raise RunError("the FLOPs of the training_step of your own module are unknown")
        # Build a second objective, because the objective of the run may be on another device.
        objective, phases, network = build_objective(self.settings), build_phases(self.settings), self.shapes.network
        if network is None:
            raise RunError("the network cannot be built without memory for its weights, so its FLOPs are not counted")
        inputs = tuple(self.spec.inputs)
        return flops_of_a_sample(data, network=network, objective=objective, phases=phases, inputs=inputs)


def read_resolved(directory: Path | str) -> Resolved:
    """Return the config of a run directory.

    The config is not checked, because it was checked before it was stored in the run directory.
    """
    from exp.construct import plain_config

    config = read_frozen(directory)
    return Resolved(config=config, plain=plain_config(config))


def adopt(resolved: Resolved, *, rank: Rank) -> Plan:
    """Return the plan of a rank that a launcher started.

    Args:
        resolved: Config from the run directory.
        rank: Rank of this process.

    Raises:
        ConfigError: The launcher started a different number of ranks than the config requests.
    """
    decided = Plan(resolved=resolved, rank=rank)
    parts = ("placement", "hooks") if decided.own else ("placement", "objective", "phases", "metrics", "hooks")
    for part in parts:
        getattr(decided, part)  # use the order of the check, because constructors may draw random numbers
    return decided


def place(
    settings: Settings,
    strategy: Strategy | LightningStrategy,
    *,
    rank: Rank | None = None,
    machine: Machine | None = None,
) -> Placement:
    """Return the assignment of a run's ranks to devices. For a launched rank, return the assignment of the launcher.

    Args:
        settings: Config of the run.
        strategy: Strategy of the run.
        rank: Rank of this process. None (default) computes the assignment from the config.
        machine: Description of the machine on which the run takes place. None (default): this machine.

    Raises:
        ConfigError: The machine has too few devices.
    """
    from exp.strategies.placement import adopt_placement, placement
    from exp.strategies.strategy import Strategy, demand_of_lightning

    launch = settings.launch
    where: dict[str, Any] = {
        "devices": launch.devices,
        "nodes": launch.nodes,
        "accelerator": launch.accelerator,
        "backend": launch.backend,
        "demand": strategy.demand if isinstance(strategy, Strategy) else demand_of_lightning(strategy),
    }
    name = settings.strategy["name"]
    if rank is None:
        return placement(name, **where, machine=machine)
    return adopt_placement(rank, name, **where, machine=machine)


def _arithmetic(precision: PrecisionSettings) -> Arithmetic:
    """Return the dtypes in which a run computes, for the trace of the forward.

    The trace reports mixed dtypes as an error only if the precision is valid and leaves the dtypes of all parameters
    unchanged.
    """
    from exp.models.forward_trace import Arithmetic
    from exp.precision.words import WORDS

    # The first stage of the check reports a value that is not a text.
    word = WORDS.get(precision.word) if isinstance(precision.word, str) else None
    is_plain = word is not None and word.parameters is None and precision.keep == {}
    return Arithmetic(autocast=word.autocast if word else None, mixes=is_plain)
