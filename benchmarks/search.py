"""Optimizer steps that a search with sampler and pruner needs to find what a random search finds.

    python benchmarks/search.py [mlp lenet] [--seeds 10] [--trials 50] [--epochs 10] [--pruner median] [--all]
        [--beside 2] [--sweep-jobs 1]

Two sweeps run for each seed. The first has sweep.sampler=random sweep.pruner=none and --trials trials of --epochs
epochs. Its best loss/val is the target, and the number of its optimizer steps is the budget. The second has
sweep.sampler=tpe and a pruner, with the same seed, search space and epochs. It runs trials until one reaches the target
or the budget is used up. Its share is the number of steps of all trials up to and including the trial that reached the
target, divided by the budget. If the budget is used up first, the share is "never", and counts as more than 1.

A random search reaches its best before its end, too: on average after half of its steps. The table shows this share
next to the other. --all adds random with the pruner, and tpe without a pruner.

Each sweep trains one job at a time, forked from one process (sweep.jobs=1, sweep.stack=false), so that each trial uses
the results of all trials before it. --beside seeds run at the same time. With --sweep-jobs 2, two trials of a sweep run
at a time. Jobs have one thread. Trials are counted in the order of their numbers.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

RATES = ["optimizer.lr=tag(log,interval(1e-5,1e-1))", "optimizer.weight_decay=tag(log,interval(1e-6,1e-1))"]
SPACES: Mapping[str, list[str]] = {
    "mlp": [
        *("model=mlp", *RATES),
        *("model.constants.width=tag(log,int(interval(16,256)))", "model.constants.dropout=interval(0.0,0.5)"),
    ],
    "lenet": [
        *("model=lenet", *RATES),
        *("model.layers.conv1.out_channels=tag(log,int(interval(2,16)))",),
        *("model.layers.linear1.out_features=tag(log,int(interval(16,256)))",),
    ],
}
ENDED = ("completed", "pruned", "failed")
# A search with pruning may run this many times the trials of the random search, which uses up any budget.
MANY = 20
POLL_SECONDS = 0.2
# Seconds until SIGTERM is sent again to a sweep that still runs.
AGAIN_SECONDS = 10.0
# Accepted exit codes of a sweep: all jobs completed, or some failed, for example because a learning rate gave nan.
USUAL = (0, 1)
NEVER = math.inf


@dataclass(frozen=True, kw_only=True)
class Trial:
    """Trial that has ended.

    Args:
        steps: number of optimizer steps
        value: best loss/val, nan if the trial has none
        is_pruned: if the pruner stopped the trial
    """

    steps: int
    value: float
    is_pruned: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """Result of one search.

    Args:
        share: steps until the target, as a fraction of the budget; NEVER if the search did not reach the target
        best: best loss/val of all trials
        trials: number of trials
        pruned: number of pruned trials
        seconds: wall seconds per trial, with the start-up of the sweep
    """

    share: float
    best: float
    trials: int
    pruned: int
    seconds: float


class Record:
    """Trials of a sweep in the order of their numbers, up to the first trial that still runs."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.trials: list[Trial] = []

    def read(self) -> list[Trial]:
        """Read the reports of further trials that have ended, and return all trials read so far."""
        while paths := list(self._place.glob(f"outputs/train/sweeps/*/*/{len(self.trials)}/report.json")):
            report: dict[str, Any] = json.loads(paths[0].read_text())
            if report["status"] not in ENDED:
                break
            best = report["best"]
            value = math.nan if best is None else float(best["value"])
            self.trials.append(Trial(steps=report["steps"], value=value, is_pruned=report["status"] == "pruned"))
        return self.trials


def steps_to(target: float, trials: Sequence[Trial]) -> int | None:
    """Return the optimizer steps of the trials up to the first that reached the target; None if none reached it."""
    for count, trial in enumerate(trials, 1):
        if trial.value <= target:
            return sum(one.steps for one in trials[:count])
    return None


def search(
    words: Sequence[str], *, folder: Path, target: float | None = None, budget: int | None = None
) -> tuple[list[Trial], float]:
    """Run a sweep to its end, or until it reaches the target or uses up the budget.

    Args:
        words: overrides of the sweep
        folder: new folder in which the sweep runs
        target: loss/val to reach
        budget: number of optimizer steps

    Returns:
        trials, and wall seconds per trial

    Raises:
        SystemExit: if the sweep fails, or ends before it reaches the target or uses up the budget
    """
    folder.mkdir(parents=True)
    record = Record(folder)
    command = [sys.executable, "-m", "exp.train", "-m", *words]
    environment = {name: value for name, value in os.environ.items() if name != "OMP_NUM_THREADS"}
    began = time.perf_counter()
    with open(folder / "screen.txt", "w") as screen:
        process = subprocess.Popen(command, cwd=folder, env=environment, stdout=screen, stderr=screen)
        is_enough, told = False, 0.0
        while process.poll() is None:
            if budget is not None and target is not None and not is_enough:
                is_enough = is_over(record.read(), target=target, budget=budget)
            if is_enough and time.perf_counter() - told > AGAIN_SECONDS:
                process.send_signal(signal.SIGTERM)
                told = time.perf_counter()
            time.sleep(POLL_SECONDS)
    if process.returncode not in USUAL and not is_enough:
        last = (folder / "screen.txt").read_text()[-4000:]
        raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{last}")
    trials = record.read()
    seconds = (time.perf_counter() - began) / len(trials)
    if budget is not None and target is not None:
        if not is_over(trials, target=target, budget=budget):
            raise SystemExit(f"{' '.join(command)}: all trials are done, and steps of the budget are left")
        while is_over(trials[:-1], target=target, budget=budget):  # further trials may end after the signal
            trials.pop()
    return trials, seconds


def is_over(trials: Sequence[Trial], *, target: float, budget: int) -> bool:
    """Return True if a trial reached the target or the trials used up the budget."""
    return steps_to(target, trials) is not None or sum(trial.steps for trial in trials) >= budget


def found_of(trials: Sequence[Trial], seconds: float, *, target: float, budget: int) -> Found:
    steps = steps_to(target, trials)
    values = [trial.value for trial in trials if math.isfinite(trial.value)]
    return Found(
        share=NEVER if steps is None or steps > budget else steps / budget,
        best=min(values, default=math.nan),
        trials=len(trials),
        pruned=sum(trial.is_pruned for trial in trials),
        seconds=seconds,
    )


def of_seed(network: str, seed: int, options: argparse.Namespace, folder: Path) -> dict[tuple[str, str], Found]:
    """Return the results of all searches of a seed by (sampler, pruner), with the random search first."""
    base = [
        *SPACES[network],
        *(f"seed={seed}", f"trainer.max_epochs={options.epochs}", "monitor=loss/val"),
        *("runtime.threads=1", "test=false", "sweep.stack=false", f"sweep.jobs={options.sweep_jobs}"),
    ]
    blind = [*base, "sweep.sampler=random", "sweep.pruner=none", f"sweep.trials={options.trials}"]
    trials, seconds = search(blind, folder=folder / f"{network}-{seed}-random-none")
    target = min(trial.value for trial in trials if math.isfinite(trial.value))
    budget = sum(trial.steps for trial in trials)
    found = {("random", "none"): found_of(trials, seconds, target=target, budget=budget)}
    for sampler, pruner in contenders(options):
        more = [f"sweep.sampler={sampler}", f"sweep.pruner={pruner}", f"sweep.trials={MANY * options.trials}"]
        place = folder / f"{network}-{seed}-{sampler}-{pruner}"
        trials, seconds = search([*base, *more], folder=place, target=target, budget=budget)
        found[sampler, pruner] = found_of(trials, seconds, target=target, budget=budget)
    return found


def contenders(options: argparse.Namespace) -> Iterator[tuple[str, str]]:
    """Yield sampler and pruner of each search except the random one."""
    if options.all:
        yield from (("random", options.pruner), ("tpe", "none"))
    yield "tpe", options.pruner


def shown(share: float) -> str:
    return "never" if share == NEVER else f"{share:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(SPACES)}; default: all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=50, help="trials of the random search")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of a trial that is not pruned")
    parser.add_argument("--pruner", choices=("median", "asha", "hyperband"), default="median")
    parser.add_argument("--all", action="store_true", help="add random with the pruner, and tpe without a pruner")
    parser.add_argument("--beside", type=int, default=2, help="seeds that run at the same time")
    parser.add_argument("--sweep-jobs", type=int, default=1, help="jobs that a sweep runs at the same time")
    options = parser.parse_args()
    if unknown := {*options.networks} - {*SPACES}:
        parser.error(f"unknown network {min(unknown)}; expected: {', '.join(SPACES)}")
    for network in options.networks or SPACES:
        began = time.perf_counter()
        with tempfile.TemporaryDirectory(prefix="search-") as name, ThreadPoolExecutor(options.beside) as pool:
            runs = [pool.submit(of_seed, network, seed, options, Path(name).resolve()) for seed in range(options.seeds)]
            founds = [run.result() for run in runs]
        print(
            f"\n{network} on digits, {options.seeds} seeds, {options.trials} random trials of {options.epochs} epochs:"
        )
        print("share of the random search's steps until its best loss/val was reached, and trials until then")
        kinds = list(founds[0])
        print(f"{'seed':>6}{'target':>10}" + "".join(f"{' and '.join(kind):>22}{'trials':>8}" for kind in kinds))
        for seed, found in enumerate(founds):
            cells = "".join(f"{shown(found[kind].share):>22}{found[kind].trials:>8}" for kind in kinds)
            print(f"{seed:>6}{found['random', 'none'].best:>10.5f}{cells}")
        for what in ("median", "quartiles", "never", "of trials pruned", "best loss/val", "s a trial"):
            cells = "".join(f"{cell_of(what, [found[kind] for found in founds]):>22}{'':8}" for kind in kinds)
            print(f"{what:16}{cells}".rstrip())
        print(f"{time.perf_counter() - began:.0f} s together", flush=True)


def cell_of(what: str, found: Sequence[Found]) -> str:
    """Return a cell of the summary over all seeds as text."""
    shares = [one.share for one in found]
    if what == "median":
        return shown(statistics.median_high(shares) if NEVER in shares else statistics.median(shares))
    if what == "quartiles":
        ordered = sorted(shares)
        return f"{shown(ordered[len(ordered) // 4])} to {shown(ordered[-1 - len(ordered) // 4])}"
    if what == "never":
        return str(shares.count(NEVER))
    if what == "of trials pruned":
        return f"{sum(one.pruned for one in found) / sum(one.trials for one in found):.2f}"
    if what == "best loss/val":
        return f"{statistics.median(one.best for one in found):.4f}"
    return f"{statistics.median(one.seconds for one in found):.2f}"


if __name__ == "__main__":
    main()
