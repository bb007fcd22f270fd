"""A job of a sweep in a process of its own: whatever it does to that process, it is one row of the table."""

from __future__ import annotations

import re
import traceback
from collections.abc import Callable
from pathlib import Path

from omegaconf import DictConfig

from exp.config.freeze import COMPOSITION, read_frozen, read_overrides
from exp.errors import ExpError, Interrupted, RunError
from exp.launch.launcher import last_checkpoint
from exp.launch.zygote import Died, Zygote
from exp.report import Ongoing, Report, find_report, write_bad_end

# What a run imports: here once, and not in every job. Where one is left out, a job takes longer, and that is all.
MODULES = (
    "exp.run",
    "exp.check.compatibility",
    "exp.check.continuation",
    "exp.check.runtime_switches",
    "exp.check.step_flops",
    "exp.data.digits",
    "exp.hooks.gradients",
    "exp.hooks.memory",
    "exp.hooks.out_of_memory",
    "exp.hooks.throughput",
    "exp.objectives.metrics",
    "exp.sweeps.job",
    "exp.tensorboard.logger",
)
STAMP = re.compile(r"^[-\d]+ [\d:,.]+ ")


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
    """Runs one job after another, each in a process of its own.

    fit: runs it, exp.run.fit; a function that another process finds by its name.
    """

    def __init__(self, fit: Callable[[DictConfig], Report]) -> None:
        self._fit = fit
        self._zygote = Zygote(MODULES)

    def start(self) -> None:
        """Make ready, before anything of a user's is imported."""
        self._zygote.start()

    def close(self) -> None:
        """End what is left."""
        self._zygote.close()

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
