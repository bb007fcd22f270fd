"""python -m exp.plan [overrides of exp.train] [words of its own]: what the run takes, before anything is allocated.

    python -m exp.plan model=resnet
    python -m exp.plan model=gpt data=text strategy=fsdp device=64xH100 precision=bf16
    python -m exp.plan model=gpt data=text memory=2GiB

device=64xH100       the devices that the run will have; without it those of this machine
memory=80GiB         of each device, in the place of what is listed for it
format=json          the same figures for a tool
search=true          looks for the fastest strategy, precision and accumulation that fit, and prints the command
savings=false        leaves out what would help: it checks and estimates the run a few more times
"""

from __future__ import annotations

import argparse
import dataclasses
import json
from collections.abc import Sequence
from typing import TYPE_CHECKING

from exp.cli.memory_size import EXPECTED, memory_bytes
from exp.errors import ConfigError, ErrorDetails, RunError, config_error, raise_errors
from exp.output import announce_torch_import, command, survive_output_errors
from exp.spelling import did_you_mean, find_nearest

if TYPE_CHECKING:
    from exp.check.plan import Plan
    from exp.plan.device_peaks import Device
    from exp.plan.estimate import Estimator
    from exp.strategies.placement import Machine

PROGRAM = "python -m exp.plan"
FORMATS = ("text", "json")
UNNAMED = "the time of a step is not known of this GPU: name one, device=H100"
SWITCH = {"true": True, "false": False}


@dataclasses.dataclass(frozen=True, kw_only=True)
class Words:
    """The command's own words. memory: bytes."""

    device: str | None = None
    memory: int | None = None
    is_json: bool = False
    has_savings: bool = True
    searches: bool = False


OWN = ("device", "memory", "format", "savings", "search")


@command()
def main(argv: Sequence[str]) -> int:
    """Print what the run of the same command line of `python -m exp.train` takes.

    Returns: 0; 2 after the list of errors; 1 where the network cannot be built without numbers.
    """
    from exp.cli.command_line import answer_question, parse_arguments

    own = [text for text in argv if text.partition("=")[0] in OWN and "=" in text]
    arguments = parse_arguments([text for text in argv if text not in own], program=PROGRAM)
    if arguments.help:
        print(__doc__)
        return 0
    if answer_question(arguments):
        return 0
    _refuse_slips(arguments)
    words = read_words(own)
    if arguments.multirun:
        raise config_error("--multirun", got="several runs", expected="one", fix="Leave -m out")
    with survive_output_errors():
        _print(arguments, words, command=" ".join([PROGRAM, *argv]))
    return 0


def _refuse_slips(arguments: argparse.Namespace) -> None:
    """Raises: ConfigError for keys that are the command's own words but for a slip, and no keys of a config."""
    from exp.config.groups import open_search_path

    pairs = [(key.lstrip("+~"), text) for text in arguments.overrides for key, sign, _ in [text.partition("=")] if sign]
    slips = [(key, text) for key, text in pairs if "." not in key and key not in OWN and find_nearest(key, OWN)]
    if not slips:
        return
    known = open_search_path(config_dir=arguments.config_dir, config_name=arguments.config_name).words()
    raise_errors(
        ErrorDetails(
            key=key, got=text, expected=f"one of {', '.join(OWN)}, or a key of the config", fix=did_you_mean(key, OWN)
        )
        for key, text in slips
        if key not in known and find_nearest(key, [*OWN, *known])[0] in OWN
    )


def read_words(texts: Sequence[str]) -> Words:
    """Raises: ConfigError with the errors of all of them."""
    given = dict(text.split("=", 1) for text in texts)
    errors = []
    memory = memory_bytes(given["memory"]) if "memory" in given else None
    if "memory" in given and memory is None:
        errors.append(ErrorDetails(key="memory", got=given["memory"], expected=f"{EXPECTED}: 80GiB"))
    for key, known in (("format", FORMATS), ("savings", tuple(SWITCH)), ("search", tuple(SWITCH))):
        if key in given and given[key] not in known:
            fix = did_you_mean(given[key], known)
            errors.append(ErrorDetails(key=key, got=given[key], expected=" or ".join(known), fix=fix))
    raise_errors(errors)
    return Words(
        device=given.get("device"),
        memory=memory,
        is_json=given.get("format") == "json",
        has_savings=SWITCH[given.get("savings", "true")],
        searches=SWITCH[given.get("search", "false")],
    )


class Planner:
    """Plans of one command line, and of the same with more overrides."""

    def __init__(self, arguments: argparse.Namespace, words: Words) -> None:
        self.arguments, self.words = arguments, words
        self._device: Device | None = None

    def plan(self, more: Sequence[str] = ()) -> Plan:
        """The decided run. Raises: ConfigError with every error."""
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
        """With the device that was named, or that this machine has."""
        from exp.plan.estimate import Estimator

        return Estimator(plan, device=self.device(plan))

    def other(self, more: Sequence[str]) -> Estimator | None:
        """Of the run with more overrides; None where they are refused."""
        try:
            return self.estimator(self.plan(more))
        except ConfigError:
            return None  # a suggestion that the run cannot take is none

    def device(self, plan: Plan) -> Device | None:
        """None for a GPU that is not in the table."""
        from exp.plan.device_peaks import own_cpu, own_gpu, read_devices

        if self._device is None and self.words.device is not None:
            self._device = read_devices(self.words.device)[0]
        elif self._device is None and plan.placement.accelerator == "cuda":
            self._device = own_gpu()
        elif self._device is None and plan.placement.accelerator == "cpu":
            word, ranks = plan.settings.precision.word, plan.placement.world_size
            self._device = own_cpu(word=word, ranks=ranks)
        return self._device

    def limit(self, plan: Plan) -> int | None:
        """Bytes of each device: what was said, or what is listed for it."""
        if self.words.memory is not None:
            return self.words.memory
        device = self.device(plan)
        return None if device is None else device.memory


def machine_of(device: str | None, launch: object) -> Machine:
    """What the run will have: the devices that are named, or this machine with as many ranks as one asks for."""
    from exp.plan.device_peaks import read_devices
    from exp.strategies.placement import Machine, this_machine

    asked = getattr(launch, "devices", "auto")
    needed = asked if isinstance(asked, int) else 1 if isinstance(asked, str) else max(asked, default=0) + 1
    if device is not None:
        return Machine(gpus=read_devices(device)[1] or needed, nccl=True)
    here = this_machine()
    gpus = max(here.gpus, needed) if getattr(launch, "accelerator", "auto") == "cuda" else here.gpus
    # Nothing is started: ranks that no core could run are planned all the same.
    return dataclasses.replace(here, gpus=gpus, nccl=here.nccl or gpus > here.gpus, cores=None)


def _print(arguments: argparse.Namespace, words: Words, *, command: str) -> None:
    with announce_torch_import():
        from exp.cli.check import summary
        from exp.cli.plan_printout import plain, text
        from exp.plan.savings import savings

    planner = Planner(arguments, words)
    plan = planner.plan()
    if plan.network is None:
        told = "; ".join(plan.shapes.notes)
        raise RunError(f"the network cannot be built without numbers, and nothing can be said of it: {told}")
    estimator, limit = planner.estimator(plan), planner.limit(plan)
    if words.searches:
        _search(plan, planner, limit=limit, is_json=words.is_json)
        return
    estimate = estimator.estimate()
    if estimator.device is None and plan.placement.accelerator == "cuda":
        estimate = dataclasses.replace(estimate, notes=[*estimate.notes, UNNAMED])
    largest = None if limit is None else estimator.largest_batch(limit)
    found = savings(estimate, plan, planner.other) if words.has_savings and plan.own is None else []
    if words.is_json:
        values = plain(estimate, limit=limit, largest=largest, savings=found, command=command)
        print(json.dumps(values, indent=2))
        return
    print(text(estimate, limit=limit, largest=largest, savings=found, summary=summary(plan)))


def _search(plan: Plan, planner: Planner, *, limit: int | None, is_json: bool) -> None:
    """Print the ways to run it, the fastest first, and its command. Raises: RunError where nothing fits."""
    from exp.cli.command_line import with_values
    from exp.cli.plan_printout import ways
    from exp.plan.fastest import search

    if planner.device(plan) is None or plan.own is not None:
        fix = "device=H100, and a network of exp's, whose steps can be timed"
        raise config_error("search", got="true, and a step whose time is not known", expected=fix)
    found = search(plan, limit=limit, other=planner.other)
    if not found.fitting:
        raise RunError(f"nothing fits: {found.too_large} ways are too large, {found.refused} are refused")
    best = dict(text.split("=", 1) for text in found.fitting[0].overrides)
    line = with_values(planner.arguments.overrides, best)
    if is_json:
        print(json.dumps({**dataclasses.asdict(found), "command": line, "limit": limit}, indent=2))
        return
    print(ways(found))
    print(line)
