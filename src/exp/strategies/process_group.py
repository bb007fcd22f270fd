"""The process group of a run, made before Lightning looks, so that Lightning finds it and opens nothing itself.

On one machine its store is a file in the run directory and its sockets are on loopback: no other machine can reach it.
Under torchrun and SLURM it meets at the address that they give.
"""

from __future__ import annotations

import datetime
import os
import socket
import sys

from exp.errors import RunError
from exp.strategies.placement import Placement
from exp.strategies.rank import Rank


def join(
    rank: Rank,
    placement: Placement,
    *,
    timeout_seconds: float,
    network_interface: str | None = None,
    high_priority_stream: bool = False,
) -> None:
    """Makes the process group of a run of several ranks; a run of one rank has none, but where its strategy needs it.

    timeout_seconds: how long a rank waits in a collective, and here for the others to come.
    network_interface: by which ranks of several nodes talk; None leaves it to gloo and NCCL.
    high_priority_stream: whether NCCL's kernels go before those of the network.
    Raises: RunError where this machine has no such interface.
    """
    if placement.backend is None:
        return
    import torch
    import torch.distributed
    from torch.distributed import FileStore  # type: ignore[attr-defined]  # torch's stubs do not name it

    timeout = datetime.timedelta(seconds=timeout_seconds)
    device = options = store = None
    if placement.accelerator == "cuda":
        torch.cuda.set_device(torch.device(placement.device(rank.local_rank)))
    if placement.backend == "nccl":
        device = torch.device(placement.device(rank.local_rank))
        options = torch.distributed.ProcessGroupNCCL.Options(is_high_priority_stream=high_priority_stream)
    if rank.store is not None:
        store = FileStore(rank.store, rank.world_size)
        store.set_timeout(timeout)
    else:
        _offer_rendezvous()
        _talk_by(network_interface)
    torch.distributed.init_process_group(
        placement.backend,
        rank=rank.global_rank,
        world_size=rank.world_size,
        timeout=timeout,
        store=store,
        device_id=device,
        pg_options=options,
    )


def global_rank() -> int:
    """This process's; 0 where there is no process group."""
    import torch.distributed as dist

    return dist.get_rank() if dist.is_available() and dist.is_initialized() else 0


def meet() -> None:
    """A barrier, so that no rank leaves while another still talks to it."""
    if "torch.distributed" not in sys.modules:
        return  # no process group without it, and importing torch to find that out would cost a second
    import torch.distributed

    if not (torch.distributed.is_available() and torch.distributed.is_initialized()):
        return
    if torch.distributed.get_backend() == "nccl":
        torch.distributed.barrier(device_ids=[torch.cuda.current_device()])
    else:
        torch.distributed.barrier()


def _talk_by(interface: str | None) -> None:
    if interface is None:
        return
    names = [name for _, name in socket.if_nameindex()]
    if interface not in names:
        raise RunError(
            f"launch.network_interface is {interface}, which {socket.gethostname()} has not; "
            f"expected one of {', '.join(names)}"
        )
    os.environ["GLOO_SOCKET_IFNAME"] = os.environ["NCCL_SOCKET_IFNAME"] = interface


def _offer_rendezvous() -> None:
    """SLURM names its nodes and no address: the first of them, and a port made of the job's number."""
    if "MASTER_ADDR" in os.environ and "MASTER_PORT" in os.environ:
        return
    from lightning.fabric.plugins.environments.slurm import SLURMEnvironment

    # One port a job, so that two jobs on a node do not meet.
    os.environ["MASTER_ADDR"] = SLURMEnvironment.resolve_root_node_address(os.environ["SLURM_NODELIST"])
    os.environ["MASTER_PORT"] = str(15_000 + int(os.environ["SLURM_JOB_ID"]) % 10_000)
