"""python -m exp.find_batch [flags] [overrides]: the largest data.batch_size that fits into memory, and the fastest.

    python -m exp.find_batch model=resnet
    python -m exp.find_batch model=mlp launch.accelerator=cpu --memory 2GiB

The command trains a few steps of the run that exp.train would start. It tries several batch sizes, each in a new
process, and prints memory and samples per second. It doubles or halves the size in the config until one size fits and
another does not. It then halves the distance between the two sizes.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.cli.memory_size import EXPECTED, memory_bytes
from exp.errors import ErrorDetails, RunError, config_error, missing_value, not_supported_with, raise_errors
from exp.extras.finders.short_run import decide, flag_parser, parse, run, shorten_config, write_table
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from exp.check.plan import Plan
    from exp.run_report import Report

PROGRAM = "exp.find_batch"
TABLE = "batch.csv"
FEWEST_STEPS = 3
# The search ends when the distance between the largest size that fits and the smallest size that does not fit is small.
# It is small if it is at most this fraction of the largest size that fits.
WITHIN = 0.05


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Result of a few steps with one batch size.

    Args:
        size: Batch size in samples.
        fits: Whether the peak memory is within the limit.
        peak: Peak memory in bytes. None: the run was out of memory.
        samples_per_second: Training speed. None: the run was out of memory.
    """

    size: int
    fits: bool
    peak: int | None = None
    samples_per_second: float | None = None

    def __str__(self) -> str:
        if self.peak is None:
            return f"{self.size:>9}  out of memory"
        word = "" if self.fits else ", above the limit"
        return f"{self.size:>9}  {_format_size(self.peak):>10}  {self.samples_per_second:>12,.0f} samples/s{word}"


@command()
def main(argv: Sequence[str]) -> int:
    """Try batch sizes, and print the largest and the fastest size that fit.

    Returns:
        Exit status: 0 if a size fits, 1 if not even one sample fits or a run fails, 2 if the command has an error, or
        128 + n after signal n.
    """
    parser = flag_parser(PROGRAM, __doc__)
    parser.add_argument("--memory", help="the memory limit of a process, such as 2GiB; required without a GPU")
    parser.add_argument("--max", type=int, help="the largest size to try; default: the number of training samples")
    parser.add_argument("--steps", type=int, default=5, help="optimizer steps at each size; %(default)s")
    flags, arguments = parse(parser, argv, program=PROGRAM, above={"max": 0, "steps": FEWEST_STEPS - 1})
    limit = None if flags.memory is None else memory_bytes(flags.memory)
    if flags.memory is not None and limit is None:
        raise config_error("--memory", got=repr(flags.memory), expected=f"{EXPECTED}, such as 2GiB")
    if arguments is None:
        return 0
    from exp.cli.train import fit, validate
    from exp.sweeps.job import JobProcesses

    with survive_output_errors():
        jobs = JobProcesses(fit, validate)
        jobs.start()
        config, decided = decide(arguments)
        raise_errors(plan_errors(decided, limit=limit))
        trials = Trials(config, decided, jobs, steps=flags.steps, limit=limit, overrides=arguments.overrides)
        print(f"data.batch_size over all ranks, {flags.steps} steps each, results below {trials.directory_shown}")
        most = flags.max if flags.max is not None else samples_of(decided)
        start = min(int(decided.settings.data["batch_size"]), most or sys.maxsize)
        found = search(trials, start=start, most=most)
        print(trials.result(found, overrides=arguments.overrides))
    return 0


def plan_errors(decided: Plan, *, limit: int | None) -> Iterator[ErrorDetails]:
    """Yield an error if the batches of an epoch have several sizes, and an error if no memory limit is known.

    Args:
        decided: Plan of the run.
        limit: Value of --memory in bytes. None: the flag is missing.
    """
    data = decided.settings.data
    if "batch_sampler" in data and data["batch_sampler"] is not None:
        expected = "null, because such batches differ in size"
        yield not_supported_with("data.batch_sampler", data["batch_sampler"]["_target_"], PROGRAM, expected)
    accelerator = decided.placement.accelerator
    if limit is None and accelerator != "cuda":
        expected = "a memory limit, because the system may end programs when its memory is full"
        yield missing_value("--memory", expected, "Write --memory 2GiB", got=f"no limit, on {accelerator}")


def samples_of(decided: Plan) -> int | None:
    """Return the number of training samples; None if the data set has no length."""
    part = decided.data.part("train")
    try:
        return len(part)
    except TypeError:
        return None


class Trials:
    """Callable that runs a few steps at a given batch size, and collects the results in one directory.

    Args:
        config: Config of the run.
        decided: Plan of the run.
        jobs: Function that runs a config in a new process.
        steps: Number of optimizer steps at each size.
        limit: Memory limit of a process in bytes. None: the memory of the GPU.
        overrides: Overrides of the command line.
    """

    def __init__(
        self,
        config: DictConfig,
        decided: Plan,
        jobs: Callable[[DictConfig], Report],
        *,
        steps: int,
        limit: int | None,
        overrides: Sequence[str],
    ) -> None:
        from exp.config.freeze import make_exclusively
        from exp.config.frozen import COMPOSITION

        test = {"_target_": "exp.extras.finders.size_trial.SizeTrial", "steps": steps}
        changes: dict[str, object] = {
            "callbacks": {"size_trial": test},
            "logger": {},
            "trainer.max_steps": steps,
            "trainer.enable_progress_bar": False,
            # If one rank is out of memory, the other ranks have nothing to save and need little time to end.
            "launch.grace_seconds": 2,
        }
        self._config = shorten_config(config, decided, changes, room="find_batch", overrides=overrides)
        self.directory = make_exclusively(Path(self._config[COMPOSITION].directory))
        self.directory_shown = os.path.relpath(self.directory)
        self._jobs = jobs
        self.limit, self.done = limit, list[Trial]()

    def __call__(self, size: int) -> Trial:
        """Run a few steps at a batch size, print the result, and return it.

        Raises:
            RunError: The run fails for another reason than out of memory.
        """
        from exp.config.frozen import COMPOSITION
        from exp.extras.finders.size_trial import SUMMARY
        from exp.launch.job_process import Died

        directory = self.directory / str(size)
        config = self._config.copy()
        config.data.batch_size = size
        config[COMPOSITION].directory = str(directory)
        found: Mapping[str, Any] = {"fits": False}
        try:
            run(config, fit=self._jobs)
            found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
        except RunError as error:
            # The run was out of memory if the callback SizeTrial reports this, or if the system killed the process.
            path = directory / SUMMARY
            is_known = path.is_file() and not json.loads(path.read_text(encoding="utf-8"))["fits"]
            if not is_known and not (isinstance(error.__cause__, Died) and "SIGKILL" in str(error.__cause__)):
                raise
        trial = Trial(size=size, fits=False)
        if found["fits"]:
            self.limit = found["room"] if self.limit is None else self.limit
            assert self.limit is not None
            peak = int(found["peak"])
            trial = Trial(size=size, fits=peak <= self.limit, peak=peak, samples_per_second=found["samples_per_second"])
        self.done.append(trial)
        print(trial, flush=True)
        rows = sorted(self.done, key=lambda one: one.size)
        write_table(self.directory / TABLE, list(vars(trial)), [list(vars(one).values()) for one in rows])
        return trial

    def result(self, found: Trial, *, overrides: Sequence[str]) -> str:
        """Return the printed summary of all trials. The last line is a command that uses the largest size.

        Args:
            found: The trial of the largest size that fits.
            overrides: Overrides of the command line.
        """
        from exp.cli.command_line import with_values

        assert self.limit is not None
        assert found.peak is not None
        fastest = max((one for one in self.done if one.fits), key=lambda one: one.samples_per_second or 0.0)
        larger = [one.size for one in self.done if not one.fits]
        beyond = f"; {min(larger)} does not fit" if larger else "; no larger size was tried"
        return "\n".join([
            f"largest   {found.size}: {_format_size(found.peak)} of {_format_size(self.limit)}{beyond}",
            f"fastest   {fastest.size}: {fastest.samples_per_second:,.0f} samples per second",
            f"table     {self.directory_shown}/{TABLE}",
            "The learning rate is unchanged: python -m exp.find_lr finds one for the new size.",
            with_values(overrides, {"data.batch_size": str(found.size)}),
        ])  # fmt: skip


def _format_size(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def search(trials: Trials, *, start: int, most: int | None) -> Trial:
    """Return the trial of the largest batch size that fits.

    The search ends when the smallest size that does not fit exceeds the largest size that fits by at most the fraction
    WITHIN.

    Args:
        trials: Callable that runs the trial of a size.
        start: First size to try.
        most: Largest size to try. None: no limit.

    Raises:
        RunError: Not even one sample fits.
    """
    largest: Trial | None = None
    size: int | None = start
    too_large: int | None = None
    while size is not None:
        trial = trials(size)
        if trial.fits:
            largest = trial
        else:
            too_large = size
        if largest is None and size == 1:
            raise RunError(f"not even one sample fits into the memory: {str(trial).strip()}. Increase --memory")
        size = following(0 if largest is None else largest.size, too_large, most=most)
    assert largest is not None
    return largest


def following(largest: int, too_large: int | None, *, most: int | None) -> int | None:
    """Return the size to try next; None if the search is over.

    Args:
        largest: Largest size that is known to fit. 0: no size is known to fit.
        too_large: Smallest size that is known not to fit. None: no such size is known.
        most: Largest size to try. None: no limit.
    """
    step = step_of(largest)
    if too_large is not None and too_large - largest <= step:
        return None
    size = 2 * largest if too_large is None else (largest + too_large) // 2
    if most is not None and most < size:
        size = most if most - largest >= step else largest
    return size if size > largest else None


def step_of(size: int) -> int:
    """Return the distance in samples at which the search ends.

    Args:
        size: Largest size that is known to fit.
    """
    return max(1, int(WITHIN * size))
