"""python -m exp.plan [overrides of exp.train] [options]: layers, memory and time of a run before it starts.

    python -m exp.plan model=resnet
    python -m exp.plan model=gpt data=text strategy=fsdp device=64xH100 precision=bf16
    python -m exp.plan model=gpt data=text memory=2GiB

device=64xH100       the devices of the run; by default those of this machine
memory=80GiB         the memory of each device, instead of the listed value
search=true          search for the fastest strategy, precision and accumulation that fit, and print the command
"""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Sequence
from typing import TYPE_CHECKING

import psutil

from exp.cli.memory_size import EXPECTED, memory_bytes
from exp.errors import ConfigError, RunError, command_line_error, config_error, raise_errors, unknown_word
from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.device_peaks import Device
    from exp.plan.estimate import Estimator
    from exp.strategies.placement import Machine

PROGRAM = "python -m exp.plan"
UNNAMED = "the time of a step is unknown: name a GPU, such as device=H100"
SWITCH = {"true": True, "false": False}


# The allowed values of each option of the command. An empty tuple allows any text.
OPTIONS = {"device": (), "memory": (), "search": tuple(SWITCH)}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """Parsed options of the command.

    Args:
        device: Devices of the run, such as "64xH100". Default: None, for the devices of this machine.
        memory: Memory of each device in bytes. Default: None, for the listed memory of the device.
        searches: Whether to search for the fastest configuration that fits. Default: False.
    """

    device: str | None = None
    memory: int | None = None
    searches: bool = False


@command()
def main(argv: Sequence[str]) -> int:
    """Print layers, memory and time of the run that `python -m exp.train` would start with the same overrides.

    Returns:
        Exit status: 0; 2 if the config has errors; 1 if the network cannot be built on the meta device.
    """
    from exp.cli.command_line import answer_question, parse_arguments

    own = [text for text in argv if text.partition("=")[0] in OPTIONS and "=" in text]
    arguments = parse_arguments([text for text in argv if text not in own], program=PROGRAM)
    if arguments.help:
        print(__doc__)
        return 0
    if answer_question(arguments):
        return 0
    words = read_words(own)
    if arguments.multirun:
        raise config_error("--multirun", got="several runs", expected="one run", fix="Leave -m out")
    with survive_output_errors():
        _print(arguments, words)
    return 0


def read_words(texts: Sequence[str]) -> Words:
    """Parse the options of the command, given as `key=value`.

    Raises:
        ConfigError: Options have invalid values. All errors are reported together.
    """
    given = dict(text.split("=", 1) for text in texts)
    errors = [
        unknown_word(key, given[key], known)
        for key, known in OPTIONS.items()
        if known and key in given and given[key] not in known
    ]
    memory = memory_bytes(given["memory"]) if "memory" in given else None
    if "memory" in given and memory is None:
        errors.append(command_line_error("memory", given["memory"], f"{EXPECTED}, such as 80GiB"))
    raise_errors(errors)
    return Words(
        device=given.get("device"),
        memory=memory,
        searches=SWITCH[given.get("search", "false")],
    )


class Planner:
    """Checks the config of a command line and estimates its run. The run may have additional overrides.

    Args:
        arguments: Parsed arguments of the command.
        words: Parsed options of the command.
    """

    def __init__(self, arguments: argparse.Namespace, words: Words) -> None:
        self.arguments, self.words = arguments, words
        self._device: Device | None = None

    def plan(self, more: Sequence[str] = ()) -> Plan:
        """Compose and check the config, and return the plan of its run.

        Args:
            more: Additional overrides. They replace the command's overrides of the same keys. Default: none.

        Raises:
            ConfigError: The config has errors.
        """
        from exp.check.stages import compose, refuse_early

        arguments = self.arguments
        changed = {text.partition("=")[0] for text in more}
        typed = [text for text in arguments.overrides if text.lstrip("+").partition("=")[0] not in changed]
        config = compose([*typed, *more], config_dir=arguments.config_dir, config_name=arguments.config_name)
        refuse_early(config)
        from exp.check.examination import examine
        from exp.check.resolution import resolve

        return examine(resolve(config), machine=machine_of(self.words.device, config.launch)).plan()

    def estimator(self, plan: Plan) -> Estimator:
        """Return the estimator of a plan. The device is that of the command, by default a device of this machine."""
        from exp.plan.estimate import Estimator

        return Estimator(plan, device=self.device(plan))

    def other(self, more: Sequence[str]) -> Estimator | None:
        """Return the estimator of the run with additional overrides.

        Return None if these overrides cause errors in the config.
        """
        try:
            return self.estimator(self.plan(more))
        except ConfigError:
            return None  # the overrides are only a suggestion, so that their errors are not reported

    def device(self, plan: Plan) -> Device | None:
        """Return the device of the run. Return None if the device is not in the table of devices."""
        from exp.plan.device_peaks import own_gpu, read_devices

        if self._device is None and self.words.device is not None:
            self._device = read_devices(self.words.device)[0]
        elif self._device is None and plan.placement.accelerator == "cuda":
            self._device = own_gpu()
        return self._device

    def limit(self, plan: Plan) -> int | None:
        """Return the memory of each device in bytes. Return None if the memory is unknown.

        The command's option `memory` overrides the listed memory of the device. In a run on the CPU, the ranks share
        the free memory of the machine.
        """
        if self.words.memory is not None:
            return self.words.memory
        if (device := self.device(plan)) is not None:
            return device.memory
        is_cpu = plan.placement.accelerator == "cpu"
        return psutil.virtual_memory().available // plan.placement.world_size if is_cpu else None


def machine_of(device: str | None, launch: object) -> Machine:
    """Return the machine for which a run is planned.

    Args:
        device: Devices of the machine, such as "64xH100". None: this machine, with at least as many GPUs as the config
            uses.
        launch: The node `launch` of the config.
    """
    from exp.plan.device_peaks import read_devices
    from exp.strategies.placement import Machine, this_machine

    asked = getattr(launch, "devices", "auto")
    needed = asked if isinstance(asked, int) else 1 if isinstance(asked, str) else max(asked, default=0) + 1
    if device is not None:
        return Machine(gpus=read_devices(device)[1] or needed, nccl=True)
    here = this_machine()
    gpus = max(here.gpus, needed) if getattr(launch, "accelerator", "auto") == "cuda" else here.gpus
    # The number of cores is set to unknown, because a plan starts no ranks and may have more ranks than cores.
    return dataclasses.replace(here, gpus=gpus, nccl=here.nccl or gpus > here.gpus, cores=None)


def _print(arguments: argparse.Namespace, words: Words) -> None:
    with pause_garbage_collection():
        from exp.cli.check import summary
        from exp.cli.plan_printout import text

    planner = Planner(arguments, words)
    plan = planner.plan()
    if plan.network is None:
        raise RunError(f"the network cannot be built on the meta device: {'; '.join(plan.shapes.notes)}")
    estimator, limit = planner.estimator(plan), planner.limit(plan)
    if words.searches:
        _search(plan, planner, limit=limit)
        return
    estimate = estimator.estimate()
    if estimator.device is None:
        estimate = dataclasses.replace(estimate, notes=[*estimate.notes, UNNAMED])
    largest = None if limit is None else estimator.largest_batch(limit)
    print(text(estimate, limit=limit, largest=largest, summary=summary(plan)))


def _search(plan: Plan, planner: Planner, *, limit: int | None) -> None:
    """Print the configurations that fit into memory, the fastest first, and the command of the fastest configuration.

    Args:
        plan: Plan of the command's config.
        planner: Planner that estimates the run with other overrides.
        limit: Memory of each device in bytes; None if the memory is unknown.

    Raises:
        ConfigError: The time of a step is unknown.
        RunError: No configuration fits.
    """
    from exp.cli.command_line import with_values
    from exp.cli.plan_printout import ways
    from exp.plan.fastest import search

    if planner.device(plan) is None or plan.own is not None:
        expected = "a known device, such as device=H100, and no LightningModule"
        raise config_error("search", got="true, but the time of a step is unknown", expected=expected)
    found = search(plan, limit=limit, other=planner.other)
    if not found.fitting:
        raise RunError(
            f"no configuration fits: {found.too_large} need too much memory, and {found.refused} have errors"
        )
    best = dict(text.split("=", 1) for text in found.fitting[0].overrides)
    print(ways(found))
    print(with_values(planner.arguments.overrides, best))
