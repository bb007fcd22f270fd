"""Base class of strategies, and functions that derive the Trainer's arguments from a strategy.

To add a strategy, write a subclass of Strategy and a YAML file in conf/strategy. The keyword parameters of the subclass
are the options in the YAML file. The `_target_` may also be one of Lightning's strategies.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from exp.config.settings import Settings
from exp.data.data import Data
from exp.errors import ErrorDetails, RunError
from exp.models.forward_trace import Call, ForwardTrace
from exp.precision.plugin import RunPrecision
from exp.strategies.placement import DEFAULT_DEMAND, Demand, Placement
from exp.strategies.rank import Rank

if TYPE_CHECKING:
    from exp.strategies.footprint import Footprint, Load


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """Description of a planned run. Strategies and hooks check it for properties that they do not support.

    Attributes:
        network: Network on the meta device. All shapes are known.
        placement: Placement of the run.
        batch_size: Number of samples of the global batch, B.
        precision: `precision.word` of the config.
        settings: Settings of the run.
        needs: Needs of the objective: keys of NEEDS in objectives/term.py. Default: none.
        weighed: Names of objective terms that divide by the weights of their targets instead of the number of samples.
            Default: none.
        traits: Traits of the strategy: names in TRAITS. Default: none.
        trace: Trace of a forward on a batch of the data's shape. None: an operator cannot run on the meta device.
            Default: None.
        build: Function that returns the network with values on the CPU. None: a user's LightningModule creates the
            network. Default: None.
        meets: Needs that the strategy supports although the network is split. Default: none.
        callbacks: Classes of the callbacks by name. Default: none.
        optimizers: Classes of the optimizers. Default: none.
        hooks: Hooks by name. Default: none.
    """

    network: nn.Module
    placement: Placement
    batch_size: int
    precision: str
    settings: Settings
    needs: frozenset[str] = frozenset()
    weighed: tuple[str, ...] = ()
    traits: frozenset[str] = frozenset()
    trace: ForwardTrace | None = None
    build: Callable[[], nn.Module] | None = None
    meets: frozenset[str] = frozenset()
    callbacks: Mapping[str, type[Callback]] = field(default_factory=dict)
    optimizers: Sequence[type[Optimizer]] = ()
    hooks: Mapping[str, object] = field(default_factory=dict)

    @property
    def calls(self) -> Mapping[str, Sequence[Call]]:
        """Calls of each module in the traced forward, by module path. Empty if the run has no trace."""
        return {} if self.trace is None else self.trace.by_path()


# Attributes of Strategy that the compatibility table reads.
TRAITS = (
    "splits_batch", "shards_parameters", "splits_tensors", "splits_layers", "splits_devices",
    "replicates_in_threads", "schedules_step", "steps_once", "owns_step",
)  # fmt: skip


@runtime_checkable
class WrapsModule(Protocol):
    """Interface of Lightning strategies that call the module through DistributedDataParallel.

    Attributes:
        is_plain: Whether a step only calls DistributedDataParallel.
        broadcasts_buffers: Whether the buffers of rank 0 are copied to all ranks before each forward. In a run with
            phases, they are copied before each step.
    """

    broadcasts_buffers: bool

    @property
    def is_plain(self) -> bool: ...


class Strategy(ABC):
    """Base class of strategies.

    A strategy places a run on devices, and declares its effects on the network, the batch and the step.

    The check reads the attributes below to find what a strategy supports. It never reads the name, which is only for
    messages. The defaults are those of DDP. If the value of an attribute depends on an option, `__init__` sets it.

    Attributes:
        splits_batch: Whether ranks or replicas process different samples of each batch. The number of parts of a batch
            is `placement.data_ranks`.
        shards_parameters: Whether a rank stores shards of weights, and gathers them for computation.
        splits_tensors: Whether a rank computes parts of single layers.
        splits_layers: Whether ranks have different layers.
        splits_devices: Whether the devices of one process have different layers.
        replicates_in_threads: Whether replicas of the network run in threads of one process.
        schedules_step: Whether a schedule runs the forwards and backwards of a step.
        steps_once: Whether a step is one forward and one backward, so that phases are not supported.
        owns_step: Whether an engine such as DeepSpeed runs backward, unscaling, clipping and the optimizer step.
        meets: Needs of objectives that the strategy supports although the network is split: keys of NEEDS in
            objectives/term.py.
        activation_checkpointing: Patterns of modules whose activations are recomputed in the backward.
    """

    splits_batch: bool = True
    shards_parameters: bool = False
    splits_tensors: bool = False
    splits_layers: bool = False
    splits_devices: bool = False
    replicates_in_threads: bool = False
    schedules_step: bool = False
    steps_once: bool = True
    owns_step: bool = False
    meets: frozenset[str] = frozenset()
    activation_checkpointing: tuple[str, ...] = ()

    def __init__(self, *, name: str) -> None:
        self.name = name

    @property
    def demand(self) -> Demand:
        """Devices and dimensions that the strategy needs.

        Default: one rank per device. The ranks process different samples of a batch.
        """
        return DEFAULT_DEMAND

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """Return errors for the properties of a run that the strategy does not support. Default: no errors."""
        return ()

    def footprint(self, load: Load) -> Footprint:
        """Return the memory and the transfers of each rank.

        Default: each rank has a copy of the network, and gradients are averaged by an all-reduce.
        """
        return load.copies()

    @abstractmethod
    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Return Lightning's strategy for one rank. The rank has already joined the process group of the run.

        This method is not called for a run with one rank on one device.
        """


def averages_weights(kind: type[Callback]) -> bool:
    """Return whether a class of callbacks has the attribute `averages_weights` with the value true."""
    return bool(getattr(kind, "averages_weights", False))


def trainer_arguments(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> dict[str, Any]:
    """Return the arguments that make the Trainer use the devices of this rank. Environment variables are not read.

    `plugins` contains only the cluster environment. The caller adds plug-ins for precision and checkpoints.
    `use_distributed_sampler` is False, because exp's loaders split the batches.
    """
    return {
        "strategy": _lightning(strategy, placement=placement, rank=rank),
        "accelerator": placement.accelerator,
        "devices": _devices(placement),
        "num_nodes": placement.nodes,
        "plugins": [RankEnvironment(rank)],
        "use_distributed_sampler": False,
    }


def traits_of(strategy: Strategy | LightningStrategy) -> frozenset[str]:
    """Return the names in TRAITS that apply to a strategy.

    For one of Lightning's strategies, the base class determines the names.
    """
    if isinstance(strategy, Strategy):
        return frozenset(trait for trait in TRAITS if getattr(strategy, trait))
    # DeepSpeedStrategy derives from DDPStrategy. All strategies except SingleDeviceStrategy derive from
    # ParallelStrategy.
    sharded = frozenset({"shards_parameters", "splits_batch", "steps_once"})
    if isinstance(strategy, DeepSpeedStrategy):
        return sharded | {"owns_step"}
    if isinstance(strategy, DDPStrategy):
        return sharded - {"shards_parameters"}
    return sharded if isinstance(strategy, ParallelStrategy) else frozenset()


def demand_of_lightning(strategy: LightningStrategy) -> Demand:
    """Return the devices that one of Lightning's strategies needs: one rank per device.

    If the strategy supports several ranks, it also needs a process group for a single rank.
    """
    return Demand(group=isinstance(strategy, ParallelStrategy))


def _devices(placement: Placement) -> list[int] | int:
    """Return the devices in Lightning's format. A rank with several devices is listed with the first of them."""
    if placement.accelerator == "cuda":
        return list(placement.device_indices[:: placement.layers])
    return placement.ranks_per_node


def _lightning(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> LightningStrategy:
    if not isinstance(strategy, Strategy):
        return strategy
    if placement.world_size == 1 and placement.layers == 1 and placement.backend is None:
        # A single rank computes the same result without a process group.
        return SingleDeviceStrategy(device=placement.device(rank.local_rank))
    return strategy.lightning(placement, rank)


def module_of(strategy: LightningStrategy) -> LightningModule:
    """Return the module that the Trainer has connected to the strategy."""
    module = strategy.lightning_module
    assert module is not None, "a strategy acts after the Trainer has connected its module"
    return module


def network_of(strategy: LightningStrategy) -> nn.Module:
    """Return the network of exp's training module."""
    network = module_of(strategy).network
    assert isinstance(network, nn.Module)
    return network


def precision_of(strategy: LightningStrategy) -> RunPrecision:
    """Return exp's precision plug-in of the strategy."""
    precision = strategy.precision_plugin
    assert isinstance(precision, RunPrecision)
    return precision


def move_all_but_network(module: LightningModule, device: torch.device) -> None:
    """Move all submodules of a module to a device, except its network, which may be too large for one device."""
    network = module.network
    module.network = nn.Identity()
    module.to(device)
    module.network = network


def shared_names(network: nn.Module) -> list[list[str]]:
    """Return all names of each parameter that has several names, such as a tied weight."""
    names: dict[int, list[str]] = {}
    for path, parameter in network.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(path)
    return [several for several in names.values() if len(several) > 1]


def data_of(trainer: Trainer) -> Data:
    """Return the data of a run, if exp built the data."""
    # Lightning sets the attribute without declaring it.
    data = getattr(getattr(trainer, "datamodule", None), "data", None)
    assert isinstance(data, Data)
    return data


class RankEnvironment(ClusterEnvironment):
    """Cluster environment through which Lightning reads the rank that the launcher assigned to this process.

    This class starts no process and reads no environment variable.

    Tested properties of Lightning 2.6.6: DDPStrategy starts no processes if `creates_processes_externally` is true.
    DDPStrategy opens no store if torch.distributed is already initialized.
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        # Lightning's environments also set this attribute. Without this line, its value is that of RANK or SLURM_PROCID
        # at the import of Lightning, which may belong to another job.
        vars(rank_zero_only)["rank"] = rank.global_rank

    @property
    def creates_processes_externally(self) -> bool:
        return True

    @property
    def main_address(self) -> str:
        return os.environ["MASTER_ADDR"]

    @property
    def main_port(self) -> int:
        return int(os.environ["MASTER_PORT"])

    @staticmethod
    def detect() -> bool:
        return False

    def world_size(self) -> int:
        return self._rank.world_size

    def set_world_size(self, size: int) -> None:
        if size != self._rank.world_size:
            raise RunError(f"Lightning counts {size} ranks, but the launcher started {self._rank.world_size}")

    def global_rank(self) -> int:
        return self._rank.global_rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self._rank.global_rank:
            raise RunError(f"Lightning counts rank {rank}, but the launcher started rank {self._rank.global_rank}")

    def local_rank(self) -> int:
        return self._rank.local_rank

    def node_rank(self) -> int:
        return self._rank.node_rank
