"""The plan of a run: its placement, strategy, objective, phases, metrics, hooks, and the forwards on the meta device.

Each rank computes its plan from the frozen config. exp.check.examination reads the same parts to find the errors of a
config, so this module does not explain errors.
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
    """A config completed with the values that depend on the data.

    Attributes:
        config: Copy of the given config with shape, dtype, outputs and classes of the data. This config is frozen.
        plain: Values of the config as dicts and lists, interpolations resolved. UNKNOWN stands for a value that
            could not be read.
        errors: Errors of values, keys, rules, targets and parameters.
        notes: Remarks of the search for a checkpoint.
        data: The data set with its splits, if it was built to complete the config. Otherwise None.
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
    """The plan of a run. A process makes one plan and never changes it. Each part is computed when it is first read.

    No part is on a device, and the network has no memory.

    Attributes:
        resolved: The config from which all parts are computed.
        rank: Rank of this process, if a launcher started it. None computes the placement from the config.
        machine: Description of the machine of the run. None describes this machine.
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
        """The only strategy object of this process."""
        from exp.construct import build_strategy

        return build_strategy(self.settings)

    @functools.cached_property
    def placement(self) -> Placement:
        """The devices of the ranks."""
        return place(self.settings, self.strategy, rank=self.rank, machine=self.machine)

    @functools.cached_property
    def own(self) -> OwnTraining | None:
        """The user's LightningModule, if the run trains one instead of a model of exp. None in other runs.

        With a LightningModule, objective, phases and metrics are empty, and shapes are unknown.
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
        """The user's LightningDataModule, if the run has one. None if the run uses the data of exp."""
        from exp.construct import build_data_module

        return None if self.own is None or self.own.data_kind is None else build_data_module(self.settings)

    @property
    def network(self) -> nn.Module | None:
        """The trained network on the meta device. None if it cannot be built there."""
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
        """Mean number of multiply-adds of an operator in a forward of a rank's batch, weighted by multiply-adds.

        For a user's LightningModule and for a network that cannot be traced, the value is an upper bound. The value is
        None if the network or the size of the user's batches is unknown.
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
        """The hooks by name. Each hook has access to the FLOPs of a step."""
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
            raise RunError("the network cannot be built without numbers, so its FLOPs are not counted")
        inputs = tuple(self.spec.inputs)
        return flops_of_a_sample(data, network=network, objective=objective, phases=phases, inputs=inputs)


def read_resolved(directory: Path | str) -> Resolved:
    """Return the config of a run directory. The config was resolved and checked before it was frozen."""
    from exp.construct import plain_config

    config = read_frozen(directory)
    return Resolved(config=config, plain=plain_config(config))


def adopt(resolved: Resolved, *, rank: Rank) -> Plan:
    """Return the plan of a rank that a launcher started from a frozen config.

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
    """Return the placement of a run on devices. For a launched rank, return the placement that the launcher made.

    Args:
        settings: Config of the run.
        strategy: Strategy of the run.
        rank: Rank of this process. None computes the placement from the config.
        machine: Description of the machine of the run. None describes this machine.

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
    """Return the dtypes of a run for the trace of its forward.

    Mixed dtypes in the trace count as an error only if the precision is valid and changes the dtype of no parameter.
    """
    from exp.models.forward_trace import Arithmetic
    from exp.precision.words import WORDS

    # A value of another type is an error of the first stage.
    word = WORDS.get(precision.word) if isinstance(precision.word, str) else None
    is_plain = word is not None and word.parameters is None and precision.keep == {}
    return Arithmetic(autocast=word.autocast if word else None, mixes=is_plain)
