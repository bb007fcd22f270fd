"""Where a run's ranks go: how many, on what device, with what backend. Pure, but for the count of the machine's GPUs.

placement(strategy, devices=..., nodes=..., accelerator=..., demand=...) -> Placement     before the launch, for check
adopted(rank, strategy, devices=..., ...) -> Placement                 in a rank: what its launcher really made

A strategy fixes some Dimensions and says which one takes the rest of the devices: `hybrid` with tensor=2 on 8 devices
has replicate=4 and tensor=2.

Ranks that work on one share of a batch together (tensor or pipeline parallel) are neighbours: with tensor=2, ranks
0 and 1 hold the first share, 2 and 3 the second.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from exp.errors import ConfigError, ErrorDetails, config_error, raise_errors
from exp.strategies.rank import Rank

# Two, so that ddp means something on a laptop, and no more, because they share its cores.
CPU_RANKS = 2
# Ranks that share a core are for trying a strategy out. Each is a process with half a gigabyte of its own.
RANKS_OF_A_CORE = 4
# So many are let pass on a machine of any size.
CPU_RANKS_AT_LEAST = 16

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
    """The sizes of a run's placement. There are replicate x shard x tensor x pipeline ranks.

    replicate: ranks, or groups of ranks, that hold the same weights and share the batch.
    shard: ranks, or groups of ranks, that keep parts of the same weights and share the batch.
    tensor: ranks that compute parts of each layer, on one share of the batch.
    pipeline: ranks that hold different layers, on one share of the batch.
    layers: devices of each rank, over which its layers are split or its replicas run.
    """

    replicate: int = 1
    shard: int = 1
    tensor: int = 1
    pipeline: int = 1
    layers: int = 1

    @property
    def world_size(self) -> int:
        return self.data_ranks * self.model_ranks

    @property
    def data_ranks(self) -> int:
        """The number of shares into which each global batch is split."""
        return self.replicate * self.shard

    @property
    def model_ranks(self) -> int:
        """The number of neighboring ranks that work on one share of a batch together."""
        return self.tensor * self.pipeline

    def models(self) -> list[list[int]]:
        """Return the ranks of each model, which work on one share of a batch."""
        return [list(range(first, first + self.model_ranks)) for first in range(0, self.world_size, self.model_ranks)]

    def peers(self) -> list[list[int]]:
        """Return the ranks that have the same place in their models, one for each share of a batch."""
        return [list(ranks) for ranks in zip(*self.models(), strict=True)]


Dimension = Literal["replicate", "shard", "tensor", "pipeline", "layers"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """What a strategy asks of the machine, before anything is placed.

    dimensions: those that the strategy fixes; the others are 1.
    rest: the dimension that takes the devices beyond these; None if there may be no others.
    cpu_devices: how many `launch.devices: auto` takes on a machine without a GPU.
    group: whether one rank alone needs a process group, too.
    adapts: whether the machine decides between `single` and `ddp`, which the placement is then called.
    """

    dimensions: Dimensions = Dimensions()
    rest: Dimension | None = "replicate"
    cpu_devices: int = CPU_RANKS
    group: bool = False
    adapts: bool = False


DEFAULT_DEMAND = Demand()


@dataclass(frozen=True, kw_only=True)
class Placement(Dimensions):
    """A run's dimensions and the devices that they are on.

    strategy: the config's word, with `auto` decided: "single" or "ddp". For messages.
    backend: of the process group, "gloo" or "nccl"; None without a group, which one rank seldom needs.
    device_indices: of the GPUs on each node, in the order of the local ranks; empty on CPU and MPS.
    """

    strategy: str
    accelerator: Accelerator
    backend: str | None
    nodes: int
    device_indices: tuple[int, ...] = ()

    @property
    def ranks_per_node(self) -> int:
        return self.world_size // self.nodes

    def data_rank(self, global_rank: int) -> int:
        """Return the share of each batch that a rank works on."""
        return global_rank // self.model_ranks

    def device(self, local_rank: int) -> str:
        """Return torch's name of a local rank's first device, such as "cuda:1"."""
        return self.devices(local_rank)[0] if self.accelerator == "cuda" else self.accelerator

    def devices(self, local_rank: int) -> tuple[str, ...]:
        """Return torch's names of all devices of a local rank. "cpu:0" and "cpu:1" are names for the one CPU."""
        indices: Sequence[int] = range(self.layers)
        if self.accelerator == "cuda":
            indices = self.device_indices[local_rank * self.layers : (local_rank + 1) * self.layers]
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
    """Decide where the ranks go. The values are of the kinds that exp.check.keys declares for `launch`.

    `devices: auto` takes all GPUs, or on a machine without GPUs as many devices as the strategy demands.

    strategy: the config's strategy.name, for messages alone.
    backend: of the process group; auto is NCCL between GPUs and gloo between CPU ranks.
    machine: None asks torch.
    Raises: ConfigError with every error of these keys.
    """
    machine = machine or this_machine()
    chosen = _accelerator(demand, devices, accelerator, machine)
    count = _count(devices, chosen, machine, demand)
    sizes = _dimensions(strategy, demand, count=count, nodes=nodes)
    alone = sizes.world_size == 1
    if backend == "auto":
        backend = "nccl" if chosen == "cuda" and machine.nccl else "gloo"
    placed = Placement(
        **vars(sizes),
        strategy=("single" if alone else "ddp") if demand.adapts else strategy,
        accelerator=chosen,
        backend=None if alone and not demand.group else backend,
        nodes=nodes,
        device_indices=() if chosen != "cuda" else tuple(range(count) if isinstance(devices, int | str) else devices),
    )
    raise_errors(_placement_errors(placed, devices=devices, demand=demand, machine=machine))
    return placed


def adopt_placement(
    rank: Rank,
    strategy: str,
    *,
    devices: Devices = "auto",
    nodes: int = 1,
    demand: Demand = DEFAULT_DEMAND,
    **where: Any,
) -> Placement:
    """Return the placement of a rank that runs already: its launcher decided the numbers, which must fit the config's.

    `devices: auto` and `nodes: 1` accept any number, so that torchrun and SLURM need not be repeated in the config.

    where: the other parameters of `placement`.
    Raises: ConfigError if the config asks for other numbers than were started.
    """
    if demand.rest == "layers":
        if rank.world_size > 1:
            got = f"{strategy}, one process with all its devices, as rank {rank.global_rank} of {rank.world_size}"
            fix = "Start it without torchrun and srun, or write strategy=ddp"
            raise config_error("strategy.name", got=got, expected="one rank", fix=fix)
    else:
        started, each = rank.local_world_size, demand.dimensions.layers
        wanted = started if devices == "auto" else _number(devices) // each
        wanted_nodes = rank.nodes if nodes == 1 else nodes
        same = (wanted, wanted_nodes) == (started, rank.nodes)
        if rank.is_confined:  # each a node of its own, so that the products are what is compared
            fits = rank.world_size % wanted == 0 if nodes == 1 else rank.world_size == wanted * nodes
            same = devices == "auto" or fits
        if not same:
            raise ConfigError([
                _launch_error(
                    "devices" if wanted != started else "nodes",
                    f"devices={_words(devices)}, nodes={nodes}",
                    f"what was started: {started} ranks on each of {rank.nodes} nodes",
                    f"Start {wanted} on each of {wanted_nodes}, or write launch.devices=auto and launch.nodes=1",
                )
            ])  # fmt: skip
        # Lists keep their indices; `auto` becomes the number that was started.
        devices = started * each if devices == "auto" or rank.is_confined else devices
        nodes = rank.nodes
    return placement(strategy, devices=devices, nodes=nodes, demand=demand, **where)


def _number(devices: int | Sequence[int]) -> int:
    return devices if isinstance(devices, int) else len(devices)


def _accelerator(demand: Demand, devices: Devices, accelerator: str, machine: Machine) -> Accelerator:
    if accelerator != "auto":
        return cast(Accelerator, accelerator)
    if machine.gpus:
        return "cuda"
    # Ranks cannot communicate from Apple's GPU: it is for strategies that are content with one device.
    if machine.mps and (demand.adapts or demand.rest is None) and devices in ("auto", 1):
        return "mps"
    return "cpu"


def _count(devices: Devices, accelerator: Accelerator, machine: Machine, demand: Demand) -> int:
    """Return the number of devices of each node."""
    if devices != "auto":
        return _number(devices)
    if demand.rest is None:
        return demand.dimensions.world_size * demand.dimensions.layers
    return max(1, machine.gpus) if accelerator == "cuda" else demand.cpu_devices


def _dimensions(strategy: str, demand: Demand, *, count: int, nodes: int) -> Dimensions:
    """Return the dimensions of all ranks. Raises: ConfigError if the devices do not come out even."""
    fixed = demand.dimensions
    if demand.rest == "layers":
        fixed = replace(fixed, layers=count)
    if count % fixed.layers:
        expected = f"a multiple of {fixed.layers}, for {strategy} takes {fixed.layers} devices a rank"
        raise ConfigError([_launch_error("devices", str(count), expected)])
    ranks, together = count // fixed.layers * nodes, fixed.world_size
    if ranks % together:
        expected = f"a multiple of {together}, for {strategy} has {together} ranks work on one batch together"
        raise ConfigError([_launch_error("devices", f"{ranks} ranks", expected)])
    rest: Dimension = "replicate" if demand.rest in (None, "layers") else demand.rest
    return replace(fixed, **{rest: getattr(fixed, rest) * ranks // together})


def _placement_errors(
    placed: Placement, *, devices: Devices, demand: Demand, machine: Machine
) -> Iterator[ErrorDetails]:
    count, kind, gpus = placed.ranks_per_node, placed.accelerator, machine.gpus
    listed = not isinstance(devices, int | str)
    on_cpu = "Write launch.accelerator=cpu"
    if not isinstance(devices, int | str) and len(set(devices)) != max(len(devices), 1):
        yield _launch_error("devices", _words(devices), "a list of different GPU indices")
    elif kind == "cuda" and not gpus:
        expected = "a machine with a CUDA device that torch can see"
        yield _launch_error("accelerator", "cuda", expected, f"{on_cpu} or auto")
    elif kind == "cuda" and max(placed.device_indices) >= gpus:
        expected = f"at most the {gpus} GPU{'s' if gpus > 1 else ''} of this machine"
        expected += f", 0 to {gpus - 1}" if listed else ""
        yield _launch_error("devices", _words(devices), expected, f"{on_cpu} to try it with that many gloo ranks")
    elif listed and kind != "cuda":
        expected = "a number: a list names GPUs"
        yield _launch_error("devices", f"{_words(devices)} on {kind}", expected, f"Write launch.devices={count}")
    if placed.backend == "nccl" and kind != "cuda":
        expected = "gloo: NCCL communicates between GPUs alone"
        yield _launch_error("backend", f"nccl on {kind}", expected, "Write launch.backend=auto")
    elif placed.backend == "nccl" and not machine.nccl:
        yield _launch_error("backend", "nccl", "gloo: this torch was built without NCCL")
    if kind == "cpu" and machine.cores is not None:
        most = max(CPU_RANKS_AT_LEAST, RANKS_OF_A_CORE * machine.cores)
        if count > most:
            cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
            expected = f"at most {most} on this machine, which has {cores}: each rank is a process"
            fix = "Write launch.devices=2 to try a strategy out"
            yield _launch_error("devices", f"{count} ranks on the CPU", expected, fix)
    if kind == "mps" and not machine.mps:
        yield _launch_error("accelerator", "mps", "a Mac whose GPU torch can use")
    if kind == "mps" and placed.world_size > 1:
        expected = "one rank: Apple's GPU has no collectives"
        yield _launch_error("accelerator", f"mps with {placed.world_size} ranks", expected, on_cpu)
    if demand.rest is None and placed.world_size > demand.dimensions.world_size:
        got = f"{placed.strategy} with {placed.world_size} ranks"
        yield ErrorDetails(key="strategy.name", got=got, expected="one device", fix="Write strategy=ddp")


def _launch_error(name: str, got: str, expected: str, fix: str | None = None) -> ErrorDetails:
    return ErrorDetails(key=f"launch.{name}", got=got, expected=expected, fix=fix)


def _words(devices: Devices) -> str:
    return str(devices) if isinstance(devices, int | str) else f"[{','.join(str(index) for index in devices)}]"
