"""Process group of a run. exp creates the group before Lightning, so that Lightning uses this group and opens no port.

On a single machine, the store of the group is a file in the run directory, and its sockets use loopback. Other machines
cannot connect. Under torchrun and SLURM, the ranks connect to an address in the environment variables.
"""

from __future__ import annotations

import datetime
import os
import sys

from exp.strategies.placement import Placement
from exp.strategies.rank import Rank


def join(
    rank: Rank,
    placement: Placement,
    *,
    timeout_seconds: float,
) -> None:
    """Create the process group of a run. A run with one rank gets a group only if the strategy needs one.

    Args:
        rank: Rank of this process.
        placement: Placement of the run.
        timeout_seconds: Maximum time in seconds that a rank waits for other ranks, at the start and in a collective.
    """
    if placement.backend is None:
        return
    import torch
    import torch.distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs do not name it

    timeout = datetime.timedelta(seconds=timeout_seconds)
    device = store = None
    if placement.accelerator == "cuda":
        torch.cuda.set_device(torch.device(placement.device(rank.local_rank)))
    if placement.backend == "nccl":
        device = torch.device(placement.device(rank.local_rank))
    if rank.store is not None:
        store = FileStore(rank.store, rank.world_size)
        store.set_timeout(timeout)
    else:
        _set_rendezvous_address()
    torch.distributed.init_process_group(
        placement.backend,
        rank=rank.global_rank,
        world_size=rank.world_size,
        timeout=timeout,
        store=store,
        device_id=device,
    )


def global_rank() -> int:
    """Return the global rank of this process. Return 0 if there is no process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def meet() -> None:
    """Wait until all ranks call this function, so that no rank exits while other ranks still communicate with it."""
    if "torch.distributed" not in sys.modules:
        return  # importing torch takes a second, and there is no process group if torch is not imported
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_backend() == "nccl":
        torch.distributed.barrier(device_ids=[torch.cuda.current_device()])
    else:
        torch.distributed.barrier()


def _set_rendezvous_address() -> None:
    """Set the address of the process group under SLURM. SLURM's variables contain only the names of the nodes.

    The address is the name of the first node, and a port that is computed from the job's number.
    """
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    # The port depends on the job, so that two jobs on a node do not connect to each other.
    os.environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_NODELIST"])
    os.environ["MASTER_PORT"] = str(15_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000)
