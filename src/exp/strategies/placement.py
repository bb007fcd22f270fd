"""Where a run's ranks go: how many, on what device, with what backend. Pure, but for the count of the machine's GPUs.

placement(strategy, devices=..., nodes=..., accelerator=..., demand=...) -> Placement     before the launch, for check
adopted(rank, strategy, devices=..., ...) -> Placement                 in a rank: what its launcher really made

Ranks that work on one share of a batch together (tensor or pipeline parallel) are neighbours: with model_ranks 2, ranks
0 and 1 hold the first share, 2 and 3 the second.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from exp.errors import ConfigError
from exp.strategies.placement_faults import (
    faults_of_division,
    faults_of_placement,
    faults_of_words,
    mismatch,
    too_many_ranks,
)
from exp.strategies.rank import Rank

# Two, so that ddp means something on a laptop, and no more, because they share its cores.
CPU_RANKS = 2

Accelerator = Literal["cpu", "cuda", "mps"]
Devices = int | Literal["auto"] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine can offer: CUDA devices that are visible, whether torch can use Apple's GPU, and NCCL.

    cores: of the CPU, that this process may use; None is not known, and limits nothing.
    """

    gpus: int
    mps: bool = False
    nccl: bool = True
    cores: int | None = None


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a strategy asks of the machine, before anything is placed.

    model_ranks: ranks that work on one share of a batch together; None is all ranks of the run.
    devices: of each rank; None is all that the run has, in one process.
    cpu_devices: how many `launch.devices: auto` takes on a machine without a GPU; None is two, or one for `auto`.
    group: whether one rank alone needs a process group, too.
    """

    model_ranks: int | None = 1
    devices: int | None = 1
    cpu_devices: int | None = None
    group: bool = False


DEFAULT_DEMAND = Demand()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks go.

    strategy: the config's word, with `auto` decided: "single" or "ddp".
    backend: of the process group, "gloo" or "nccl"; None where there is none, for one rank seldom needs it.
    device_indices: of the GPUs on each node, in the order of the local ranks; empty on CPU and MPS.
    model_ranks: neighbouring ranks that work on one share of a batch together.
    devices_per_rank: devices of each rank, more than one where its layers are split over them.
    """

    strategy: str
    accelerator: Accelerator
    backend: str | None
    nodes: int
    ranks_per_node: int
    device_indices: tuple[int, ...] = ()
    model_ranks: int = 1
    devices_per_rank: int = 1

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    @property
    def data_ranks(self) -> int:
        """Into how many shares each global batch is split."""
        return self.world_size // self.model_ranks

    def data_rank(self, global_rank: int) -> int:
        """Which of these shares a rank works on."""
        return global_rank // self.model_ranks

    def device(self, local_rank: int) -> str:
        """Torch's name of a local rank's first device, such as "cuda:1"."""
        first = local_rank * self.devices_per_rank
        return f"cuda:{self.device_indices[first]}" if self.accelerator == "cuda" else self.accelerator

    def devices(self, local_rank: int) -> tuple[str, ...]:
        """Torch's names of all devices of a local rank. On CPU they are "cpu:0", "cpu:1": names for the one CPU."""
        first = local_rank * self.devices_per_rank
        places = range(first, first + self.devices_per_rank)
        if self.accelerator == "cuda":
            return tuple(f"cuda:{self.device_indices[place]}" for place in places)
        return tuple(f"{self.accelerator}:{place - first}" for place in places)


def this_machine() -> Machine:
    """Asks torch, without starting CUDA in this process."""
    import torch
    import torch.distributed

    nccl = torch.distributed.is_available() and torch.distributed.is_nccl_available()
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    return Machine(gpus=torch.cuda.device_count(), mps=torch.backends.mps.is_available(), nccl=nccl, cores=cores)


def placement(
    strategy: str,
    *,
    devices: Devices = "auto",
    nodes: int = 1,
    accelerator: str = "auto",
    backend: str = "auto",
    demand: Demand = DEFAULT_DEMAND,
    machine: Machine | None = None,
) -> Placement:
    """Decides where the ranks go.

    `auto` takes one device, or ddp over all GPUs where there are several, or ddp over as many devices as are asked for.
    `single` takes one device. Every other strategy takes all GPUs, or on a machine without as many ranks as it demands.

    strategy: the config's strategy.name.
    backend: of the process group; auto is NCCL between GPUs and gloo between CPU ranks.
    demand: what that strategy asks for.
    machine: what the machine has; None asks torch.
    Raises: ConfigError with every fault of these keys.
    """
    faults = faults_of_words(devices=devices, nodes=nodes, accelerator=accelerator)
    if faults:
        raise ConfigError(faults)
    machine = machine or this_machine()
    chosen = _accelerator(strategy, devices, accelerator, machine)
    if devices == "auto":
        count = _automatic_count(strategy, chosen, machine, demand)
    else:
        count = devices if isinstance(devices, int) else len(devices)
    each = count if demand.devices is None else demand.devices
    ranks = max(1, count // each)
    model_ranks = ranks * nodes if demand.model_ranks is None else demand.model_ranks
    faults = faults_of_division(strategy, count=count, each=each, nodes=nodes, model_ranks=model_ranks)
    if faults:
        raise ConfigError(faults)
    indices = _indices(devices, count) if chosen == "cuda" else ()
    resolved = ("single" if ranks * nodes == 1 else "ddp") if strategy == "auto" else strategy
    placed = Placement(
        strategy=resolved,
        accelerator=chosen,
        backend=_backend(backend, chosen, machine) if ranks * nodes > 1 or demand.group else None,
        nodes=nodes,
        ranks_per_node=ranks,
        device_indices=indices,
        model_ranks=model_ranks,
        devices_per_rank=each,
    )
    faults = faults_of_placement(placed, devices=devices, machine=machine)
    if faults:
        raise ConfigError(faults)
    return placed


def adopted(
    rank: Rank,
    strategy: str,
    *,
    devices: Devices = "auto",
    nodes: int = 1,
    accelerator: str = "auto",
    backend: str = "auto",
    demand: Demand = DEFAULT_DEMAND,
    machine: Machine | None = None,
) -> Placement:
    """The placement of a rank that runs already: its launcher decided the numbers, which must fit the config's.

    `devices: auto` and `nodes: 1` accept any number, so that torchrun and SLURM need not be repeated in the config.

    Raises: ConfigError where the config asks for other numbers than were started.
    """
    started = rank.local_world_size
    chosen = {"accelerator": accelerator, "backend": backend, "demand": demand, "machine": machine}
    if demand.devices is None:
        if rank.world_size > 1:
            raise ConfigError([too_many_ranks(strategy, rank)])
        return placement(strategy, devices=devices, nodes=nodes, **chosen)
    asked = started * demand.devices if devices == "auto" else (devices if isinstance(devices, int) else len(devices))
    wanted = asked // demand.devices
    wanted_nodes = rank.nodes if nodes == 1 else nodes
    same = (wanted, wanted_nodes) == (started, rank.nodes)
    if rank.is_confined:  # each a node of its own, so that the products are what is compared
        fits = rank.world_size % wanted == 0 if nodes == 1 else rank.world_size == wanted * nodes
        same = devices == "auto" or fits
    if not same:
        raise ConfigError([mismatch(rank, devices=devices, nodes=nodes, wanted=wanted, wanted_nodes=wanted_nodes)])
    # Lists keep their indices; `auto` becomes the number that was started.
    placed = started * demand.devices if devices == "auto" or rank.is_confined else devices
    return placement(strategy, devices=placed, nodes=rank.nodes, **chosen)


def _accelerator(strategy: str, devices: Devices, accelerator: str, machine: Machine) -> Accelerator:
    if accelerator != "auto":
        return accelerator  # type: ignore[return-value]  # one of ACCELERATORS
    if machine.gpus:
        return "cuda"
    if machine.mps and strategy in ("auto", "single") and devices in ("auto", 1):
        return "mps"
    return "cpu"


def _backend(backend: str, accelerator: Accelerator, machine: Machine) -> str:
    if backend != "auto":
        return backend
    return "nccl" if accelerator == "cuda" and machine.nccl else "gloo"


def _automatic_count(strategy: str, accelerator: Accelerator, machine: Machine, demand: Demand) -> int:
    if strategy == "single":
        return 1
    if accelerator == "cuda":
        return max(1, machine.gpus)
    if demand.cpu_devices is not None:
        return demand.cpu_devices
    return 1 if strategy == "auto" else CPU_RANKS


def _indices(devices: Devices, count: int) -> tuple[int, ...]:
    return tuple(range(count)) if devices == "auto" or isinstance(devices, int) else tuple(devices)
