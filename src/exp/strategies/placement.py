"""Placement of a run: its number of ranks, their devices and their backend.

placement(strategy, devices=..., nodes=..., accelerator=..., demand=...)      for the check, before ranks are started
adopt_placement(rank, strategy, devices=..., ...)                             in a process that a launcher has started

A strategy fixes some sizes in Dimensions and names one dimension that takes the remaining devices. For example,
`hybrid` with tensor=2 on 8 devices has replicate=4 and tensor=2.

Ranks that split one model (tensor or pipeline parallel) are neighbors and process the same samples of a batch. With
tensor=2, ranks 0 and 1 process the first part, and ranks 2 and 3 the second part.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, cast

from exp.errors import ErrorDetails, config_error, invalid_value, not_supported_with, raise_errors
from exp.strategies.rank import Rank

# Default number of CPU ranks. Two ranks are enough to try DDP on a laptop. More ranks would compete for the cores.
CPU_RANKS = 2
# Maximum number of CPU ranks per core. So many ranks are useful only to test a strategy. Each rank is a process of half
# a gigabyte.
RANKS_OF_A_CORE = 4
# Number of CPU ranks that is always allowed, even on a machine with few cores.
CPU_RANKS_AT_LEAST = 16

Accelerator = Literal["cpu", "cuda", "mps"]
Devices = int | Literal["auto"] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """Devices of this machine.

    Attributes:
        gpus: Number of visible CUDA devices.
        mps: Whether torch can use Apple's GPU. Default: False.
        nccl: Whether torch includes NCCL. Default: True.
        cores: Number of CPU cores that this process may use; None if unknown. Default: None.
    """

    gpus: int
    mps: bool = False
    nccl: bool = True
    cores: int | None = None


@dataclass(frozen=True, kw_only=True)
class Dimensions:
    """Sizes of a run's placement. The number of ranks is replicate x shard x tensor x pipeline.

    Attributes:
        replicate: Number of ranks, or groups of ranks, that have the same weights and process different samples.
            Default: 1.
        shard: Number of ranks, or groups of ranks, that store shards of the same weights and process different samples.
            Default: 1.
        tensor: Number of ranks that split each layer and process the same samples. Default: 1.
        pipeline: Number of ranks that have different layers and process the same samples. Default: 1.
        layers: Number of devices per rank. The rank splits its layers over the devices, or runs replicas on them.
            Default: 1.
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
        """Number of equal parts into which the samples of each global batch are split."""
        return self.replicate * self.shard

    @property
    def model_ranks(self) -> int:
        """Number of neighboring ranks that split one model and process the same samples of a batch."""
        return self.tensor * self.pipeline

    def models(self) -> list[list[int]]:
        """Return the ranks of each model. The ranks of a model process the same samples of a batch."""
        return [list(range(first, first + self.model_ranks)) for first in range(0, self.world_size, self.model_ranks)]

    def peers(self) -> list[list[int]]:
        """Return the groups of ranks that have the same part of the model.

        The ranks of a group process different samples of a batch.
        """
        return [list(ranks) for ranks in zip(*self.models(), strict=True)]


Dimension = Literal["replicate", "shard", "tensor", "pipeline", "layers"]


@dataclass(frozen=True, kw_only=True)
class Demand:
    """Devices that a strategy needs.

    Attributes:
        dimensions: Sizes that the strategy fixes. The other sizes are 1.
        rest: Dimension that takes the remaining devices. None: the strategy does not support more devices. Default:
            replicate.
        cpu_devices: Number of devices for `launch.devices: auto` on a machine without a GPU. Default: 2.
        group: Whether a run with a single rank needs a process group. Default: False.
        adapts: Whether the strategy becomes `single` or `ddp`, depending on the number of devices. Default: False.
    """

    dimensions: Dimensions = Dimensions()
    rest: Dimension | None = "replicate"
    cpu_devices: int = CPU_RANKS
    group: bool = False
    adapts: bool = False


DEFAULT_DEMAND = Demand()
DEVICES, ACCELERATOR = "launch.devices", "launch.accelerator"


@dataclass(frozen=True, kw_only=True)
class Placement(Dimensions):
    """Dimensions and devices of a run.

    Attributes:
        strategy: Name of the strategy in the config, for messages. `auto` is replaced by "single" or "ddp".
        accelerator: Type of the devices.
        backend: "gloo" or "nccl". None: the run has no process group.
        nodes: Number of nodes.
        device_indices: Indices of the GPUs on each node, in the order of the local ranks. Empty on CPU and MPS.
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
        """Return the index of the part of each batch that a rank processes."""
        return global_rank // self.model_ranks

    def device(self, local_rank: int) -> str:
        """Return the name in torch of a local rank's first device, such as "cuda:1"."""
        return self.devices(local_rank)[0] if self.accelerator == "cuda" else self.accelerator

    def devices(self, local_rank: int) -> tuple[str, ...]:
        """Return the names in torch of all devices of a local rank.

        A CPU rank with two devices has the names "cpu:0" and "cpu:1", but torch uses the same CPU for both.
        """
        indices: Sequence[int] = range(self.layers)
        if self.accelerator == "cuda":
            indices = self.device_indices[local_rank * self.layers : (local_rank + 1) * self.layers]
        return tuple(f"{self.accelerator}:{index}" for index in indices)


def this_machine() -> Machine:
    """Return the devices that torch detects, without initializing CUDA in this process."""
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
    """Return the placement of a run. Parameters with the names of `launch` keys have the types in exp.config.settings.

    Args:
        strategy: `strategy.name` of the config, for messages.
        devices: Devices per node. `auto` uses all GPUs, or the strategy's `cpu_devices` on a machine without a GPU.
            Default: auto.
        nodes: Number of nodes. Default: 1.
        accelerator: `cpu`, `cuda`, `mps` or `auto`. Default: auto.
        backend: Backend of the process group. `auto` uses NCCL between GPUs, and gloo between CPU ranks. Default: auto.
        demand: Devices that the strategy needs. Default: one rank per device, with a copy of the network.
        machine: Devices of the machine. None asks torch for the devices. Default: None.

    Raises:
        ConfigError: The values are not supported. The exception has all errors.
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
    """Return the placement of a rank that a launcher has already started.

    `devices: auto` and `nodes: 1` accept any number of started ranks. The config therefore need not repeat the numbers
    that torchrun or SLURM received.

    Args:
        rank: Rank of this process.
        strategy: `strategy.name` of the config, for messages.
        devices: Devices per node. Default: auto.
        nodes: Number of nodes. Default: 1.
        demand: Devices that the strategy needs. Default: one rank per device, with a copy of the network.
        where: Other parameters of `placement`.

    Raises:
        ConfigError: The launcher started other numbers of ranks or nodes than the config requires.
    """
    if demand.rest == "layers":
        if rank.world_size > 1:
            fix = "Start exp without torchrun and srun, or write strategy=ddp"
            got = f"{strategy}, which uses all devices in one process, in a job of {rank.world_size} ranks"
            raise config_error("strategy.name", got=got, expected="one rank", fix=fix)
    else:
        started, each = rank.local_world_size, demand.dimensions.layers
        wanted = started if devices == "auto" else _number(devices) // each
        wanted_nodes = rank.nodes if nodes == 1 else nodes
        same = (wanted, wanted_nodes) == (started, rank.nodes)
        if rank.is_confined:  # each rank counts as a node, so that only total numbers of ranks can be compared
            fits = rank.world_size % wanted == 0 if nodes == 1 else rank.world_size == wanted * nodes
            same = devices == "auto" or fits
        if not same:
            name, value = ("devices", _words(devices)) if wanted != started else ("nodes", str(nodes))
            expected = f"the ranks that were started: {started} on each of {rank.nodes} nodes"
            fix = f"Start {wanted} ranks on each of {wanted_nodes} nodes, or write launch.devices=auto launch.nodes=1"
            raise config_error(f"launch.{name}", got=value, expected=expected, fix=fix)
        # A list of device indices does not change. `auto` becomes the number of devices of the started ranks.
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
    # Apple's GPU does not support communication between ranks, so it is used only for strategies with one device.
    if machine.mps and (demand.adapts or demand.rest is None) and devices in ("auto", 1):
        return "mps"
    return "cpu"


def _count(devices: Devices, accelerator: Accelerator, machine: Machine, demand: Demand) -> int:
    """Return the number of devices per node."""
    if devices != "auto":
        return _number(devices)
    if demand.rest is None:
        return demand.dimensions.world_size * demand.dimensions.layers
    return max(1, machine.gpus) if accelerator == "cuda" else demand.cpu_devices


def _dimensions(strategy: str, demand: Demand, *, count: int, nodes: int) -> Dimensions:
    """Return the dimensions of a run.

    Raises:
        ConfigError: The number of devices is not divisible by the sizes that the strategy fixes.
    """
    fixed = demand.dimensions
    if demand.rest == "layers":
        fixed = replace(fixed, layers=count)
    if count % fixed.layers:
        expected = f"a multiple of {fixed.layers}: {strategy} takes {fixed.layers} devices per rank"
        raise config_error("launch.devices", got=str(count), expected=expected)
    ranks, together = count // fixed.layers * nodes, fixed.world_size
    if ranks % together:
        expected = f"a multiple of {together}: each model of {strategy} needs {together} ranks"
        raise config_error("launch.devices", got=f"{ranks} ranks", expected=expected)
    rest: Dimension = "replicate" if demand.rest in (None, "layers") else demand.rest
    return replace(fixed, **{rest: getattr(fixed, rest) * ranks // together})


def _placement_errors(
    placed: Placement, *, devices: Devices, demand: Demand, machine: Machine
) -> Iterator[ErrorDetails]:
    count, kind, gpus, ranks = placed.ranks_per_node, placed.accelerator, machine.gpus, placed.world_size
    listed = not isinstance(devices, int | str)
    on_cpu, text = "Write launch.accelerator=cpu", _words(devices)
    if not isinstance(devices, int | str) and len(set(devices)) != max(len(devices), 1):
        yield invalid_value(DEVICES, devices, "a list of different GPU indices")
    elif kind == "cuda" and not gpus:
        yield invalid_value(ACCELERATOR, kind, "a machine with a CUDA device that torch can use", f"{on_cpu} or auto")
    elif kind == "cuda" and max(placed.device_indices) >= gpus:
        expected = f"GPUs of this machine, which has {gpus}" + (f": 0 to {gpus - 1}" if listed else "")
        yield not_supported_with(DEVICES, text, kind, expected, f"{on_cpu} to try the strategy without GPUs")
    elif listed and kind != "cuda":
        expected, fix = "a number, because a list selects GPUs", f"Write launch.devices={count}"
        yield not_supported_with(DEVICES, text, kind, expected, fix)
    if placed.backend == "nccl" and (kind != "cuda" or not machine.nccl):
        why = "NCCL communicates only between GPUs" if kind != "cuda" else "this torch was built without NCCL"
        yield not_supported_with("launch.backend", "nccl", kind, f"gloo: {why}", "Write launch.backend=auto")
    most = max(CPU_RANKS_AT_LEAST, RANKS_OF_A_CORE * (machine.cores or count))
    if kind == "cpu" and count > most:
        expected = f"at most {most} on this machine, which has {machine.cores} cores: each rank is a process"
        yield not_supported_with(DEVICES, count, kind, expected, "Write launch.devices=2 to try a strategy")
    if kind == "mps" and not machine.mps:
        yield invalid_value(ACCELERATOR, kind, "a Mac with a GPU that torch can use")
    if kind == "mps" and ranks > 1:
        yield not_supported_with(
            ACCELERATOR, kind, f"{ranks} ranks", "one rank: ranks cannot communicate on Apple's GPU", on_cpu
        )
    if demand.rest is None and ranks > demand.dimensions.world_size:
        yield not_supported_with("strategy.name", placed.strategy, f"{ranks} ranks", "one device", "Write strategy=ddp")


def _words(devices: Devices) -> str:
    return str(devices) if isinstance(devices, int | str) else f"[{','.join(str(index) for index in devices)}]"
