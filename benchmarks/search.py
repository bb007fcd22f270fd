"""How many optimizer steps a search needs for what a random search finds: sampler and pruner against drawing blindly.

    python benchmarks/search.py [mlp lenet] [--seeds 10] [--trials 50] [--epochs 10] [--pruner median] [--all]
        [--beside 2] [--sweep-jobs 1]

For each seed, one sweep with sweep.sampler=random sweep.pruner=none of --trials trials of --epochs epochs, whose best
loss/val is the target and whose optimizer steps are the budget; and one with sweep.sampler=tpe and a pruner, of the
same seed, space and epochs, that goes on trial after trial until it has reached the target or used up the budget. The
share is the steps of all its trials up to and with the one that reached the target, over the budget. A search that has
used up the budget without it is "never", and counts as more than 1.

A random search has reached its own best before its end, too: half-way in the middle of many. That share stands beside
the other. --all: also random with the pruner and tpe without one.

Trials of a search see what those before them found. So that all do, each sweep trains one job at a time, forked from
one warm process (sweep.jobs=1, sweep.stack=false), and two seeds run side by side. With --sweep-jobs 2 several trials
are open at a time. Jobs run on one thread. Trials count in the order of their numbers.
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
# Trials of a search whose jobs may be pruned at their first validation: more than any budget pays for.
MANY = 20
POLL_SECONDS = 0.2
# Behind which a sweep that goes on is told again to end.
AGAIN_SECONDS = 10.0
# Of a sweep's ends: it was done, or some of its jobs failed, as with a learning rate that gives nan.
USUAL = (0, 1)
NEVER = math.inf


@dataclass(frozen=True, kw_only=True)
class Trial:
    """A trial that has ended. steps: of its optimizer. value: its best, nan where it has none."""

    steps: int
    value: float
    is_pruned: bool


@dataclass(frozen=True, kw_only=True)
class Found:
    """What one search came to. share: of the budget's steps at which it reached the target, NEVER where it did not.

    seconds: of one trial, start-up of the sweep in it.
    """

    share: float
    best: float
    trials: int
    pruned: int
    seconds: float


class Record:
    """The trials of a sweep that have ended, in the order of their numbers, up to the first that has not."""

    def __init__(self, place: Path) -> None:
        self._place = place
        self.trials: list[Trial] = []

    def read(self) -> list[Trial]:
        """Look for more of them."""
        while paths := list(self._place.glob(f"outputs/train/sweeps/*/*/{len(self.trials)}/report.json")):
            report: dict[str, Any] = json.loads(paths[0].read_text())
            if report["status"] not in ENDED:
                break
            best = report["best"]
            value = math.nan if best is None else float(best["value"])
            self.trials.append(Trial(steps=report["steps"], value=value, is_pruned=report["status"] == "pruned"))
        return self.trials


def steps_to(target: float, trials: Sequence[Trial]) -> int | None:
    """The optimizer steps of the trials up to the first that reached the target; None where none did."""
    for count, trial in enumerate(trials, 1):
        if trial.value <= target:
            return sum(one.steps for one in trials[:count])
    return None


def search(
    words: Sequence[str], *, folder: Path, target: float | None = None, budget: int | None = None
) -> tuple[list[Trial], float]:
    """Run a sweep to its end, or until it reached the target or used up the budget: its trials, and seconds of each."""
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
        while is_over(trials[:-1], target=target, budget=budget):  # more may have ended behind the signal
            trials.pop()
    return trials, seconds


def is_over(trials: Sequence[Trial], *, target: float, budget: int) -> bool:
    """Whether the target is reached, or the budget used up."""
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
    """By sampler and pruner what a seed came to, the blind search first."""
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
    """Beside the blind search."""
    if options.all:
        yield from (("random", options.pruner), ("tpe", "none"))
    yield "tpe", options.pruner


def shown(share: float) -> str:
    return "never" if share == NEVER else f"{share:.2f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("networks", nargs="*", metavar="network", help=f"{', '.join(SPACES)}; none named: all")
    parser.add_argument("--seeds", type=int, default=10)
    parser.add_argument("--trials", type=int, default=50, help="of the random search")
    parser.add_argument("--epochs", type=int, default=10, help="of a trial that is not pruned")
    parser.add_argument("--pruner", choices=("median", "asha", "hyperband"), default="median")
    parser.add_argument("--all", action="store_true", help="also random with the pruner, and tpe without one")
    parser.add_argument("--beside", type=int, default=2, help="seeds that run side by side")
    parser.add_argument("--sweep-jobs", type=int, default=1, help="jobs of a sweep at a time")
    options = parser.parse_args()
    if unknown := {*options.networks} - {*SPACES}:
        parser.error(f"{min(unknown)} is none of {', '.join(SPACES)}")
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
    """A figure of all seeds together."""
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
