"""The jobs of a sweep, checked and run in processes of their own.

Whatever code of the user's own does to such a process, it is one fault of the check, or one row of the table.
"""

from __future__ import annotations

import os
import re
import signal
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from omegaconf import DictConfig

from exp.config.freeze import COMPOSITION, OUTPUT, read_frozen, read_overrides
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError, innermost_frame, one_line
from exp.launch.job_process import Died, call, collect, start_server
from exp.launch.launcher import last_checkpoint
from exp.launch.supervision import collected_signals
from exp.output import passing_line
from exp.redaction import redacted
from exp.run_report import Ongoing, Report, find_report, write_bad_end
from exp.signals import heed
from exp.strategies.placement import Machine
from exp.sweeps.devices import VISIBLE, Devices, Need, asks, need_of, visible

# What a run imports: here once, and not in every job. Where one is left out, a job takes longer, and that is all.
MODULES = (
    "exp.run",
    "exp.check.compatibility",
    "exp.check.continuation",
    "exp.check.first_samples",
    "exp.check.phases",
    "exp.check.optimizer_steps",
    "exp.check.runtime_switches",
    "exp.check.shapes",
    "exp.check.step_flops",
    "exp.check.training_notes",
    "exp.data.digits",
    "exp.hooks.gradients",
    "exp.hooks.memory",
    "exp.hooks.out_of_memory",
    "exp.hooks.throughput",
    "exp.objectives.metrics",
    "exp.report_pictures",
    "exp.strategies.auto",
    "exp.sweeps.job",
    "exp.tensorboard.logger",
    # By the first operator on the meta device, 0.2 s; by whoever draws a number, counts classes, or saves a picture.
    "torch.fx.experimental.symbolic_shapes",
    "numpy.random",
    "numpy.ma",
    "PIL.PngImagePlugin",
)
# Of the output of a job, whose last words are told.
TAIL_BYTES = 20_000
# As faulthandler writes it, the innermost one first.
FRAME = re.compile(r'^  File "(.+)", line (\d+) in (.+)$', re.MULTILINE)
STAMP = re.compile(r"^[-\d]+ [\d:,.]+ ")
# Checks that end their process; behind so many of them the other jobs are not looked at.
MAX_DEATHS = 20


Result = TypeVar("Result")
# Checks a config; takes, and gives, what it keeps of a config for that of the next job.
Validate = Callable[[DictConfig, Any], Any]


@dataclass(frozen=True, kw_only=True)
class Checked:
    """What the check found of a job.

    error: what is wrong with it. asked: by `asks` of it, its need and the machine that meets it; None where something
        is wrong.
    """

    error: ExpError | None = None
    asked: tuple[str, tuple[Need, Machine]] | None = None


def checked(validate: Validate, configs: Sequence[DictConfig]) -> Iterator[Checked]:
    """What is wrong with each job, in a process of the check."""
    heed(signal.SIG_DFL)  # from here on, who raises KeyboardInterrupt is the user's own code
    view, before = GpuView(), None
    for config in configs:
        try:
            asked = view.of(config)
            before = validate(config, before)
            if isinstance(asked, Exception):
                raise asked
        except ExpError as error:
            error.__cause__ = error.__context__ = None
            yield Checked(error=error)
        except BaseException as error:
            traceback.print_exc()
            yield Checked(error=_ended(f"with {redacted(one_line(error))}; its traceback is above"))
        else:
            yield Checked(asked=(asks(config), asked))


class GpuView:
    """Lets this process see as many GPUs as a job will: strategy=auto is another strategy on all of them."""

    def __init__(self) -> None:
        self._everything = {name: value for name, value in os.environ.items() if name == VISIBLE}
        self._known: dict[str, tuple[Need, Machine]] = {}

    def of(self, config: DictConfig) -> tuple[Need, Machine] | Exception:
        """The need of a job; or why nobody knows it, of which the check may have more to say.

        Raises: ConfigError where sweep.devices_per_job does not go with the machine.
        """
        os.environ.pop(VISIBLE, None)
        os.environ.update(self._everything)
        try:
            wanted = asks(config)
            if wanted not in self._known:
                self._known[wanted] = need_of(config)
        except Exception as error:
            if isinstance(error, ConfigError) and any(fault.key.startswith("sweep.") for fault in error.faults):
                raise
            return error
        need, machine = self._known[wanted]
        os.environ.update(visible(Devices.of(machine, self._everything).take(need)))
        return need, machine


def _ended(how: str) -> ConfigError:
    """The fault of a job whose check did not come to its end."""
    fault = Fault(
        key="config",
        got=f"its check ended {how}",
        expected="a check that comes to its end",
        cure="Constructors, imports and forwards of your own are called in it, and one of them ends the process: "
        "leave parts of your own out, one after another, to see which",
    )
    return ConfigError([fault])


def ended(fit: Callable[[DictConfig], Report], config: DictConfig) -> Report | ExpError:
    """What came of one job, in its process. What ended it is given back, for the sweep to tell."""
    try:
        return fit(config)
    except ExpError as error:
        error.__cause__ = error.__context__ = None
        return error
    except Exception as error:
        traceback.print_exc()
        return RunError(f"{type(error).__name__}: {str(error).strip() or 'without a word'}")


class JobProcesses:
    """Checks jobs in one process, and runs jobs in one process each.

    fit: runs a job, exp.run.fit_job; validate: checks one, exp.check.plan.check_job. Functions that another process
    finds by their names.

    asked: by `asks` of the jobs that were checked, their need, and the machine that meets it.
    """

    def __init__(self, fit: Callable[[DictConfig], Report], validate: Validate) -> None:
        self.fit, self._validate = fit, validate
        self.asked: dict[str, tuple[Need, Machine]] = {}
        self._has_checked = False

    def start(self) -> None:
        """Start the server that jobs are forked from. It imports what they need while this process continues."""
        start_server("exp.sweeps.job_server")

    def call(self, function: Callable[..., Result], *arguments: object) -> Result:
        """Return the result of a function in a process of the server; see `exp.launch.job_process.call`."""
        self.start()
        return call(function, *arguments)

    def check(self, configs: Sequence[DictConfig]) -> list[ConfigError | None]:
        """The faults of each job, all looked at in one process, as long as that lives.

        Raises: an ExpError that is no fault of a config; Interrupted.
        """
        found: list[ConfigError | None] = []
        deaths = 0
        # The first time the other process imports torch before it looks at any.
        is_there = self._has_checked or "torch" in sys.modules
        waiting = nullcontext() if is_there else passing_line("loading torch")
        self._has_checked = True
        with collected_signals() as received, waiting:
            while len(found) < len(configs) and deaths < MAX_DEATHS:
                self.start()
                results, died = collect(checked, self._validate, configs[len(found) :])
                for result in results:
                    if result.error is not None and not isinstance(result.error, ConfigError):
                        raise result.error
                    if result.asked is not None:
                        self.asked.update([result.asked])
                    found.append(result.error)
                if len(found) < len(configs):
                    deaths += 1
                    found.append(_ended(str(died).removeprefix("ended ")))
            if received:  # as the last of them was done
                raise Interrupted(signum=received[0], checkpoint=None)
        return [*found, *[None] * (len(configs) - len(found))]

    def __call__(self, config: DictConfig) -> Report:
        """The report of a job.

        Raises: what ended it; RunError with the last words of a process that ended without a result.
        """
        directory = Path(config[COMPOSITION].directory)
        try:
            came = self.call(ended, self.fit, config)
        except Died as error:
            dead = dead_job(directory, error)
            report_bad_end(directory, dead)
            raise dead from error
        except Interrupted as error:
            killed = interrupted(directory, error.signum)
            report_bad_end(directory, killed)
            raise killed from error
        if isinstance(came, ExpError):
            raise came
        return came


def dead_job(directory: Path, died: Died) -> RunError:
    """The error of a job whose process ended without a result, with its last words."""
    return RunError(f"the process of the job {died}{_last_words(directory)}")


def interrupted(directory: Path, signum: int) -> Interrupted:
    """The error of a job whose process a second signal has killed."""
    saved = last_checkpoint(directory)
    return Interrupted(signum=signum, checkpoint=None if saved is None else str(saved))


def report_bad_end(directory: Path, error: ExpError) -> None:
    """Write the report that the job could not write itself; none where it had not begun.

    Where it cannot be written, as on a full disk, that is printed: the row has what there is to say.
    """
    if not (directory / "config.yaml").is_file():
        return
    try:
        before = find_report(directory)
        ongoing = Ongoing(
            directory,
            read_frozen(directory),
            overrides=read_overrides(directory),
            world_size=1 if before is None else before.world_size,
        )
        write_bad_end(ongoing, error, has_ranks=True)
    except RunError as second:
        print(second, file=sys.stderr)


def _last_words(directory: Path) -> str:
    """Where it crashed; else what its log and its output end with, for a library that ends a process says why there."""
    output = _tail(directory / OUTPUT)
    if "Fatal Python error: " in output:
        what, _, stack = output.rpartition("Fatal Python error: ")[2].partition("\n")
        frames = [traceback.FrameSummary(file, int(line), name) for file, line, name in FRAME.findall(stack)]
        if not frames:
            return f"; {what}"
        frame = innermost_frame(frames[::-1])
        return f"; {what} in {frame.filename}, line {frame.lineno}, in {frame.name}"
    told = {"its log": last_line(directory / "train.log"), OUTPUT: last_line(directory / OUTPUT)}
    return "".join(f"; the last line of {whose}: {STAMP.sub('', words)}" for whose, words in told.items() if words)


def last_line(path: Path) -> str:
    """The last line of a file that says something; empty where there is none."""
    return next((line.strip() for line in reversed(_tail(path).splitlines()) if line.strip()), "")


def _tail(path: Path) -> str:
    try:
        with path.open("rb") as file:
            file.seek(max(0, file.seek(0, os.SEEK_END) - TAIL_BYTES))
            return file.read().decode("utf-8", "replace")
    except FileNotFoundError:
        return ""
