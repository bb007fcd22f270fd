"""Where a run's ranks go: how many, on what device, with what backend. Pure, but for the count of the machine's GPUs.

placement(strategy, devices=..., nodes=..., accelerator=...) -> Placement      before the launch, and for the check
adopted(rank, strategy, devices=..., ...) -> Placement                        in a rank: what its launcher really made
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

from exp.errors import ConfigError, Fault
from exp.strategies.rank import Rank

ACCELERATORS = ("auto", "cpu", "cuda", "mps")
# Two, so that ddp means something on a laptop, and no more, because they share its cores.
CPU_RANKS = 2

Accelerator = Literal["cpu", "cuda", "mps"]
Devices = int | Literal["auto"] | Sequence[int]


@dataclass(frozen=True, kw_only=True)
class Machine:
    """What this machine can offer: CUDA devices that are visible, and whether torch can use Apple's GPU."""

    gpus: int
    mps: bool = False


@dataclass(frozen=True, kw_only=True)
class Placement:
    """Where the ranks go.

    strategy: the config's word, with `auto` decided: "single" or "ddp".
    backend: of the process group, "gloo" or "nccl"; None where there is one rank.
    device_indices: of the GPUs on each node, in the order of the local ranks; empty on CPU and MPS.
    """

    strategy: str
    accelerator: Accelerator
    backend: str | None
    nodes: int
    ranks_per_node: int
    device_indices: tuple[int, ...] = ()

    @property
    def world_size(self) -> int:
        return self.nodes * self.ranks_per_node

    def device(self, local_rank: int) -> str:
        """Torch's name of a local rank's device, such as "cuda:1"."""
        return f"cuda:{self.device_indices[local_rank]}" if self.accelerator == "cuda" else self.accelerator


def this_machine() -> Machine:
    """Asks torch, without starting CUDA in this process."""
    import torch

    return Machine(gpus=torch.cuda.device_count(), mps=torch.backends.mps.is_available())


def placement(
    strategy: str,
    *,
    devices: Devices = "auto",
    nodes: int = 1,
    accelerator: str = "auto",
    machine: Machine | None = None,
) -> Placement:
    """Decides where the ranks go.

    `auto` takes one device, or ddp over all GPUs where there are several, or ddp over as many devices as are asked for.
    `single` takes one device. Every other strategy takes one rank a GPU, and two ranks on a machine without.

    strategy: the config's strategy.name.
    machine: what the machine has; None asks torch.
    Raises: ConfigError with every fault of these four keys.
    """
    faults = _faults_of_words(devices=devices, nodes=nodes, accelerator=accelerator)
    if faults:
        raise ConfigError(faults)
    machine = machine or this_machine()
    chosen = _accelerator(strategy, devices, accelerator, machine)
    if devices == "auto":
        count = _automatic_count(strategy, chosen, machine)
    else:
        count = devices if isinstance(devices, int) else len(devices)
    indices = _indices(devices, count) if chosen == "cuda" else ()
    resolved = ("single" if count * nodes == 1 else "ddp") if strategy == "auto" else strategy
    placed = Placement(
        strategy=resolved,
        accelerator=chosen,
        backend=None if count * nodes == 1 else ("nccl" if chosen == "cuda" else "gloo"),
        nodes=nodes,
        ranks_per_node=count,
        device_indices=indices,
    )
    faults = _faults_of_placement(placed, devices=devices, accelerator=accelerator, machine=machine)
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
    machine: Machine | None = None,
) -> Placement:
    """The placement of a rank that runs already: its launcher decided the numbers, which must fit the config's.

    `devices: auto` and `nodes: 1` accept any number, so that torchrun and SLURM need not be repeated in the config.

    Raises: ConfigError where the config asks for other numbers than were started.
    """
    started = rank.local_world_size
    wanted = started if devices == "auto" else (devices if isinstance(devices, int) else len(devices))
    wanted_nodes = rank.nodes if nodes == 1 else nodes
    if (wanted, wanted_nodes) != (started, rank.nodes):
        raise ConfigError([_mismatch(rank, devices=devices, nodes=nodes, wanted=wanted, wanted_nodes=wanted_nodes)])
    # Lists keep their indices; `auto` becomes the number that was started.
    return placement(
        strategy,
        devices=started if devices == "auto" else devices,
        nodes=rank.nodes,
        accelerator=accelerator,
        machine=machine,
    )


def _accelerator(strategy: str, devices: Devices, accelerator: str, machine: Machine) -> Accelerator:
    if accelerator != "auto":
        return accelerator  # type: ignore[return-value]  # one of ACCELERATORS
    if machine.gpus:
        return "cuda"
    if machine.mps and strategy in ("auto", "single") and devices in ("auto", 1):
        return "mps"
    return "cpu"


def _automatic_count(strategy: str, accelerator: Accelerator, machine: Machine) -> int:
    if strategy == "single":
        return 1
    if accelerator == "cuda":
        return max(1, machine.gpus)
    return 1 if strategy == "auto" else CPU_RANKS


def _indices(devices: Devices, count: int) -> tuple[int, ...]:
    return tuple(range(count)) if devices == "auto" or isinstance(devices, int) else tuple(devices)


def _faults_of_words(*, devices: Any, nodes: Any, accelerator: Any) -> list[Fault]:
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


def _faults_of_placement(placed: Placement, *, devices: Devices, accelerator: str, machine: Machine) -> list[Fault]:
    faults = []
    count = placed.ranks_per_node
    listed = devices != "auto" and not isinstance(devices, int)
    if placed.accelerator == "cuda" and not machine.gpus:
        faults.append(
            Fault(
                key="launch.accelerator",
                got="cuda",
                expected="a machine with a CUDA device that torch can see",
                cure="Write launch.accelerator=cpu or auto",
            )
        )
    elif placed.accelerator == "cuda" and max(placed.device_indices) >= machine.gpus:
        faults.append(
            Fault(
                key="launch.devices",
                got=_words(devices),
                expected=f"at most the {machine.gpus} GPU{'s' if machine.gpus > 1 else ''} of this machine"
                + (f", 0 to {machine.gpus - 1}" if listed else ""),
                cure="Write launch.accelerator=cpu to try it with that many gloo ranks",
            )
        )
    if placed.accelerator == "mps" and not machine.mps:
        faults.append(Fault(key="launch.accelerator", got="mps", expected="a Mac whose GPU torch can use"))
    if placed.accelerator == "mps" and placed.world_size > 1:
        faults.append(
            Fault(
                key="launch.accelerator",
                got=f"mps with {placed.world_size} ranks",
                expected="one rank: Apple's GPU has no collectives",
                cure="Write launch.accelerator=cpu",
            )
        )
    if listed and placed.accelerator != "cuda":
        faults.append(
            Fault(
                key="launch.devices",
                got=f"{_words(devices)} on {placed.accelerator}",
                expected="a number: a list names GPUs",
                cure=f"Write launch.devices={count}",
            )
        )
    if placed.strategy == "single" and placed.world_size > 1:
        faults.append(
            Fault(
                key="strategy.name",
                got=f"single with {placed.world_size} ranks",
                expected="one device",
                cure="Write strategy=ddp",
            )
        )
    return faults


def _mismatch(rank: Rank, *, devices: Devices, nodes: int, wanted: int, wanted_nodes: int) -> Fault:
    return Fault(
        key="launch.devices" if wanted != rank.local_world_size else "launch.nodes",
        got=f"devices={_words(devices)}, nodes={nodes}",
        expected=f"what was started: {rank.local_world_size} ranks on each of {rank.nodes} nodes",
        cure=f"Start {wanted} on each of {wanted_nodes}, or write launch.devices=auto and launch.nodes=1",
    )


def _words(devices: Devices) -> str:
    return str(devices) if isinstance(devices, int | str) else f"[{','.join(str(index) for index in devices)}]"
