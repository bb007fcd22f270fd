"""Time of sweeps as whole commands with imports: exp, Hydra with Lightning, and a loop by hand.

    python benchmarks/sweep.py [digits lenet auto members local timeline] [--jobs 32,128,512] [--epochs 10]
        [--repetitions 3] [--extrapolate] [--network mlp] [--only auto,plain] [--threads 1]

    digits    a grid of learning rates and seeds of an MLP on digits. Each program trains the same network for the same
              number of epochs. It validates and saves the last and the best state after each epoch, writes event
              files, and tests the best state at the end
    lenet     the same with LeNet and 3 epochs: is sweep.stack=auto as fast as the fastest other mode?
    auto      the same comparison of the modes for an MLP, LeNet, a ResNet and a GPT
    members   time that each further member adds to a stack
    local     16 jobs of about 5 s, two at a time compared with one at a time, and the time per job outside training
    timeline  times at which a stacked sweep reaches its stages

Each command runs in a new folder without OMP_NUM_THREADS, as users run it. The programs of a repetition run one after
the other, in alternating order. A ratio is the median of the ratios of the repetitions. Wall clock is measured from the
start of the process to its end. Processor seconds are user and system time of the process and its child processes.

Column "training" of exp: optimizer steps times step_ms of report.json, which includes validations, but not start-up,
directories and tests. Jobs of one stack count once, and of two stacks at the same time the longer one counts. The times
of jobs with one process each are added. For (b) to (d): sum over the jobs of the time from the first line of the job's
function to the last, with the test. Column "mean loss": a mean over batches for (c), as its metrics compute it, and a
mean over samples for the others.

The programs (b) to (d) read digits from a file of tensors, so that they do not import scikit-learn. They run with
--threads threads. 1 is the fastest for these networks, and 0 is torch's default. (b) and (c) are
benchmarks/sweep_programs/plain.py and template.py, (d) is bare.py. With --extrapolate, sweeps of more than --measured
jobs are not run for (b) to (d): their time is extrapolated from --measured jobs, because each job takes equally long.
"""

from __future__ import annotations

import argparse
import csv
import functools
import itertools
import json
import math
import os
import re
import statistics
import subprocess
import sys
import tempfile
import time
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import Any

PROGRAMS = Path(__file__).resolve().parent / "sweep_programs"
NETWORKS: Mapping[str, list[str]] = {
    "mlp": ["model=mlp"],
    # The MLP 64-128-10 of benchmarks/loop.py.
    "small": [
        *("model.layers.hidden.out_features=128", "model.layers.activation._target_=torch.nn.ReLU"),
        *("~model.layers.hidden2", "~model.layers.activation2"),
    ],
    "lenet": ["model=lenet"],
    "gpt": [
        *("model=gpt", "data=text", "data.parts={train: 1280, val: 320, test: 320}"),
        "data.dataset.vocabulary_size=64",
    ],
}
# Networks of the section auto, with few steps: they show which mode is fastest.
KINDS: Mapping[str, list[str]] = {
    "MLP": ["model=mlp", "trainer.max_epochs=10"],
    "LeNet": ["model=lenet", "trainer.max_epochs=5"],
    "ResNet": ["model=resnet", "trainer.max_epochs=1"],
    "GPT": [
        *("data=text", "model=gpt", "data.input_shape=[64]", "trainer.max_epochs=1", "trainer.max_steps=20"),
        *("data.parts.val=0.005", "data.parts.test=0.005"),
    ],
}
MODES: Mapping[str, list[str]] = {
    "auto": [],
    "stack": ["sweep.stack=true"],
    "side": ["sweep.stack=false"],
    "one": ["sweep.stack=false", "sweep.jobs=1"],
}
# All jobs run in one process with one thread, like the loop by hand.
ONE_CORE = ["sweep.stack=true", "sweep.jobs=1", "runtime.threads=1"]
TITLES: Mapping[str, str] = {
    "auto": "exp, default: sweep.stack=auto",
    "stack": "exp: sweep.stack=true",
    "side": "exp, parallel jobs: sweep.stack=false",
    "one": "exp, one job at a time: stack=false jobs=1",
    "stack_one": "exp, one core: stack=true jobs=1 threads=1",
    "plain": "(b) Hydra and Lightning",
    "template": "(c) as lightning-hydra-template",
    "bare": "(d) a loop by hand, no files",
    "bare_save": "(d') the same, last and best saved",
}
# Stages of a stacked sweep: description, files that are written then, and which of their times counts.
STAGES: Sequence[tuple[str, str, Callable[[Sequence[float]], float]]] = (
    ("the sweep has begun: sweep.json", "sweep.json", min),
    ("all jobs are composed and checked, the first process starts: output.log", "*/output.log", min),
    ("the run directory of the first job exists: config.yaml", "*/config.yaml", min),
    ("the run directory of the last job exists", "*/config.yaml", max),
    ("training has ended: the first last.ckpt", "*/checkpoints/last.ckpt", min),
    ("all are saved: the last last.ckpt", "*/checkpoints/last.ckpt", max),
    ("all are tested: the first report.json", "*/report.json", min),
    ("all have ended: the last report.json", "*/report.json", max),
    ("the table is written", "table.csv", max),
)
TOLERANCE = 1.1
CLOCKS = ("wall", "processor")


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Seconds of a command, and the mean of the best validation losses of its jobs."""

    wall: float
    processor: float
    training: float
    loss: float
    measured: int = 0  # number of jobs from which the cost is extrapolated; 0 if all jobs were run
    place: Path | None = None


@dataclass(frozen=True, kw_only=True)
class Grid:
    rates: Sequence[float]
    seeds: Sequence[int]

    @classmethod
    def of(cls, jobs: int) -> Grid:
        """Return a grid of `jobs` jobs with learning rates from 1e-4 to 1e-2 and at least as many seeds as rates."""
        count = max(one for one in range(1, math.isqrt(jobs) + 1) if jobs % one == 0)
        rates = [1e-3] if count == 1 else [float(f"{1e-4 * 100 ** (n / (count - 1)):.6g}") for n in range(count)]
        return cls(rates=rates, seeds=range(jobs // count))

    @property
    def jobs(self) -> int:
        return len(self.rates) * len(self.seeds)

    def words(self, rate: str, seed: str) -> list[str]:
        return [f"{rate}={','.join(map(str, self.rates))}", f"{seed}={','.join(map(str, self.seeds))}"]


class Bench:
    """Runs commands, each in a new subfolder of a temporary folder."""

    def __init__(self, folder: Path, *, threads: int) -> None:
        self.threads, self._folder, self._count = threads, folder, 0

    def words(self, network: str) -> list[str]:
        """Return the overrides that select a network and its data."""
        return [*NETWORKS[network], *([f"data.dataset.files={self._text}"] if network == "gpt" else [])]

    def data(self, network: str) -> Path:
        """Return the path of a file with exp's splits of a network's data, which the programs without exp read."""
        path = self._folder / ("text.pt" if network == "gpt" else "digits.pt")
        if not path.exists():
            write_data(path, self.words(network))
        return path

    @functools.cached_property
    def _text(self) -> Path:
        """Return the path of a text of the standard library: 20 training steps, 5 steps of validation and of test."""
        from exp.data.text import Text

        path = self._folder / "text.txt"
        path.write_text("".join(map(chr, Text().codes[: 30 * 64 * 64 + 64].tolist())))
        return path

    def exp(self, words: Sequence[str], *, jobs: int | None = None) -> Cost:
        """Run exp.train: a sweep of `jobs` jobs, or a single run if it is None."""
        many = [] if jobs is None else ["-m"]
        wall, processor, place = self.timed([sys.executable, "-m", "exp.train", *many, *words])
        reports = reports_of(place)
        if len(reports) != (jobs or 1):
            raise SystemExit(f"{place}: {len(reports)} of {jobs or 1} jobs have a report with status completed")
        losses = [report["best"]["value"] for report in reports.values()]
        return Cost(
            wall=wall,
            processor=processor,
            training=trained(reports),
            loss=statistics.fmean(losses),
            place=place,
        )

    def other(self, name: str, grid: Grid, *, network: str, epochs: int) -> tuple[Cost, float]:
        """Run a sweep of a program of benchmarks/sweep_programs.

        Returns:
            cost of the sweep, and its seconds before the first job and after the last one
        """
        if name.startswith("bare"):
            words = ["--data", str(self.data(network)), "--network", network, "--epochs", str(epochs)]
            words += ["--rates", ",".join(map(str, grid.rates)), "--seeds", ",".join(map(str, grid.seeds))]
            words += ["--threads", str(self.threads)] * (self.threads > 0) + ["--save"] * (name != "bare")
            words += ["--events"] * (name == "bare_events")
            program = "bare.py"
        else:
            threads = [f"threads={self.threads}"] * (self.threads > 0)
            many = ["-m"] * (grid.jobs > 1)
            if name == "plain":
                words = [*many, f"data={self.data(network)}", f"network={network}", f"epochs={epochs}", *threads]
                words += grid.words("lr", "seed")
            else:
                words = [*many, f"data.path={self.data(network)}", f"model.network={network}", *threads]
                words += [f"trainer.max_epochs={epochs}", *grid.words("model.optimizer.lr", "seed")]
            program = f"{name}.py"
        wall, processor, place = self.timed([sys.executable, str(PROGRAMS / program), *words])
        lines = [json.loads(line) for line in (place / "results.jsonl").read_text().splitlines()]
        if len(lines) != grid.jobs:
            raise SystemExit(f"{place}: {len(lines)} of {grid.jobs} jobs have a line in results.jsonl")
        cost = Cost(
            wall=wall,
            processor=processor,
            training=sum(line["ended"] - line["began"] for line in lines),
            loss=statistics.fmean(line["loss"] for line in lines),
            place=place,
        )
        return cost, wall - (lines[-1]["ended"] - lines[0]["began"])

    def timed(self, command: Sequence[str]) -> tuple[float, float, Path]:
        """Run a command in a new folder; return wall seconds, processor seconds and the folder."""
        self._count += 1
        place = self._folder / str(self._count)
        place.mkdir()
        hidden = ("OMP_NUM_THREADS", "MKL_NUM_THREADS")
        environment = {name: value for name, value in os.environ.items() if name not in hidden}
        with open(place / "screen.txt", "w") as screen:
            began = time.perf_counter()
            process = subprocess.Popen(command, cwd=place, env=environment, stdout=screen, stderr=screen)
            _, status, usage = os.wait4(process.pid, 0)
            wall = time.perf_counter() - began
        process.returncode = os.waitstatus_to_exitcode(status)
        if process.returncode:
            words = (place / "screen.txt").read_text()[-4000:]
            raise SystemExit(f"{' '.join(command)}\nended with {process.returncode}:\n{words}")
        return wall, usage.ru_utime + usage.ru_stime, place


def write_data(path: Path, words: Sequence[str]) -> None:
    """Write inputs and targets of the splits of a config's data to a file."""
    import torch
    from torch.utils.data import default_collate

    import exp
    from exp.check.examination import checked_plan
    from exp.construct import build_data

    data = build_data(checked_plan(exp.compose(words)).settings)
    parts = {stage: data.part(stage) for stage in data.stages}
    torch.save({stage: tuple(default_collate([*part])) for stage, part in parts.items()}, path)


def reports_of(place: Path) -> dict[Path, dict[str, Any]]:
    """Return the reports of all completed jobs by run directory, in the order of the jobs."""
    found = sorted(place.glob("outputs/**/report.json"), key=lambda path: int(re.split(r"\D", path.parent.name)[0]))
    reports = {path.parent: json.loads(path.read_text()) for path in found}
    return {directory: report for directory, report in reports.items() if report["status"] == "completed"}


def trained(reports: Mapping[Path, Mapping[str, Any]]) -> float:
    """Return the seconds of training: the longest stack, or the sum over all jobs if they are not stacked."""
    seconds: dict[str, float] = defaultdict(float)
    behind: dict[str, int] = defaultdict(int)  # further members of a stack whose time is already counted
    for directory, report in reports.items():
        told = re.search(r"trained in a stack of (\d+) jobs, in process (\d+)", (directory / "train.log").read_text())
        process = told[2] if told else ""
        if behind[process]:
            behind[process] -= 1
            continue
        seconds[process] += report["steps"] * report["step_ms"] / 1000
        behind[process] = int(told[1]) - 1 if told else 0
    return max(seconds.values())


def continued(cost: Cost, beside: float, *, measured: int, jobs: int) -> Cost:
    """Return the cost of `jobs` jobs, extrapolated from that of `measured` jobs; `beside`: seconds outside all jobs."""
    wall = beside + (cost.wall - beside) * jobs / measured
    scale = wall / cost.wall
    training = cost.training * jobs / measured
    return replace(cost, wall=wall, processor=cost.processor * scale, training=training, measured=measured)


def print_turns(turns: Sequence[Mapping[str, Cost]], bases: Sequence[str]) -> None:
    """Print a line per program.

    Args:
        turns: cost of each program, for each repetition
        bases: programs with which the others are compared
    """
    bases = [base for base in bases if base in turns[0]]
    letters = "".join(f"{'times as fast as ' + TITLES[base][:3]:>23}" for base in bases)
    print(f"{'':44}{'wall, s':>9}{'processor, s':>14}{'training, s':>13}{'mean loss':>11}{letters}")
    for name in turns[0]:
        own = [turn[name] for turn in turns]
        middle = "".join(
            f"{statistics.median(getattr(cost, what) for cost in own):{width}.{digits}f}"
            for what, width, digits in (("wall", 9, 2), ("processor", 14, 2), ("training", 13, 2), ("loss", 11, 4))
        )
        cells = ""
        for base in bases:
            ratios = sorted(turn[base].wall / turn[name].wall for turn in turns)
            spread = f"({ratios[0]:.2f} to {ratios[-1]:.2f})" if len(turns) > 1 else ""
            cells += f"{statistics.median(ratios):8.2f}{spread:>15}"
        more = f"   extrapolated from {own[0].measured} jobs" if own[0].measured else ""
        print(f"{TITLES[name]:44}{middle}{cells}{more}".rstrip(), flush=True)


def grid_section(
    bench: Bench, options: argparse.Namespace, *, network: str, epochs: int, jobs: int, names: Sequence[str]
) -> None:
    """Run all programs with one grid, alternately, and print their costs."""
    names = [name for name in names if not options.only or name in options.only]
    grid, turns = Grid.of(jobs), []
    words = [*bench.words(network), f"trainer.max_epochs={epochs}", *grid.words("optimizer.lr", "seed")]
    print(
        f"\n{network} on digits, {jobs} jobs ({len(grid.rates)} learning rates x {len(grid.seeds)} seeds) of {epochs} "
        f"epochs, {options.repetitions} alternating repetition(s)",
        flush=True,
    )
    for turn in range(options.repetitions):
        costs = {}
        for name in names if turn % 2 == 0 else names[::-1]:
            if name in MODES:
                costs[name] = bench.exp([*words, *MODES[name]], jobs=jobs)
            elif name == "stack_one":
                costs[name] = bench.exp([*words, *ONE_CORE], jobs=jobs)
            elif options.extrapolate and jobs > options.measured:
                run = Grid.of(options.measured)
                cost, beside = bench.other(name, run, network=network, epochs=epochs)
                costs[name] = continued(cost, beside, measured=run.jobs, jobs=jobs)
            else:
                costs[name], _ = bench.other(name, grid, network=network, epochs=epochs)
        turns.append({name: costs[name] for name in names})
    print_turns(turns, ("plain", "template"))
    print_shares(turns)


def print_shares(turns: Sequence[Mapping[str, Cost]]) -> None:
    """Print how auto compares with the fastest other mode, and the training time of stacks with the loop by hand."""
    first = turns[0]
    others = [name for name in ("stack", "side", "one") if name in first]
    if "auto" in first and others:
        shares = {one: statistics.median(turn["auto"].wall / turn[one].wall for turn in turns) for one in others}
        best = max(others, key=lambda one: shares[one])
        print(f"auto takes {shares[best]:.3f} of the time of the fastest other mode, {best}; limit: {TOLERANCE}")
    for name, base in itertools.product(("stack", "stack_one"), ("bare", "bare_save")):
        if name in first and base in first:
            share = statistics.median(turn[base].training / turn[name].training for turn in turns)
            print(f"training time, {TITLES[name]}: {share:.2f} times as fast as {TITLES[base]}")


def digits(bench: Bench, options: argparse.Namespace) -> None:
    names = [*MODES, "stack_one", "plain", "template", "bare", "bare_save"]
    for jobs in options.jobs:
        grid_section(bench, options, network=options.network, epochs=options.epochs, jobs=jobs, names=names)


def lenet(bench: Bench, options: argparse.Namespace) -> None:
    grid_section(
        bench,
        options,
        network="lenet",
        epochs=options.lenet_epochs,
        jobs=options.lenet_jobs,
        names=[*MODES, "plain", "bare"],
    )


def auto(bench: Bench, options: argparse.Namespace) -> None:
    grid = Grid.of(options.auto_jobs)
    for kind in options.kinds:
        words = KINDS[kind]
        print(f"\n{kind}, {grid.jobs} jobs: {' '.join(words)}, {options.repetitions} repetition(s)", flush=True)
        turns = []
        for turn in range(options.repetitions):
            costs = {
                name: bench.exp([*words, *grid.words("optimizer.lr", "seed"), *MODES[name]], jobs=grid.jobs)
                for name in (list(MODES) if turn % 2 == 0 else list(MODES)[::-1])
            }
            turns.append({name: costs[name] for name in MODES})
        print_turns(turns, ())
        print_shares(turns)


def members(bench: Bench, options: argparse.Namespace) -> None:
    """Compare stacks of jobs with different seeds with a single run; each uses one process with one thread."""
    words = [*NETWORKS[options.network], f"trainer.max_epochs={options.epochs}", "runtime.threads=1"]
    print(f"\n{options.network} on digits, {options.epochs} epochs, one process on one thread: members of a stack")
    print(f"{'':14}{'whole command, s':>18}{'per member':>16}{'training, s':>15}{'per member':>16}", flush=True)
    turns: list[dict[int, Cost]] = []
    for _ in range(options.repetitions):
        costs = {0: bench.exp(words)}
        for count in options.members:
            stacked = ["sweep.stack=true", "sweep.jobs=1", f"seed=range(0,{count})"]
            costs[count] = bench.exp([*words, *stacked], jobs=count)
        turns.append(costs)
    for count in turns[0]:
        cells = ""
        for what in ("wall", "training"):
            seconds = [getattr(turn[count], what) for turn in turns]
            alone = [getattr(turn[0], what) for turn in turns]
            growth = ""
            if count > 1:
                pairs = zip(seconds, alone, strict=True)
                growth = f"{100 * statistics.median((many / one - 1) / (count - 1) for many, one in pairs):.1f} %"
            cells += f"{statistics.median(seconds):{18 if what == 'wall' else 15}.2f}{growth:>16}"
        name = {0: "a single run", 1: "a sweep of 1"}.get(count, f"{count} members")
        print(f"{name:14}{cells}", flush=True)
    print(
        "per member: time that each further member adds, as a share of the single run; a stack has at most 64 members"
    )


def local(bench: Bench, options: argparse.Namespace) -> None:
    """Compare one and two jobs at a time, which are forked and have one thread each."""
    words = [*NETWORKS["mlp"], "runtime.threads=1", "sweep.stack=false"]
    trial = 40
    tried = bench.exp([*words, f"trainer.max_epochs={trial}", "seed=0,1", "sweep.jobs=1"], jobs=2)
    assert tried.place is not None
    seconds = min(report["wall_seconds"] for report in reports_of(tried.place).values())
    epochs = max(1, round(options.local_seconds * trial / seconds))
    count = options.local_jobs
    print(f"\n{count} jobs of {epochs} epochs, about {options.local_seconds} s each, one thread a job", flush=True)
    turns = []
    for turn in range(options.repetitions):
        costs = {
            jobs: bench.exp(
                [*words, f"trainer.max_epochs={epochs}", f"seed=range(0,{count})", f"sweep.jobs={jobs}"], jobs=count
            )
            for jobs in ((1, 2) if turn % 2 == 0 else (2, 1))
        }
        turns.append(costs)
    print(f"{'':24}{'wall, s':>9}{'processor, s':>14}{'a job, s':>10}{'its run, s':>12}{'the rest, s':>14}")
    for jobs in (1, 2):
        wall, processor = (statistics.median(getattr(turn[jobs], what) for turn in turns) for what in CLOCKS)
        found = [job_seconds(turn[jobs]) for turn in turns]
        whole, own = (statistics.median(column) for column in zip(*found, strict=True))
        print(f"{f'sweep.jobs={jobs}':24}{wall:9.2f}{processor:14.2f}{whole:10.2f}{own:12.2f}{whole - own:14.2f}")
    shares = sorted(turn[1].wall / turn[2].wall for turn in turns)
    print(f"sweep.jobs=2 is {statistics.median(shares):.2f} times as fast ({shares[0]:.2f} to {shares[-1]:.2f})")
    more = statistics.median((turn[1].wall - count * job_seconds(turn[1])[1]) / count for turn in turns)
    print(f"sweep.jobs=1: {more:.2f} s per job outside its run, with the start-up and the end of the sweep")


def job_seconds(cost: Cost) -> tuple[float, float]:
    """Return the mean seconds of a job, from table.csv, and of its run, from report.json."""
    assert cost.place is not None
    (table,) = cost.place.glob("outputs/**/table.csv")
    with open(table, newline="") as file:
        whole = [float(row["seconds"]) for row in csv.DictReader(file)]
    return statistics.fmean(whole), statistics.fmean(one["wall_seconds"] for one in reports_of(cost.place).values())


def timeline(bench: Bench, options: argparse.Namespace) -> None:
    """Print the stages of each stacked sweep, by the modification times of its files."""
    for jobs in options.jobs:
        words = Grid.of(jobs).words("optimizer.lr", "seed")
        began = time.time()
        cost = bench.exp(
            [*NETWORKS[options.network], f"trainer.max_epochs={options.epochs}", *words, *MODES["stack"]], jobs=jobs
        )
        ended = began + cost.wall
        assert cost.place is not None
        print(f"\n{options.network} on digits, {jobs} stacked jobs of {options.epochs} epochs: seconds from the start")
        for what, pattern, choose in STAGES:
            found = [path.stat().st_mtime for path in cost.place.glob(f"outputs/train/sweeps/*/*/{pattern}")]
            print(f"{choose(found) - began:9.2f}  {what}")
            if choose is max and pattern == "*/config.yaml":
                print(f"{logged(cost.place) - began:9.2f}  all event files are open, training begins: train.log")
        print(f"{ended - began:9.2f}  the command has ended", flush=True)


def logged(place: Path) -> float:
    """Return the time of the first line of the last train.log, which is written right before the first step."""
    lines = (path.read_text()[:23] for path in place.glob("outputs/train/sweeps/*/*/*/train.log"))
    return max(datetime.strptime(line, "%Y-%m-%d %H:%M:%S,%f").timestamp() for line in lines)


SECTIONS: Mapping[str, Callable[[Bench, argparse.Namespace], None]] = {
    "digits": digits,
    "lenet": lenet,
    "auto": auto,
    "members": members,
    "local": local,
    "timeline": timeline,
}


def numbers(text: str) -> list[int]:
    return [int(one) for one in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", metavar="section", help=f"{', '.join(SECTIONS)}; default: all")
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--jobs", type=numbers, default=[32, 128, 512], help="jobs of digits and timeline")
    parser.add_argument("--epochs", type=int, default=10, help="epochs of digits, members and timeline")
    parser.add_argument("--network", choices=("mlp", "small"), default="mlp", help="for digits, members and timeline")
    parser.add_argument("--only", type=lambda text: text.split(","), help=f"programs to run: {', '.join(TITLES)}")
    parser.add_argument("--extrapolate", action="store_true", help="extrapolate (b) to (d) above --measured jobs")
    parser.add_argument("--measured", type=int, default=32)
    parser.add_argument("--threads", type=int, default=1, help="threads of (b) to (d); 0: torch's default")
    parser.add_argument("--lenet-jobs", type=int, default=32)
    parser.add_argument("--lenet-epochs", type=int, default=3)
    parser.add_argument("--auto-jobs", type=int, default=16)
    parser.add_argument("--kinds", nargs="+", choices=[*KINDS], default=[*KINDS], help="networks of auto")
    parser.add_argument("--members", type=numbers, default=[1, 10, 50, 100])
    parser.add_argument("--local-jobs", type=int, default=16)
    parser.add_argument("--local-seconds", type=float, default=5.0)
    options = parser.parse_args()
    unknown = [*{*options.sections} - {*SECTIONS}, *{*(options.only or ())} - {*TITLES}]
    if unknown:
        parser.error(f"unknown name {unknown[0]}; sections: {', '.join(SECTIONS)}; --only: {', '.join(TITLES)}")
    with tempfile.TemporaryDirectory(prefix="sweep-") as folder:
        bench = Bench(Path(folder), threads=options.threads)
        for name in options.sections or SECTIONS:
            SECTIONS[name](bench, options)


if __name__ == "__main__":
    main()
