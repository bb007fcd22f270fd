"""Where a run's ranks go: how many, on what device, with what backend. Pure, but for the count of the machine's GPUs.

placement(strategy, devices=..., nodes=..., accelerator=..., demand=...) -> Placement     before the launch, for check
adopted(rank, strategy, devices=..., ...) -> Placement                 in a rank: what its launcher really made

A strategy fixes some Dimensions and says which one takes the rest of the devices: `hybrid` with tensor=2 on 8 devices
has data=4 and tensor=2.

Ranks that work on one share of a batch together (tensor or pipeline parallel) are neighbours: with tensor=2, ranks
0 and 1 hold the first share, 2 and 3 the second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Literal, cast

from exp.errors import ConfigError, Fault
from exp.strategies.rank import Rank

# Two, so that ddp means something on a laptop, and no more, because they share its cores.
CPU_RANKS = 2
# Ranks that share a core are for trying a strategy out. Each is a process with half a gigabyte of its own.
RANKS_OF_A_CORE = 4
# So many are let pass on a machine of any size.
CPU_RANKS_AT_LEAST = 16
ACCELERATORS = ("auto", "cpu", "cuda", "mps")

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
class Dimensions:
    """How many ways a run is divided. There are data x shard x tensor x pipeline ranks.

    data: ranks, or groups of them, that hold the same weights and share the batch.
    shard: ranks, or groups of them, that keep parts of the same weights and share the batch.
    tensor: ranks that compute parts of each layer, on one share of the batch.
    pipeline: ranks that hold different layers, on one share of the batch.
    devices: of each rank, over which its layers are split or its replicas run.
    """

    data: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    devices: int = 1

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.model_ranks

    @property
    def data_ranks(self) -> int:
        """Into how many shares each global batch is split."""
        return self.data * self.shard

    @property
    def model_ranks(self) -> int:
        """Neighbouring ranks that work on one share of a batch together."""
        return self.tensor * self.pipeline

    def models(self) -> list[list[int]]:
        """The ranks of each model, which work on one share of a batch."""
        return [list(range(first, first + self.model_ranks)) for first in range(0, self.world_size, self.model_ranks)]

    def peers(self) -> list[list[int]]:
        """The ranks that have the same place in their models, one for each share of a batch."""
        return [list(ranks) for ranks in zip(*self.models(), strict=True)]


Dimension = Literal["data", "shard", "tensor", "pipeline", "devices"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a strategy asks of the machine, before anything is placed.

    dimensions: those that the strategy fixes; the others are 1.
    rest: the dimension that takes the devices beyond these; None where there may be no others.
    cpu_devices: how many `launch.devices: auto` takes on a machine without a GPU.
    group: whether one rank alone needs a process group, too.
    adapts: whether the machine decides between `single` and `ddp`, which the placement is then called.
    """

    dimensions: Dimensions = Dimensions()
    rest: Dimension | None = "data"
    cpu_devices: int = CPU_RANKS
    group: bool = False
    adapts: bool = False


DEFAULT_DEMAND = Demand()


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks go.

    strategy: the config's word, with `auto` decided: "single" or "ddp". For messages.
    backend: of the process group, "gloo" or "nccl"; None where there is none, for one rank seldom needs it.
    device_indices: of the GPUs on each node, in the order of the local ranks; empty on CPU and MPS.
    """

    strategy: str
    accelerator: Accelerator
    backend: str | None
    nodes: int
    dimensions: Dimensions
    device_indices: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.dimensions.world_size

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    @property
    def devices_per_rank(self) -> int:
        """More than one where the layers of a rank are split over devices, or its replicas run on them."""
        return self.dimensions.devices

    @property
    def model_ranks(self) -> int:
        """Neighbouring ranks that work on one share of a batch together."""
        return self.dimensions.model_ranks

    @property
    def data_ranks(self) -> int:
        """Into how many shares each global batch is split."""
        return self.dimensions.data_ranks

    def data_rank(self, global_rank: int) -> int:
        """Which of these shares a rank works on."""
        return global_rank // self.model_ranks

    def device(self, local_rank: int) -> str:
        """Torch's name of a local rank's first device, such as "cuda:1"."""
        return self.devices(local_rank)[0] if self.accelerator == "cuda" else self.accelerator

    def devices(self, local_rank: int) -> tuple[str, ...]:
        """Torch's names of all devices of a local rank. On CPU they are "cpu:0", "cpu:1": names for the one CPU."""
        each = self.devices_per_rank
        indices = range(each)
        if self.accelerator == "cuda":
            return tuple(f"cuda:{index}" for index in self.device_indices[local_rank * each : (local_rank + 1) * each])
        return tuple(f"{self.accelerator}:{index}" for index in indices)


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

    `devices: auto` takes all GPUs, or on a machine without as many devices as the strategy demands.

    strategy: the config's strategy.name, for messages alone.
    backend: of the process group; auto is NCCL between GPUs and gloo between CPU ranks.
    demand: what that strategy asks for.
    machine: what the machine has; None asks torch.
    Raises: ConfigError with every fault of these keys.
    """
    faults = _word_faults(devices=devices, nodes=nodes, accelerator=accelerator)
    if faults:
        raise ConfigError(faults)
    machine = machine or this_machine()
    chosen = _accelerator(demand, devices, accelerator, machine)
    count = _count(devices, chosen, machine, demand)
    dimensions = _dimensions(strategy, demand, count=count, nodes=nodes)
    alone = dimensions.world_size == 1
    placed = Placement(
        strategy=("single" if alone else "ddp") if demand.adapts else strategy,
        accelerator=chosen,
        backend=None if alone and not demand.group else _backend(backend, chosen, machine),
        nodes=nodes,
        dimensions=dimensions,
        device_indices=() if chosen != "cuda" else tuple(range(count) if isinstance(devices, int | str) else devices),
    )
    faults = list(_placement_faults(placed, devices=devices, demand=demand, machine=machine))
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
    if demand.rest == "devices":
        if rank.world_size > 1:
            raise ConfigError([_too_many_ranks(strategy, rank)])
    else:
        started, each = rank.local_world_size, demand.dimensions.devices
        wanted = started if devices == "auto" else _number(devices) // each
        wanted_nodes = rank.nodes if nodes == 1 else nodes
        same = (wanted, wanted_nodes) == (started, rank.nodes)
        if rank.is_confined:  # each a node of its own, so that the products are what is compared
            fits = rank.world_size % wanted == 0 if nodes == 1 else rank.world_size == wanted * nodes
            same = devices == "auto" or fits
        if not same:
            raise ConfigError([_mismatch(rank, devices=devices, nodes=nodes, wanted=wanted, wanted_nodes=wanted_nodes)])
        # Lists keep their indices; `auto` becomes the number that was started.
        devices = started * each if devices == "auto" or rank.is_confined else devices
        nodes = rank.nodes
    return placement(
        strategy, devices=devices, nodes=nodes, accelerator=accelerator, backend=backend, demand=demand, machine=machine
    )


def _number(devices: int | Sequence[int]) -> int:
    return devices if isinstance(devices, int) else len(devices)


def _accelerator(demand: Demand, devices: Devices, accelerator: str, machine: Machine) -> Accelerator:
    if accelerator != "auto":
        return cast(Accelerator, accelerator)  # one of ACCELERATORS: _word_faults has seen it
    if machine.gpus:
        return "cuda"
    # Ranks cannot talk from Apple's GPU: it is for strategies that are content with one device.
    if machine.mps and (demand.adapts or demand.rest is None) and devices in ("auto", 1):
        return "mps"
    return "cpu"


def _backend(backend: str, accelerator: Accelerator, machine: Machine) -> str:
    if backend != "auto":
        return backend
    return "nccl" if accelerator == "cuda" and machine.nccl else "gloo"


def _count(devices: Devices, accelerator: Accelerator, machine: Machine, demand: Demand) -> int:
    """Devices of each node."""
    if devices != "auto":
        return _number(devices)
    if demand.rest is None:
        return demand.dimensions.world_size * demand.dimensions.devices
    return max(1, machine.gpus) if accelerator == "cuda" else demand.cpu_devices


def _dimensions(strategy: str, demand: Demand, *, count: int, nodes: int) -> Dimensions:
    """Raises: ConfigError where the devices do not come out even."""
    fixed = demand.dimensions
    if demand.rest == "devices":
        fixed = replace(fixed, devices=count)
    if count % fixed.devices:
        expected = f"a multiple of {fixed.devices}, for {strategy} takes {fixed.devices} devices a rank"
        raise ConfigError([Fault(key="launch.devices", got=str(count), expected=expected)])
    ranks = count // fixed.devices * nodes
    if ranks % fixed.world_size:
        together = fixed.world_size
        expected = f"a multiple of {together}, for {strategy} has {together} ranks work on one batch together"
        raise ConfigError([Fault(key="launch.devices", got=f"{ranks} ranks", expected=expected)])
    rest: Dimension = "data" if demand.rest in (None, "devices") else demand.rest
    return replace(fixed, **{rest: getattr(fixed, rest) * ranks // fixed.world_size})


def _word_faults(*, devices: object, nodes: object, accelerator: object) -> list[Fault]:
    faults = []
    number = isinstance(devices, int) and not isinstance(devices, bool) and devices >= 1
    listed = (
        isinstance(devices, Sequence)
        and not isinstance(devices, str)
        and len(devices) > 0
        and all(isinstance(index, int) and not isinstance(index, bool) and index >= 0 for index in devices)
        and len(set(devices)) == len(devices)
    )
    if not (devices == "auto" or number or listed):
        faults.append(
            Fault(
                key="launch.devices", got=repr(devices), expected="auto, 1 or more, or a list of different GPU indices"
            )
        )
    if not isinstance(nodes, int) or isinstance(nodes, bool) or nodes < 1:
        faults.append(Fault(key="launch.nodes", got=repr(nodes), expected="1 or more"))
    if accelerator not in ACCELERATORS:
        cure = "Write launch.accelerator=cuda" if accelerator == "gpu" else None
        faults.append(
            Fault(key="launch.accelerator", got=repr(accelerator), expected=" | ".join(ACCELERATORS), cure=cure)
        )
    return faults


def _placement_faults(placed: Placement, *, devices: Devices, demand: Demand, machine: Machine) -> Iterator[Fault]:
    yield from _backend_faults(placed, machine)
    yield from _core_faults(placed, machine)
    count = placed.ranks_per_node
    listed = devices != "auto" and not isinstance(devices, int)
    if placed.accelerator == "cuda" and not machine.gpus:
        yield Fault(
            key="launch.accelerator",
            got="cuda",
            expected="a machine with a CUDA device that torch can see",
            cure="Write launch.accelerator=cpu or auto",
        )
    elif placed.accelerator == "cuda" and max(placed.device_indices) >= machine.gpus:
        yield Fault(
            key="launch.devices",
            got=_words(devices),
            expected=f"at most the {machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of this machine"
            + (f", 0 to {machine.gpus - 1}" if listed else ""),
            cure="Write launch.accelerator=cpu to try it with that many gloo ranks",
        )
    if placed.accelerator == "mps" and not machine.mps:
        yield Fault(key="launch.accelerator", got="mps", expected="a Mac whose GPU torch can use")
    if placed.accelerator == "mps" and placed.world_size > 1:
        yield Fault(
            key="launch.accelerator",
            got=f"mps with {placed.world_size} ranks",
            expected="one rank: Apple's GPU has no collectives",
            cure="Write launch.accelerator=cpu",
        )
    if listed and placed.accelerator != "cuda":
        yield Fault(
            key="launch.devices",
            got=f"{_words(devices)} on {placed.accelerator}",
            expected="a number: a list names GPUs",
            cure=f"Write launch.devices={count}",
        )
    if demand.rest is None and placed.world_size > demand.dimensions.world_size:
        yield Fault(
            key="strategy.name",
            got=f"{placed.strategy} with {placed.world_size} ranks",
            expected="one device",
            cure="Write strategy=ddp",
        )


def _core_faults(placed: Placement, machine: Machine) -> Iterator[Fault]:
    if placed.accelerator != "cpu" or machine.cores is None:
        return
    most = max(CPU_RANKS_AT_LEAST, RANKS_OF_A_CORE * machine.cores)
    if placed.ranks_per_node <= most:
        return
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    yield Fault(
        key="launch.devices",
        got=f"{placed.ranks_per_node} ranks on the CPU",
        expected=f"at most {most} on this machine, which has {cores}: each rank is a process, and they share the cores",
        cure="Write launch.devices=2 to try a strategy out",
    )


def _backend_faults(placed: Placement, machine: Machine) -> Iterator[Fault]:
    if placed.backend != "nccl":
        return
    if placed.accelerator != "cuda":
        yield Fault(
            key="launch.backend",
            got=f"nccl on {placed.accelerator}",
            expected="gloo: NCCL talks between GPUs alone",
            cure="Write launch.backend=auto",
        )
    elif not machine.nccl:
        yield Fault(key="launch.backend", got="nccl", expected="gloo: this torch was built without NCCL")


def _too_many_ranks(strategy: str, rank: Rank) -> Fault:
    return Fault(
        key="strategy.name",
        got=f"{strategy}, one process with all its devices, as rank {rank.global_rank} of {rank.world_size}",
        expected="one rank",
        cure="Start it without torchrun and srun, or write strategy=ddp",
    )


def _mismatch(rank: Rank, *, devices: Devices, nodes: int, wanted: int, wanted_nodes: int) -> Fault:
    return Fault(
        key="launch.devices" if wanted != rank.local_world_size else "launch.nodes",
        got=f"devices={_words(devices)}, nodes={nodes}",
        expected=f"what was started: {rank.local_world_size} ranks on each of {rank.nodes} nodes",
        cure=f"Start {wanted} on each of {wanted_nodes}, or write launch.devices=auto and launch.nodes=1",
    )


def _words(devices: Devices) -> str:
    return str(devices) if isinstance(devices, int | str) else f"[{','.join(str(index) for index in devices)}]"
