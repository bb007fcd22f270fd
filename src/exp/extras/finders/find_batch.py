"""python -m exp.find_batch [flags] [overrides]: the largest data.batch_size that fits into memory, and the fastest.

    python -m exp.find_batch model=resnet
    python -m exp.find_batch model=mlp launch.accelerator=cpu --memory 2GiB

It trains a few steps of the run that exp.train would make at one size after another, each in a process of its own, and
prints what each takes of memory and how many samples a second it trains. The size grows from the config's own; behind
two sizes, what a sample takes says where the limit is, and the sizes around that are tried.
"""

from __future__ import annotations

import argparse
import csv
import io
import json
import re
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.cli.memory_size import EXPECTED, memory_bytes
from exp.errors import ConfigError, Fault, RunError
from exp.output import exit_status, outliving_output

if TYPE_CHECKING:
    from omegaconf import DictConfig

    from exp.check.plan import Plan
    from exp.run_report import Report

PROGRAM = "exp.find_batch"
TABLE, SUMMARY = "batch.csv", "batch.json"
FEWEST_STEPS = 3
# The largest that fits and the smallest that does not are so near, in shares of the size.
WITHIN = 0.05
# By how much a size may grow at once where little was measured below it, and how often a line through two points is
# trusted before halves are.
MOST_GROWTH, GUESSES = 8, 4


@dataclass(frozen=True, kw_only=True)
class Trial:
    """One size: whether it fits, and where its steps were done its largest use of memory in bytes and its rate."""

    size: int
    fits: bool
    peak: int | None = None
    samples_per_second: float | None = None


def main(argv: Sequence[str] | None = None) -> int:
    """Try sizes and print the largest that fits.

    Returns: 0 with a size, 1 where not one sample fits or a run fails, 2 for a fault in the command, 128 + n where
        signal n ended it.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    from exp.extras.finders.short_run import decide, parse

    flags, arguments = parse(_parser(), argv, program=PROGRAM)
    limit = _limit(flags)
    if arguments is None:
        return 0
    from exp.cli.train import fit, validate
    from exp.sweeps.job import JobProcesses

    with outliving_output():
        jobs = JobProcesses(fit, validate)
        jobs.start()
        config, decided = decide(arguments)
        if faults := list(unfit(decided, limit=limit)):
            raise ConfigError(faults)
        trials = Trials(config, decided, jobs, steps=flags.steps, limit=limit, overrides=arguments.overrides)
        print(f"data.batch_size, the whole batch, {flags.steps} steps each, below {trials.directory_shown}")
        most = flags.max if flags.max is not None else samples_of(decided)
        start = min(int(decided.plain["data"]["batch_size"]), most or sys.maxsize)
        found = search(trials, start=start, most=most)
        word = "every sample of the training part" if flags.max is None else "the largest of --max"
        print(trials.told(found, end=word if found.size == most else "there is no memory here to try more"))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--memory SIZE] [--max N] [--steps N] [flags and overrides of exp.train]",
    )
    said = "the limit of a process, such as 2GiB; on a GPU its own memory without one, on a CPU there must be one"
    parser.add_argument("--memory", metavar="SIZE", help=said)
    parser.add_argument("--max", type=int, metavar="N", help="the largest size to try; the training part's samples")
    parser.add_argument("--steps", type=int, default=5, metavar="N", help="of the optimizer, at each size; 5")
    return parser


def _limit(flags: argparse.Namespace) -> int | None:
    """The bytes of --memory. Raises: ConfigError with the faults of all flags."""
    faults = []
    memory = None if flags.memory is None else memory_bytes(flags.memory)
    if flags.memory is not None and memory is None:
        faults.append(Fault(key="--memory", got=repr(flags.memory), expected=f"{EXPECTED}: 2GiB"))
    if flags.max is not None and flags.max < 1:
        faults.append(Fault(key="--max", got=str(flags.max), expected="1 or more samples"))
    if flags.steps < FEWEST_STEPS:
        expected = f"{FEWEST_STEPS} or more: the first two are not timed"
        faults.append(Fault(key="--steps", got=str(flags.steps), expected=expected))
    if faults:
        raise ConfigError(faults)
    return memory


def unfit(decided: Plan, *, limit: int | None) -> Iterator[Fault]:
    """What has no one size, or no limit."""
    data = decided.plain["data"]
    if "batch_sampler" in data and data["batch_sampler"] is not None:
        expected = "null: it makes batches of several sizes, and data.batch_size is not one"
        yield Fault(key="data.batch_sampler", got=str(data["batch_sampler"]["_target_"]), expected=expected)
    if limit is None and decided.placement.accelerator != "cuda":
        yield Fault(
            key="--memory",
            got=f"no limit, on {decided.placement.accelerator}",
            expected="one: what does not fit there is swapped, or has the system end programs",
            cure="Write --memory 2GiB",
        )


def samples_of(decided: Plan) -> int | None:
    """How many samples the training part has; None of a stream, which does not know."""
    part = decided.data.part("train")
    try:
        return len(part)
    except TypeError:
        return None


class Trials:
    """Runs of a few steps at given sizes, in a directory for all of them.

    jobs: runs a config in a process of its own. limit: bytes of a process; None is what a GPU has.
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
        from exp.config.freeze import COMPOSITION, make_exclusively
        from exp.extras.finders.short_run import shortened

        test = {"_target_": "exp.extras.finders.size_trial.SizeTrial", "steps": steps}
        changes: dict[str, Any] = {
            "callbacks": {"size_trial": test},
            "logger": {},
            "trainer.max_steps": steps,
            "trainer.enable_progress_bar": False,
            # Ranks beside one without memory have nothing to save.
            "launch.grace_seconds": 2,
        }
        self._config = shortened(config, decided, changes, room="find_batch", overrides=overrides)
        self.directory = make_exclusively(Path(self._config[COMPOSITION].directory))
        self._jobs, self._plain, self._overrides = jobs, decided.plain, overrides
        self.limit, self.done = limit, list[Trial]()
        self._on_host = decided.placement.accelerator != "cuda"
        self._ranks = decided.placement.world_size

    @property
    def directory_shown(self) -> str:
        inside = self.directory.is_relative_to(Path.cwd())
        return str(self.directory.relative_to(Path.cwd()) if inside else self.directory)

    def __call__(self, size: int) -> Trial:
        """Try a size, and print what came of it. Raises: what ends a run, if it is not the memory."""
        from exp.config.freeze import COMPOSITION
        from exp.extras.finders.short_run import run
        from exp.extras.finders.size_trial import SUMMARY as FOUND
        from exp.launch.job_process import Died

        directory = self.directory / str(size)
        config = self._config.copy()
        config.data.batch_size = size
        config[COMPOSITION].directory = str(directory)
        found: Mapping[str, Any] = {"fits": False}
        try:
            run(config, fit=self._jobs)
            found = json.loads((directory / FOUND).read_text(encoding="utf-8"))
        except RunError as error:
            # By the callback, or by the system, which ends a process so that takes the last of its memory.
            path = directory / FOUND
            is_told = path.is_file() and not json.loads(path.read_text(encoding="utf-8"))["fits"]
            if not is_told and not (isinstance(error.__cause__, Died) and "SIGKILL" in str(error.__cause__)):
                raise
        trial = Trial(size=size, fits=found["fits"])
        if trial.fits:
            if self.limit is None:
                self.limit = found["room"]
            assert self.limit is not None
            peak = int(found["peak"])
            trial = Trial(size=size, fits=peak <= self.limit, peak=peak, samples_per_second=found["samples_per_second"])
        self.done.append(trial)
        print(_line(trial), flush=True)
        self._write()
        return trial

    def most_here(self, trial: Trial) -> int | None:
        """The largest size that this machine's host has room for, whatever of the peak grows with the size."""
        if not self._on_host or trial.peak is None:
            return None
        room = _available()
        return None if room is None else int(trial.size * room / self._ranks / trial.peak)

    def told(self, found: Trial, *, end: str) -> str:
        """What came of all trials, and the command to type. end: why no larger size was tried, where none failed."""
        from exp.cli.command_line import with_values

        assert self.limit is not None
        assert found.peak is not None
        fastest = max((one for one in self.done if one.fits), key=lambda one: one.samples_per_second or 0.0)
        larger = [one.size for one in self.done if not one.fits]
        beyond = f"{min(larger)} does not fit" if larger else end
        rate = "" if self._plain["optimizer"].get("lr") is None else f", {self._plain['optimizer']['lr']:g}"
        return "\n".join([
            f"largest   {found.size}: {_shown(found.peak)} of {_shown(self.limit)}; {beyond}",
            f"fastest   {fastest.size}: {fastest.samples_per_second:,.0f} samples a second",
            f"table     {self.directory_shown}/{TABLE}",
            f"The learning rate stays what it is{rate}: for another size python -m exp.find_lr may find another.",
            with_values(self._overrides, {"data.batch_size": str(found.size)}),
        ])  # fmt: skip

    def _write(self) -> None:
        from exp.files import write_whole

        file = io.StringIO()
        rows = [asdict(trial) for trial in sorted(self.done, key=lambda one: one.size)]
        writer = csv.DictWriter(file, fieldnames=list(rows[0]), lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
        write_whole(self.directory / TABLE, file.getvalue())
        summary = {"limit": self.limit, "trials": [asdict(trial) for trial in self.done]}
        write_whole(self.directory / SUMMARY, json.dumps(summary, indent=2) + "\n")


def _line(trial: Trial) -> str:
    if trial.peak is None:
        return f"{trial.size:>9}  out of memory"
    assert trial.samples_per_second is not None
    word = "" if trial.fits else ", above the limit"
    return f"{trial.size:>9}  {_shown(trial.peak):>10}  {trial.samples_per_second:>12,.0f} samples/s{word}"


def _shown(size: int) -> str:
    return f"{size / 2**30:.2f} GiB" if size >= 2**30 else f"{size / 2**20:.0f} MiB"


def _available() -> int | None:
    """Bytes that the host could give out without swapping; None where the system does not say."""
    if not sys.platform.startswith("linux"):
        return None
    found = re.search(r"^MemAvailable: +(\d+) kB", Path("/proc/meminfo").read_text(encoding="ascii"), re.MULTILINE)
    return None if found is None else 1024 * int(found[1])


def search(trials: Trials, *, start: int, most: int | None) -> Trial:
    """Try sizes until the largest that fits and the smallest that does not are near each other.

    most: the largest size; None is any. Returns: the largest that fits.
    Raises: RunError where not one sample does.
    """
    size: int | None = start
    guesses = 0
    while size is not None:
        trials(size)
        fitting = sorted((one for one in trials.done if one.fits), key=lambda one: one.size)
        too_large = min((one.size for one in trials.done if not one.fits), default=None)
        if not fitting:
            if size == 1:
                raise RunError(f"not one sample fits: {_line(trials.done[-1]).strip()}. Give more with --memory")
            # What grows with the size is at most all of the peak.
            share = min(0.5, (trials.limit or 0) / trials.done[-1].peak) if trials.done[-1].peak else 0.5
            size = max(1, int(size * share))
            continue
        guess = guessed(fitting, trials.limit) if guesses < GUESSES else None
        guesses += too_large is not None and guess is not None
        size = following(fitting[-1].size, too_large, guess=guess, most=most)
        here = trials.most_here(fitting[-1])
        if size is not None and here is not None and size > here:
            size = here if here >= fitting[-1].size + step_of(fitting[-1].size) else None
    return fitting[-1]


def step_of(size: int) -> int:
    """The distance below which two sizes are near each other."""
    return max(1, int(WITHIN * size))


def following(largest: int, too_large: int | None, *, guess: int | None, most: int | None) -> int | None:
    """The size to try next; None where the search is over.

    largest: that fits. too_large: the smallest that does not, if any. guess: where the limit may be.
    """
    step = step_of(largest)
    if too_large is None:
        wanted = 2 * largest if guess is None else min(max(guess, largest + step), MOST_GROWTH * largest)
        wanted = wanted if most is None else min(wanted, most)
        return wanted if wanted > largest else None
    if too_large - largest <= step:
        return None
    middle = min((largest + too_large) // 2, 2 * largest)
    # A guess of what fits already asks whether the next size does not.
    wanted = middle if guess is None else min(max(guess, largest + step), MOST_GROWTH * largest)
    return wanted if wanted < too_large else middle


def guessed(fitting: Sequence[Trial], limit: int | None) -> int | None:
    """The size at which a line through the peaks of two sizes meets the limit; None where there is no such line.

    fitting: by size. The two are the largest, and the largest of those that are at most two thirds of it.
    """
    last = fitting[-1]
    others = [one for one in fitting if 3 * one.size <= 2 * last.size]
    if limit is None or not others or last.peak is None or others[-1].peak is None:
        return None
    rise = (last.peak - others[-1].peak) / (last.size - others[-1].size)
    return None if rise <= 0 else last.size + int((limit - last.peak) / rise)
