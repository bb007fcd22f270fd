"""The resources of the jobs of a sweep: number of simultaneous jobs, and GPUs and threads of each job.

No function in this module initializes CUDA, because a process that has initialized CUDA must not fork.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from exp.config.settings import settings_of
from exp.errors import config_error
from exp.strategies.placement import Demand, Machine, Placement, placement, this_machine

# Type of sweep.jobs: the number of jobs that run at the same time, or auto.
Jobs = int | Literal["auto"]
# Type of sweep.devices_per_job: a number of GPUs, or a fraction below 1 of one GPU.
PerJob = float | Literal["auto"]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Need:
    """The CPU processes and GPUs that one job needs.

    Attributes:
        ranks: Number of processes of the job.
        gpus: Number of GPUs, or a fraction below 1 if jobs share a GPU. 0 if the job runs on a CPU or on Apple's GPU.
        is_alone: Whether no other job may run at the same time. True if launch.devices lists GPUs, or if the job runs
            on Apple's GPU.
    """

    ranks: int = 1
    gpus: float = 0
    is_alone: bool = False

    @property
    def visible(self) -> int:
        """Number of GPUs that the job can see. A fraction of a GPU counts as one GPU."""
        return math.ceil(self.gpus)


def need_settings(config: DictConfig) -> str:
    """Return a text with the settings that determine the processes and GPUs of a job.

    Jobs with equal texts need the same processes and GPUs.
    """
    nodes = [OmegaConf.to_container(config[key], resolve=True) for key in ("strategy", "launch", "security")]
    return json.dumps([*nodes, config.sweep.devices_per_job])


def need_of(config: DictConfig) -> tuple[Need, Machine]:
    """Return the CPU processes and GPUs that a job needs, and a description of this machine.

    Raises:
        ConfigError: The machine has too few devices.
    """
    from exp.construct import build_strategy
    from exp.strategies.strategy import Strategy, demand_of_lightning

    node, launch, security, devices_per_job = json.loads(need_settings(config))
    strategy = build_strategy(settings_of({"strategy": node, "security": security}))
    demand = strategy.demand if isinstance(strategy, Strategy) else demand_of_lightning(strategy)
    machine = this_machine()
    return need(node["name"], launch, demand=demand, devices_per_job=devices_per_job, machine=machine), machine


def need(
    strategy: str, launch: Mapping[str, Any], *, demand: Demand, devices_per_job: PerJob, machine: Machine
) -> Need:
    """Return the processes and GPUs that a job needs on a machine.

    With `devices_per_job: auto` a job gets the number of GPUs in launch.devices. If launch.devices is also auto, a job
    with strategy=auto gets one GPU, because jobs that each use all GPUs could only run one after another.

    Args:
        strategy: Name of the strategy, used in messages.
        launch: Node `launch` of the config.
        demand: Requirements of the strategy.
        devices_per_job: Value of sweep.devices_per_job.
        machine: Description of the machine.

    Raises:
        ConfigError: The machine has too few devices.
    """
    devices, accelerator = launch["devices"], launch["accelerator"]
    is_named = not isinstance(devices, int | str)

    def place(gpus: int) -> Placement:
        return placement(
            strategy,
            devices=devices,
            nodes=launch["nodes"],
            accelerator=accelerator,
            backend=launch["backend"],
            demand=demand,
            machine=replace(machine, gpus=gpus),
        )

    if devices_per_job != "auto":
        wanted = Need(gpus=devices_per_job)
        least = devices if isinstance(devices, int) else 0
        most = machine.gpus if accelerator in ("auto", "cuda") and not is_named else 0
        if not least <= wanted.visible <= most:
            launched = f"launch.devices={devices} and launch.accelerator={accelerator}"
            raise config_error(
                "sweep.devices_per_job",
                got=f"{devices_per_job} on a machine with {machine.gpus} GPUs, with {launched}",
                expected="auto, or a number from launch.devices to the number of GPUs of the machine",
                fix="Write sweep.devices_per_job=auto",
            )
        return replace(wanted, ranks=place(wanted.visible).ranks_per_node)
    whole = place(machine.gpus)
    if whole.accelerator != "cuda":
        return Need(ranks=whole.ranks_per_node, is_alone=whole.accelerator == "mps")
    if is_named:
        return Need(ranks=whole.ranks_per_node, gpus=len(devices), is_alone=True)
    everything = 1 if demand.adapts else whole.world_size * whole.layers
    gpus = devices if isinstance(devices, int) else everything
    return Need(ranks=place(gpus).ranks_per_node, gpus=gpus)


def slots(needs: Collection[Need], *, jobs: Jobs, machine: Machine) -> int:
    """Return the number of jobs that can run at the same time.

    Args:
        needs: Processes and GPUs that each job needs. The job that needs most determines the number.
        jobs: Value of sweep.jobs. With `auto`, each job gets the GPUs or the fraction of a GPU that it needs. On a CPU,
            each rank gets one core.
        machine: Description of the machine.
    """
    return min((_slots(one, jobs=jobs, machine=machine) for one in needs), default=1)


def _slots(need: Need, *, jobs: Jobs, machine: Machine) -> int:
    if jobs != "auto":
        return jobs
    if need.is_alone:
        return 1
    if need.gpus >= 1:
        return max(1, machine.gpus // need.visible)
    if need.gpus:
        return machine.gpus * int(1 / need.gpus + 1e-9)  # the tolerance lets three jobs of 1/3 fit on a GPU
    return max(1, (machine.cores or 1) // need.ranks)


def threads(need: Need, *, slots: int, machine: Machine) -> int:
    """Return the number of CPU threads that each rank uses for operators, if the config sets no number.

    The cores of the machine are divided equally among all ranks that run at the same time.

    Args:
        need: Processes and GPUs that the job needs.
        slots: Number of jobs that run at the same time.
        machine: Description of the machine.
    """
    return max(1, (machine.cores or 1) // slots // need.ranks)


class Devices:
    """The GPUs of this machine, and the fraction of each GPU that running jobs use.

    Args:
        names: Names of the GPUs, as in CUDA_VISIBLE_DEVICES.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._loads = dict.fromkeys(names, 0.0)

    @classmethod
    def of(cls, machine: Machine, environment: Mapping[str, str]) -> Devices:
        """Return the GPUs that this process may use, with their names in CUDA_VISIBLE_DEVICES."""
        listed = environment[VISIBLE].split(",") if VISIBLE in environment else map(str, range(machine.gpus))
        return cls([name.strip() for name in listed][: machine.gpus])

    def take(self, need: Need) -> tuple[str, ...]:
        """Assign the least loaded GPUs to a job, and return their names.

        Returns:
            Names of the GPUs. Empty if the job needs no GPU, or if launch.devices lists the GPUs.
        """
        if not need.gpus or need.is_alone:
            return ()
        # sorted() is stable, so among equally loaded GPUs the first ones are chosen. GPUs with adjacent numbers
        # communicate fastest.
        freest = sorted(self._loads, key=lambda name: round(self._loads[name], 6))[: need.visible]
        for name in freest:
            self._loads[name] += min(1.0, need.gpus)
        return tuple(name for name in self._loads if name in freest)

    def release(self, names: Sequence[str], need: Need) -> None:
        """Subtract the load of a job that has ended from its GPUs.

        Args:
            names: Names of the GPUs, as returned by `take`.
            need: Processes and GPUs that the job needs.
        """
        for name in names:
            self._loads[name] -= min(1.0, need.gpus)


def visible_gpus(names: Sequence[str]) -> dict[str, str]:
    """Return the environment variables that limit a job to these GPUs. Return no variables if `names` is empty."""
    return {VISIBLE: ",".join(names)} if names else {}
