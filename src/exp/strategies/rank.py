"""Which rank this process is, read from the environment of the launcher that started it, and never guessed.

Only exp.worker reads it: in every other process the variables may be those of somebody else's job.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from dataclasses import dataclass

from exp.errors import RunError

# Set by exp's own launcher, beside torchrun's names: where the process group's FileStore is.
STORE = "EXP_STORE"


@dataclass(frozen=True, kw_only=True)
class Rank:
    """One process of a run.

    global_rank, local_rank: 0 to world_size - 1 over all nodes, 0 to local_world_size - 1 on this one.
    store: the file of the process group's FileStore; None where the launcher offers a rendezvous by env:// instead.
    is_confined: whether it is one of several on its node and sees its own devices alone, as SLURM's --gpus-per-task
        has it. Such a rank counts as the only one of a node of its own.
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
        """Whether it is the one that writes reports and shows progress."""
        return self.global_rank == 0


ALONE = Rank(global_rank=0, local_rank=0, world_size=1, local_world_size=1)


def rank_of(environment: Mapping[str, str] = os.environ) -> Rank:
    """The rank that exp's launcher, torchrun or SLURM gave this process; ALONE where none of them did.

    torchrun goes before SLURM, because it may run inside a SLURM job.

    Raises: RunError where the variables contradict each other.
    """
    if "RANK" in environment and "WORLD_SIZE" in environment:
        rank = _torchrun(environment)
    elif _in_slurm_step(environment):
        rank = _slurm(environment)
    else:
        return ALONE
    if rank.world_size % rank.local_world_size or not 0 <= rank.global_rank < rank.world_size:
        raise RunError(
            f"the launcher's variables do not fit together: rank {rank.global_rank} of {rank.world_size}, "
            f"{rank.local_world_size} on this node. Start the same number of ranks on every node"
        )
    return rank


def _torchrun(environment: Mapping[str, str]) -> Rank:
    world_size = _number(environment, "WORLD_SIZE")
    local_world_size = _number(environment, "LOCAL_WORLD_SIZE") if "LOCAL_WORLD_SIZE" in environment else world_size
    global_rank = _number(environment, "RANK")
    return Rank(
        global_rank=global_rank,
        local_rank=_number(environment, "LOCAL_RANK") if "LOCAL_RANK" in environment else global_rank,
        world_size=world_size,
        local_world_size=local_world_size,
        node_rank=global_rank // max(1, local_world_size),
        store=environment.get(STORE),
    )


def _in_slurm_step(environment: Mapping[str, str]) -> bool:
    # A shell inside an allocation carries the same variables, and is not one of the tasks.
    interactive = environment.get("SLURM_JOB_NAME") in ("bash", "interactive")
    return "SLURM_PROCID" in environment and "SLURM_NTASKS" in environment and not interactive


def _slurm(environment: Mapping[str, str]) -> Rank:
    world_size = _number(environment, "SLURM_NTASKS")
    nodes = _number(environment, "SLURM_NNODES") if "SLURM_NNODES" in environment else 1
    on_this_node = max(1, world_size // max(1, nodes))
    global_rank = _number(environment, "SLURM_PROCID")
    # Bound to GPUs of its own, each task sees fewer than there are tasks, and calls the first of them cuda:0.
    visible = environment.get("CUDA_VISIBLE_DEVICES", "")
    if visible and len(visible.split(",")) < on_this_node:
        return Rank(
            global_rank=global_rank,
            local_rank=0,
            world_size=world_size,
            local_world_size=1,
            node_rank=global_rank,
            is_confined=True,
        )
    return Rank(
        global_rank=global_rank,
        local_rank=_number(environment, "SLURM_LOCALID"),
        world_size=world_size,
        local_world_size=on_this_node,
        node_rank=_number(environment, "SLURM_NODEID") if "SLURM_NODEID" in environment else 0,
    )


def _number(environment: Mapping[str, str], name: str) -> int:
    if name not in environment or not environment[name].isdecimal():
        got = f"is {environment[name]!r}" if name in environment else "is not set"
        raise RunError(f"{name} {got}; the launcher must set it to a number")
    return int(environment[name])
