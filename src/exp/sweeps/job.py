"""The jobs of a sweep, checked and run in processes of their own.

Whatever code of the user's own does to such a process, it is one fault of the check, or one row of the table.
"""

from __future__ import annotations

import re
import signal
import traceback
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

from omegaconf import DictConfig

from exp.config.freeze import COMPOSITION, read_frozen, read_overrides
from exp.errors import ConfigError, ExpError, Fault, Interrupted, RunError, one_line
from exp.launch.launcher import last_checkpoint
from exp.launch.zygote import Died, Zygote
from exp.run_report import Ongoing, Report, find_report, write_bad_end
from exp.secrets import redacted
from exp.signals import heed

# What a run imports: here once, and not in every job. Where one is left out, a job takes longer, and that is all.
MODULES = (
    "exp.run",
    "exp.check.compatibility",
    "exp.check.continuation",
    "exp.check.first_samples",
    "exp.check.phases",
    "exp.check.rates",
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
    "exp.strategies.auto",
    "exp.sweeps.job",
    "exp.tensorboard.logger",
)
STAMP = re.compile(r"^[-\d]+ [\d:,.]+ ")
# Checks that end their process; behind so many of them the other jobs are not looked at.
MAX_DEATHS = 20


def checked(validate: Callable[[DictConfig], None], configs: Sequence[DictConfig]) -> Iterator[ExpError | None]:
    """What is wrong with each job, in a process of the check: None where nothing is."""
    heed(signal.SIG_DFL)  # from here on, who raises KeyboardInterrupt is the user's own code
    for config in configs:
        try:
            validate(config)
        except ExpError as error:
            error.__cause__ = error.__context__ = None
            yield error
        except BaseException as error:
            traceback.print_exc()
            yield _ended(f"with {redacted(one_line(error))}; its traceback is above")
        else:
            yield None


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
    """Checks jobs in a process beside this one, and runs one after another, each in a process of its own.

    fit: runs a job, exp.run.fit; validate: checks one, exp.check.plan.validate. Functions that another process finds
    by their names.
    """

    def __init__(self, fit: Callable[[DictConfig], Report], validate: Callable[[DictConfig], None]) -> None:
        self._fit, self._validate = fit, validate
        self._zygote = Zygote(MODULES)

    def start(self) -> None:
        """Start the process that jobs are forked from; before torch comes in, it takes a fork of this one."""
        self._zygote.start()

    def close(self) -> None:
        """End what is left."""
        self._zygote.close()

    def check(self, configs: Sequence[DictConfig]) -> list[ConfigError | None]:
        """The faults of each job, all looked at in one process, as long as that lives.

        Raises: an ExpError that is no fault of a config; Interrupted.
        """
        found: list[ConfigError | None] = []
        deaths = 0
        while len(found) < len(configs) and deaths < MAX_DEATHS:
            errors, died = self._zygote.collect(checked, self._validate, configs[len(found) :])
            for error in errors:
                if error is not None and not isinstance(error, ConfigError):
                    raise error
                found.append(error)
            if died is not None:
                deaths += 1
                found.append(_ended(str(died).removeprefix("ended ")))
        return [*found, *[None] * (len(configs) - len(found))]

    def __call__(self, config: DictConfig) -> Report:
        """The report of a job.

        Raises: what ended it; RunError with the last words of a process that ended without a result.
        """
        directory = Path(config[COMPOSITION].directory)
        try:
            came = self._zygote.call(ended, self._fit, config)
        except Died as error:
            dead = RunError(f"the process of the job {error}{_last_words(directory)}")
            _report_bad_end(directory, dead)
            raise dead from error
        except Interrupted as error:
            saved = last_checkpoint(directory)
            killed = Interrupted(signum=error.signum, checkpoint=None if saved is None else str(saved))
            _report_bad_end(directory, killed)
            raise killed from error
        if isinstance(came, ExpError):
            raise came
        return came


def _report_bad_end(directory: Path, error: ExpError) -> None:
    """The report that the job could not write itself; none where it had not begun."""
    if not (directory / "config.yaml").is_file():
        return
    before = find_report(directory)
    ongoing = Ongoing(
        directory,
        read_frozen(directory),
        overrides=read_overrides(directory),
        world_size=1 if before is None else before.world_size,
    )
    write_bad_end(ongoing, error, has_ranks=True)


def _last_words(directory: Path) -> str:
    log = directory / "train.log"
    lines = log.read_text(encoding="utf-8", errors="replace").strip().splitlines() if log.is_file() else []
    return f"; the last line of its log: {STAMP.sub('', lines[-1])}" if lines else ""
