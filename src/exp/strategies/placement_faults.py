"""What is wrong with a placement that a config asks for, before anything is started."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from exp.errors import Fault
from exp.strategies.rank import Rank

if TYPE_CHECKING:
    from exp.strategies.placement import Devices, Machine, Placement

ACCELERATORS = ("auto", "cpu", "cuda", "mps")
# Ranks that share a core are for trying a strategy out. Each is a process with half a gigabyte of its own.
RANKS_OF_A_CORE = 4
# So many are let pass on a machine of any size.
CPU_RANKS_AT_LEAST = 16


def faults_of_division(strategy: str, *, count: int, each: int, nodes: int, model_ranks: int) -> list[Fault]:
    """Devices that do not come out even."""
    if count % each:
        expected = f"a multiple of {each}, for {strategy} takes {each} devices a rank"
        return [Fault(key="launch.devices", got=str(count), expected=expected)]
    ranks = count // each * nodes
    if ranks % model_ranks:
        expected = f"a multiple of {model_ranks}, for {strategy} has {model_ranks} ranks work on one batch together"
        return [Fault(key="launch.devices", got=f"{ranks} ranks", expected=expected)]
    return []


def faults_of_words(*, devices: Any, nodes: Any, accelerator: Any) -> list[Fault]:
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


def faults_of_placement(placed: Placement, *, devices: Devices, machine: Machine) -> list[Fault]:
    faults = [*_faults_of_backend(placed, machine), *_faults_of_cores(placed, machine)]
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


def _faults_of_cores(placed: Placement, machine: Machine) -> list[Fault]:
    if placed.accelerator != "cpu" or machine.cores is None:
        return []
    most = max(CPU_RANKS_AT_LEAST, RANKS_OF_A_CORE * machine.cores)
    if placed.ranks_per_node <= most:
        return []
    cores = f"{machine.cores} core{'s' if machine.cores > 1 else ''}"
    expected = f"at most {most} on this machine, which has {cores}: each rank is a process, and they share the cores"
    cure = "Write launch.devices=2 to try a strategy out"
    return [Fault(key="launch.devices", got=f"{placed.ranks_per_node} ranks on the CPU", expected=expected, cure=cure)]


def _faults_of_backend(placed: Placement, machine: Machine) -> list[Fault]:
    if placed.backend != "nccl":
        return []
    if placed.accelerator != "cuda":
        return [
            Fault(
                key="launch.backend",
                got=f"nccl on {placed.accelerator}",
                expected="gloo: NCCL talks between GPUs alone",
                cure="Write launch.backend=auto",
            )
        ]
    if not machine.nccl:
        return [Fault(key="launch.backend", got="nccl", expected="gloo: this torch was built without NCCL")]
    return []


def too_many_ranks(strategy: str, rank: Rank) -> Fault:
    return Fault(
        key="strategy.name",
        got=f"{strategy}, one process with all its devices, as rank {rank.global_rank} of {rank.world_size}",
        expected="one rank",
        cure="Start it without torchrun and srun, or write strategy=ddp",
    )


def mismatch(rank: Rank, *, devices: Devices, nodes: int, wanted: int, wanted_nodes: int) -> Fault:
    return Fault(
        key="launch.devices" if wanted != rank.local_world_size else "launch.nodes",
        got=f"devices={_words(devices)}, nodes={nodes}",
        expected=f"what was started: {rank.local_world_size} ranks on each of {rank.nodes} nodes",
        cure=f"Start {wanted} on each of {wanted_nodes}, or write launch.devices=auto and launch.nodes=1",
    )


def _words(devices: Devices) -> str:
    return str(devices) if isinstance(devices, int | str) else f"[{','.join(str(index) for index in devices)}]"
