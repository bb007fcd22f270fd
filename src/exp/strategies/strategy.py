"""What the config's strategy node becomes, and the Trainer's arguments that follow from it.

    trainer_arguments(strategy, placement=placement, rank=rank) -> dict for lightning's Trainer
        strategy=, devices=, num_nodes=, accelerator=, plugins=[cluster environment], use_distributed_sampler=False

A strategy of one's own is a subclass of Strategy with its options as keyword parameters, and a YAML in conf/strategy;
a class of Lightning's own strategies may be named as `_target_`, too.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from lightning.pytorch.strategies import Strategy as LightningStrategy

    from exp.strategies.placement import Placement
    from exp.strategies.rank import Rank


class Strategy(ABC):
    """Places a run. The name is the word that report.json repeats."""

    def __init__(self, *, name: str) -> None:
        self.name = name

    @abstractmethod
    def lightning(self, placement: Placement) -> LightningStrategy:
        """Lightning's strategy for a run of several ranks; its process group has been joined already."""


def trainer_arguments(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> dict[str, Any]:
    """The Trainer's arguments that place this rank. Nothing is read from the environment.

    plugins holds the cluster environment only: add precision and checkpoint plug-ins to it.
    use_distributed_sampler is False because exp's loaders share out the batches themselves.
    """
    from lightning.pytorch.utilities.rank_zero import rank_zero_only

    from exp.strategies.environment import RankEnvironment

    # Lightning takes this from RANK or SLURM_PROCID when it is imported, whosever they are.
    rank_zero_only.rank = rank.global_rank
    return {
        "strategy": _lightning(strategy, placement=placement, rank=rank),
        "accelerator": placement.accelerator,
        "devices": list(placement.device_indices) if placement.accelerator == "cuda" else placement.ranks_per_node,
        "num_nodes": placement.nodes,
        "plugins": [RankEnvironment(rank)],
        "use_distributed_sampler": False,
    }


def _lightning(strategy: Strategy | LightningStrategy, *, placement: Placement, rank: Rank) -> LightningStrategy:
    from lightning.pytorch.strategies import SingleDeviceStrategy

    if not isinstance(strategy, Strategy):
        return strategy
    if placement.world_size == 1:
        # Nobody to share with: the same numbers, without a process group in this process.
        return SingleDeviceStrategy(device=placement.device(rank.local_rank))
    return strategy.lightning(placement)
