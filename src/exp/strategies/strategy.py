"""What the config's strategy node becomes, and the Trainer's arguments that follow from it.

    trainer_arguments(strategy, placement=placement, rank=rank) -> dict for lightning's Trainer
        strategy=, devices=, num_nodes=, accelerator=, plugins=[cluster environment], use_distributed_sampler=False

A strategy of one's own is a subclass of Strategy with its options as keyword parameters, and a YAML in conf/strategy;
a class of Lightning's own strategies may be named as `_target_`, too.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, cast, runtime_checkable

import torch
from lightning.fabric.plugins.environments.cluster_environment import ClusterEnvironment
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import WeightAveraging
from lightning.pytorch.strategies import (
    DDPStrategy,
    DeepSpeedStrategy,
    FSDPStrategy,
    ModelParallelStrategy,
    ParallelStrategy,
    SingleDeviceStrategy,
)
from lightning.pytorch.strategies import Strategy as LightningStrategy
from lightning.pytorch.utilities import rank_zero_only
from torch import nn
from torch.optim import Optimizer

from exp.data.data import Data
from exp.errors import ErrorDetails, RunError
from exp.models.forward_trace import Call, ForwardTrace
from exp.precision.plugin import RunPrecision
from exp.strategies.footprint import Footprint, Load, Place, averaged, whole
from exp.strategies.placement import DEFAULT_DEMAND, Demand, Placement
from exp.strategies.rank import Rank


@dataclass(frozen=True, kw_only=True)
class Blueprint:
    """What a part may know of the run when it says what it cannot do. Nothing of it is allocated yet.

    network: on the meta device, every layer sized.
    batch_size: of the global batch, B.
    precision: the config's precision.word.
    needs: what the objective needs beside one forward and one backward, words of NEEDS in objectives/term.py.
    weighed: names of its terms that divide by weights of their targets, and not by the number of samples.
    traits: words of TRAITS that its strategy has.
    meets: of them, what its strategy meets where the network is in parts.
    callbacks, optimizers: classes: of the config's callbacks, by name, of its optimizers. hooks: by name.
    trace: its forward on a batch of the data's shape: what each module was given and returned; None where an operator
        cannot run without numbers.
    build: makes the network on the CPU, with numbers; None where it is not exp's to make.
    config: the whole config, plain and resolved, for whatever else a strategy has to refuse.
    """

    network: nn.Module
    placement: Placement
    batch_size: int
    precision: str
    config: Mapping[str, Any]
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
        """The calls of each module in the traced forward, by its path; empty where there is none."""
        return {} if self.trace is None else self.trace.by_path()


# What a strategy may say of itself; each is an attribute of Strategy.
TRAITS = (
    "splits_batch", "shards_parameters", "splits_tensors", "splits_layers", "splits_devices",
    "replicates_in_threads", "schedules_step", "steps_once", "owns_step",
    "averages_between_steps",
)  # fmt: skip


@runtime_checkable
class WrapsModule(Protocol):
    """A Lightning strategy that calls the module through DistributedDataParallel.

    is_plain: whether a step does nothing else. broadcasts_buffers: whether rank 0's buffers go to all ranks before each
    forward; of phases, before each step.
    """

    broadcasts_buffers: bool

    @property
    def is_plain(self) -> bool: ...


class Strategy(ABC):
    """Base of strategies: places a run, and declares what it does to the network, the batch and the step.

    The check judges what goes with a strategy by these attributes, and never by its name, which is the word that
    report.json repeats. The defaults are those of a strategy like ddp. One that depends on an option is set in
    `__init__`.

    splits_batch: ranks or replicas share out each batch; `placement.data_ranks` says among how many ranks.
    shards_parameters: a rank keeps parts of weights, and gathers them while it computes.
    splits_tensors: a rank computes parts of single layers, and of what they return.
    splits_layers: whole layers lie in different ranks.
    splits_devices: whole layers lie on different devices of one process.
    replicates_in_threads: replicas of the network run at once, in threads of one process.
    schedules_step: a schedule makes the forwards and backwards of a step.
    steps_once: a step is one forward and one backward; phases, which have several, would be taken for one.
    owns_step: an engine runs the backward, unscales, clips and steps.
    averages_between_steps: ranks step by themselves, and average their weights now and then.
    meets: what an objective may need beside one forward and one backward, words of NEEDS in objectives/term.py, where
        a network is in parts; a whole one meets all.
    activation_checkpointing: patterns of modules whose activations are computed again in the backward.
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
    averages_between_steps: bool = False
    meets: frozenset[str] = frozenset()
    activation_checkpointing: tuple[str, ...] = ()

    def __init__(self, *, name: str) -> None:
        self.name = name

    @property
    def demand(self) -> Demand:
        """What it asks of the machine; by default one rank a device, each with a share of the batch of its own."""
        return DEFAULT_DEMAND

    def errors(self, planned: Blueprint) -> Sequence[ErrorDetails]:
        """What this strategy cannot do with a run, all of it, before anything is started; by default nothing."""
        return ()

    def footprint(self, load: Load) -> Footprint:
        """What each rank holds and sends; by default all of it, with gradients averaged where ranks share the batch."""
        ranks = tuple(range(load.placement.world_size))
        return Footprint(places=[Place(ranks=ranks, held=whole(load))], transfers=averaged(load))

    @abstractmethod
    def lightning(self, placement: Placement, rank: Rank) -> LightningStrategy:
        """Lightning's strategy for one rank of a run; the process group, where there is one, has been joined already.

        A run of one rank on one device does not ask.
        """


def averages_weights(kind: type[Callback]) -> bool:
    """Whether a class of callbacks keeps an average of the weights: Lightning's, or one that says so by this name."""
    return issubclass(kind, WeightAveraging) or bool(getattr(kind, "averages_weights", False))


def trainer_arguments(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> dict[str, Any]:
    """The Trainer's arguments that place this rank. Nothing is read from the environment.

    plugins holds the cluster environment only: add precision and checkpoint plug-ins to it.
    use_distributed_sampler is False because exp's loaders share out the batches themselves.
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
    """The names of TRAITS that a strategy has; of Lightning's own classes by what they derive from."""
    if isinstance(strategy, Strategy):
        return frozenset(trait for trait in TRAITS if getattr(strategy, trait))
    # DeepSpeedStrategy is a DDPStrategy, and all but SingleDeviceStrategy are ParallelStrategies.
    of_lightning: tuple[tuple[type[LightningStrategy], frozenset[str]], ...] = (
        (DeepSpeedStrategy, frozenset({"shards_parameters", "splits_batch", "owns_step", "steps_once"})),
        (FSDPStrategy, frozenset({"shards_parameters", "splits_batch", "steps_once"})),
        (ModelParallelStrategy, frozenset({"shards_parameters", "splits_batch", "steps_once"})),
        (DDPStrategy, frozenset({"splits_batch", "steps_once"})),
        (ParallelStrategy, frozenset({"shards_parameters", "splits_batch", "steps_once"})),
        (SingleDeviceStrategy, frozenset()),
    )
    return next((traits for kind, traits in of_lightning if isinstance(strategy, kind)), frozenset())


def demand_of_lightning(strategy: LightningStrategy) -> Demand:
    """Of a strategy class of Lightning's own: a rank a device, and a process group where it is made for several."""
    return Demand(group=isinstance(strategy, ParallelStrategy))


def _devices(placement: Placement) -> list[int] | int:
    """One a rank, as Lightning counts them."""
    if placement.accelerator == "cuda":
        return list(placement.device_indices[:: placement.layers])
    return placement.ranks_per_node


def _lightning(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> LightningStrategy:
    if not isinstance(strategy, Strategy):
        return strategy
    if placement.world_size == 1 and placement.layers == 1 and placement.backend is None:
        # Nobody to share with: the same numbers, without a process group in this process.
        return SingleDeviceStrategy(device=placement.device(rank.local_rank))
    return strategy.lightning(placement, rank)


def module_of(strategy: LightningStrategy) -> LightningModule:
    """The module that the Trainer connected."""
    module = strategy.lightning_module
    assert module is not None, "a strategy acts once the Trainer has connected its module"
    return module


def network_of(strategy: LightningStrategy) -> nn.Module:
    """The network in a module of exp."""
    network = module_of(strategy).network
    assert isinstance(network, nn.Module)
    return network


def precision_of(strategy: LightningStrategy) -> RunPrecision:
    """The precision plug-in of a run of exp."""
    precision = strategy.precision_plugin
    assert isinstance(precision, RunPrecision)
    return precision


def move_all_but_network(module: LightningModule, device: torch.device) -> None:
    """Moves what a module holds beside its network, such as metrics, where no device need have room for the whole."""
    network = module.network
    module.network = nn.Identity()
    module.to(device)
    module.network = network


def data_of(trainer: Trainer) -> Data:
    """The data of a run of exp."""
    return cast(_Fed, trainer).datamodule.data


class _Feed(Protocol):
    data: Data


class _Fed(Protocol):
    datamodule: _Feed


class RankEnvironment(ClusterEnvironment):
    """Lightning's view of a rank that the launcher started: it starts no process and reads no variable.

    Relied on, and tested: Lightning's DDPStrategy starts nothing where `creates_processes_externally` is true, and
    opens no store where torch.distributed is initialised already (seen in lightning 2.6.6).
    """

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank
        # As Lightning's environments do. At import it took this from RANK or SLURM_PROCID, whosever they are.
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
            raise RunError(f"Lightning counts {size} ranks, the launcher started {self._rank.world_size}")

    def global_rank(self) -> int:
        return self._rank.global_rank

    def set_global_rank(self, rank: int) -> None:
        if rank != self._rank.global_rank:
            raise RunError(f"Lightning counts itself as rank {rank}, the launcher as {self._rank.global_rank}")

    def local_rank(self) -> int:
        return self._rank.local_rank

    def node_rank(self) -> int:
        return self._rank.node_rank
