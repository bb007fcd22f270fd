"""The machine shared out among the jobs of a sweep: how many fit side by side, and which GPUs and threads each has.

Pure, but for `need_of`, which asks torch for the machine, without starting CUDA: no process that starts others may.
"""

from __future__ import annotations

import json
import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

from omegaconf import DictConfig, OmegaConf

from exp.config.settings import settings_of
from exp.errors import ConfigError, config_error
from exp.strategies.placement import Demand, Machine, Placement, placement, this_machine

# sweep.jobs; sweep.devices_per_job: a number of GPUs, or a share of one below 1.
Jobs = int | Literal["auto"]
PerJob = float | Literal["auto"]
VISIBLE = "CUDA_VISIBLE_DEVICES"


@dataclass(frozen=True, kw_only=True)
class Need:
    """What a job asks of the machine.

    ranks: its processes.
    gpus: how many of them, or a share of one below 1; 0 on any other device.
    is_alone: whether it is left alone with all of them: it names its GPUs itself, launch.devices=[0,2], or it has
        Apple's, of which there is one.
    """

    ranks: int = 1
    gpus: float = 0
    is_alone: bool = False

    @property
    def visible(self) -> int:
        """The number of GPUs that it works with, whole or in part."""
        return math.ceil(self.gpus)


def asks(config: DictConfig) -> str:
    """What of a config decides on the need of its job, as text: jobs that ask for the same need the same."""
    nodes = [OmegaConf.to_container(config[key], resolve=True) for key in ("strategy", "launch", "security")]
    return json.dumps([*nodes, config.sweep.devices_per_job])


def need_of(config: DictConfig) -> tuple[Need, Machine]:
    """The need of a job, and the machine that is to meet it.

    Raises: ConfigError where the two do not go together.
    """
    from exp.construct import build_strategy
    from exp.strategies.strategy import Strategy, demand_of_lightning

    node, launch, security, devices_per_job = json.loads(asks(config))
    strategy = build_strategy(settings_of({"strategy": node, "security": security}))
    demand = strategy.demand if isinstance(strategy, Strategy) else demand_of_lightning(strategy)
    machine = this_machine()
    return need(node["name"], launch, demand=demand, devices_per_job=devices_per_job, machine=machine), machine


def need(
    strategy: str, launch: Mapping[str, Any], *, demand: Demand, devices_per_job: PerJob, machine: Machine
) -> Need:
    """What a job asks of the machine.

    `devices_per_job: auto` takes as many GPUs as launch.devices, and where that is auto, too, one: strategy=auto would
    have all, and the jobs would have to wait for each other.

    strategy: its name, for messages. launch: that node of the config. demand: of the strategy.
    Raises: ConfigError.
    """
    devices, accelerator = launch["devices"], launch["accelerator"]

    def placed(gpus: int) -> Placement:
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
        if not machine.gpus or accelerator not in ("auto", "cuda"):
            where = "on a machine without a GPU" if not machine.gpus else f"with launch.accelerator={accelerator}"
            raise _unfit(f"{devices_per_job}, {where}", expected="auto: it shares out GPUs")
        if not isinstance(devices, int | str):
            expected = "auto: the jobs name their GPUs themselves"
            raise _unfit(f"{devices_per_job}, with launch.devices=[{','.join(map(str, devices))}]", expected=expected)
        if wanted.visible > machine.gpus:
            raise _unfit(str(devices_per_job), expected=f"at most {machine.gpus}, the GPUs of this machine")
        if isinstance(devices, int) and devices > wanted.visible:
            expected = f"{devices} or more, or launch.devices={wanted.visible}"
            raise _unfit(f"{devices_per_job}, with launch.devices={devices}", expected=expected)
        return replace(wanted, ranks=placed(wanted.visible).ranks_per_node)
    whole = placed(machine.gpus)
    if whole.accelerator != "cuda":
        return Need(ranks=whole.ranks_per_node, is_alone=whole.accelerator == "mps")
    if not isinstance(devices, int | str):
        return Need(ranks=whole.ranks_per_node, gpus=len(devices), is_alone=True)
    everything = 1 if demand.adapts else whole.world_size * whole.layers
    gpus = devices if isinstance(devices, int) else everything
    return Need(ranks=placed(gpus).ranks_per_node, gpus=gpus)


def _unfit(got: str, *, expected: str) -> ConfigError:
    return config_error("sweep.devices_per_job", got=got, expected=expected, fix="Write sweep.devices_per_job=auto")


def slots(needs: Collection[Need], *, jobs: Jobs, machine: Machine) -> int:
    """How many jobs run side by side, whichever of these they are.

    jobs: of `auto` on the CPU each rank has a core of its own, with GPUs each job has its own, or its share of one.
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
        return machine.gpus * int(1 / need.gpus + 1e-9)  # of thirds there are three
    return max(1, (machine.cores or 1) // need.ranks)


def threads(need: Need, *, slots: int, machine: Machine) -> int:
    """The threads of each rank's operators, where the config leaves them open: its part of the cores, one at least."""
    return max(1, (machine.cores or 1) // slots // need.ranks)


class Devices:
    """The GPUs of this machine, and how much of each is taken.

    names: as CUDA_VISIBLE_DEVICES has them.
    """

    def __init__(self, names: Sequence[str]) -> None:
        self._loads = dict.fromkeys(names, 0.0)

    @classmethod
    def of(cls, machine: Machine, environment: Mapping[str, str]) -> Devices:
        """Those that this process sees."""
        listed = environment[VISIBLE].split(",") if VISIBLE in environment else map(str, range(machine.gpus))
        return cls([name.strip() for name in listed][: machine.gpus])

    def take(self, need: Need) -> tuple[str, ...]:
        """The GPUs of a job, those with the most room; none where it needs none, or names them itself."""
        if not need.gpus or need.is_alone:
            return ()
        # Of several with the same room the first ones, so that neighbours, which talk fastest, go together.
        freest = sorted(self._loads, key=lambda name: round(self._loads[name], 6))[: need.visible]
        for name in freest:
            self._loads[name] += min(1.0, need.gpus)
        return tuple(name for name in self._loads if name in freest)

    def give_back(self, names: Sequence[str], need: Need) -> None:
        """The job has ended."""
        for name in names:
            self._loads[name] -= min(1.0, need.gpus)


def visible(names: Sequence[str]) -> dict[str, str]:
    """The variables by which a job sees these GPUs alone; none where it is to see all."""
    return {VISIBLE: ",".join(names)} if names else {}
