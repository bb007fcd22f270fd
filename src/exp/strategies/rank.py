"""Rank of this process, read from the environment variables of the launcher that started it.

Only exp.worker reads these variables, because in other processes they may belong to another job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from exp.errors import RunError

# Environment variable with the path of the process group's FileStore. Only exp's launcher sets this variable.
STORE = "EXP_STORE"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """Identity of one process of a run.

    Attributes:
        global_rank: Rank over all nodes, from 0 to world_size - 1.
        local_rank: Rank on this node, from 0 to local_world_size - 1.
        world_size: Number of ranks over all nodes.
        local_world_size: Number of ranks on this node.
        node_rank: Number of this node, counted from 0. Default: 0.
        store: File of the process group's FileStore. None: the ranks connect by the method env:// of torch. Default:
            None.
        is_confined: Whether this rank sees only its assigned devices, although its node has other ranks. SLURM's
            --gpus-per-task has this effect. Such a rank counts as a node with one rank. Default: False.
    """

    global_rank: int
    local_rank: int
    world_size: int
    local_world_size: int
    node_rank: int = 0
    store: str | None = None
    is_confined: bool = False

    @property
    def nodes(self) -> int:
        return self.world_size // self.local_world_size

    @property
    def is_first(self) -> bool:
        """True if this rank writes reports and shows progress."""
        return self.global_rank == 0


ALONE = Rank(global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank that exp's launcher, torchrun or SLURM assigned to this process. Return ALONE without a launcher.

    Variables of torchrun have priority, because torchrun may run inside a SLURM job.

    Raises:
        RunError: The variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank = _torchrun(environment)
    elif _in_slurm_step(environment):
        rank = _slurm(environment)
    else:
        return ALONE
    if rank.world_size % rank.local_world_size or not 0 <= rank.global_rank < rank.world_size:
        raise RunError(
            f"the environment variables of the launcher disagree: rank {rank.global_rank} of {rank.world_size} ranks, "
            f"of which {rank.local_world_size} are on this node. Start the same number of ranks on every node"
        )
    return rank


def _torchrun(environment: Mapping[str, str]) -> Rank:
    world_size, global_rank = _number(environment, "WORLD_SIZE"), _number(environment, "RANK")
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE", default=world_size)
    return Rank(
        global_rank=global_rank,
        local_rank=_number(environment, "LOCAL_RANK", default=global_rank),
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=global_rank // max(1, local_world_size),
        store=environment.get(STORE),
    )


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    # An interactive shell inside a SLURM allocation has the same variables, but is not a task.
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and not interactive


def _slurm(environment: Mapping[str, str]) -> Rank:
    world_size, global_rank = _number(environment, "SLURM_NTASKS"), _number(environment, "SLURM_PROCID")
    local_world_size = max(1, world_size // max(1, _number(environment, "SLURM_NNODES", default=1)))
    # With --gpus-per-task, a task may see fewer GPUs than its node has tasks. The first GPU of the task is then cuda:0.
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    is_confined = bool(visible) and len(visible.split(",")) < local_world_size
    return Rank(
        global_rank=global_rank,
        local_rank=0 if is_confined else _number(environment, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=1 if is_confined else local_world_size,
        node_rank=global_rank if is_confined else _number(environment, "SLURM_NODEID", default=0),
        is_confined=is_confined,
    )


def _number(environment: Mapping[str, str], name: str, *, default: int | None = None) -> int:
    if name not in environment and default is not None:
        return default
    if name not in environment or not environment[name].isdecimal():
        got = f"is {environment[name]!r}" if name in environment else "is not set"
        raise RunError(f"the environment variable {name} {got}; the launcher must set it to a number")
    return int(environment[name])
