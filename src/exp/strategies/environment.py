"""Lightning's view of the rank that exp.worker read: it starts no process and reads no variable.

Relied on, and tested: Lightning's DDPStrategy starts nothing where `creates_processes_externally` is true, and opens no
store where torch.distributed is initialised already (seen in lightning 2.6.6).
"""

from __future__ import annotations

import os

from lightning.fabric.plugins.environments import ClusterEnvironment

from exp.errors import RunError
from exp.strategies.rank import Rank


class RankEnvironment(ClusterEnvironment):
    """The cluster environment of one rank."""

    def __init__(self, rank: Rank) -> None:
        super().__init__()
        self._rank = rank

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
