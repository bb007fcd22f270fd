"""Comparison of two checkouts: runs the benchmarks of this checkout and of another one alternately.

    python benchmarks/paired.py --against ../before [loop epochs hooks ddp startup forward] [--pairs 5]

Each measurement runs a program of the checkout's `benchmarks/` with the checkout's sources in a new process. Both
checkouts use the Python that runs this program. A ratio is the median of the ratios of neighboring runs, this checkout
to the other one, so that above 1 means that this checkout is slower. The two checkouts alternate step by step in
`hooks`, and run by run in all others.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

HERE = Path(__file__).resolve().parents[1]
Figures = dict[str, float]

# Each program prints its figures as a JSON mapping in its last line. OWN_SOURCES is put before each program.
OWN_SOURCES = """
import contextlib, io, json, logging, os, sys, warnings
import exp
assert exp.__file__.startswith(os.environ["TREE"]), f"{exp.__file__} is not below {os.environ['TREE']}"
warnings.filterwarnings("ignore")
logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
"""
LOOP = """
import loop
loop.torch.set_num_threads(1)
with contextlib.redirect_stdout(io.StringIO()):
    wall, processor = loop.here(3000, EPOCHS)
print(json.dumps({"us a step": wall, "us a step, processor": processor}))
"""
# Prints the time of a step, and its ratio to a step by hand in the same processes, which other load affects less.
DDP = """
import re, subprocess
command = [sys.executable, os.path.join(os.environ["TREE"], "benchmarks", "ddp.py"), "--pairs", "2", "--steps", "900"]
lines = subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()
found = {}
for line in lines:
    if line.startswith("exp"):
        name = line[:52].strip().removeprefix("exp: ")
        (wall, ratio), (processor, own_ratio) = re.findall(r"([0-9.]+) us +([0-9.]+)", line)
        found |= {f"us a step, {name[:24]}": float(wall), f"us, processor, {name[:24]}": float(processor)}
        found |= {f"by hand is 1, {name[:24]}": float(ratio), f"by hand is 1, processor, {name[:24]}": float(own_ratio)}
print(json.dumps(found))
"""
STARTUP = """
import startup
seconds = {
    "--help, s": startup.wall_seconds("-m", "exp.train", "--help", directory="."),
    "--cfg job, s": startup.wall_seconds("-m", "exp.train", "--cfg", "job", directory="."),
    "first step, s": startup.seconds_until("-c", startup.FIRST_STEP, directory="."),
}
print(json.dumps(seconds))
"""
FORWARD = """
import forward
forward.torch.set_num_threads(1)
cases = {
    "20 layers, list": (forward.ByHandList(20), forward.list_program(20)),
    "20 layers, names": (forward.twenty_names()(20), forward.names_program(20)),
}
print(json.dumps({name: forward.compare(*pair, repetitions=100, calls=30)[2] for name, pair in cases.items()}))
"""
# Runs at the same time as the program of the other checkout: each waits after a step until the other has done a step.
TURNS = """
import hooks
place, name, steps = hooks.Path(os.environ["PLACE"]), os.environ["NAME"], int(os.environ["STEPS"])
words = hooks.overrides(place, name=name, steps=steps, model="gpt-10M")
os.chdir(place)
exp.fit(exp.compose(["hooks=[gradients,memory]" if word.startswith("hooks=[") else word for word in words]))
"""
ALONE = {
    "loop": LOOP.replace("EPOCHS", "1"),
    "epochs": LOOP.replace("EPOCHS", "150"),
    "ddp": DDP,
    "startup": STARTUP,
    "forward": FORWARD,
}


def started(tree: Path, program: str, *, directory: str, **environment: str) -> subprocess.Popen[str]:
    paths = os.pathsep.join([str(tree / "src"), str(tree / "benchmarks")])
    own = os.environ | {"PYTHONPATH": paths, "TREE": str(tree), "OMP_NUM_THREADS": "1"} | environment
    command = [sys.executable, "-c", OWN_SOURCES + program]
    return subprocess.Popen(command, cwd=directory, env=own, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def ended(process: subprocess.Popen[str]) -> str:
    output, error = process.communicate()
    if process.returncode:
        raise SystemExit(f"a measurement failed:\n{output}\n{error}")
    return output


def run_by_run(program: str, trees: list[Path], *, pairs: int) -> Iterator[list[Figures]]:
    """Yield the figures of each checkout per pair, in the order of `trees`; every second pair runs in reverse order."""
    with tempfile.TemporaryDirectory() as directory:
        for pair in range(pairs):
            found = {}
            for tree in trees if pair % 2 == 0 else trees[::-1]:
                output = ended(started(tree, program, directory=directory))
                found[tree] = json.loads(output.strip().splitlines()[-1])
            yield [found[tree] for tree in trees]


def step_by_step(trees: list[Path], *, steps: int) -> Iterator[list[Figures]]:
    """Yield the times of each step after the third for both checkouts, with the default hooks gradients and memory."""
    with tempfile.TemporaryDirectory() as directory:
        place, names = Path(directory), ("with", "without")
        (place / "conf" / "hooks").mkdir(parents=True)
        for name in names:
            os.mkfifo(place / name)
        settings = {"directory": directory, "PLACE": directory, "STEPS": str(steps)}
        processes = [started(tree, TURNS, NAME=name, **settings) for tree, name in zip(trees, names, strict=True)]
        for process in processes:
            ended(process)
        times = [json.loads((place / f"{name}.json").read_text())[3:] for name in names]
        for both in zip(*times, strict=False):
            yield [{"ms a step": 1000 * wall, "ms a step, processor": 1000 * own} for wall, own in both]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("which", nargs="*", help=f"{', '.join(ALONE)}, hooks; default: all of them")
    parser.add_argument("--against", type=Path, required=True, help="the other checkout")
    parser.add_argument("--pairs", type=int, default=5)
    parser.add_argument("--steps", type=int, default=200, help="steps of hooks")
    arguments = parser.parse_args()
    trees = [HERE, arguments.against.resolve()]
    print(f"{'':54}{'here':>10}{'there':>10}{'ratio':>8}   all pairs")
    for name in arguments.which or [*ALONE, "hooks"]:
        turns = step_by_step(trees, steps=arguments.steps) if name == "hooks" else None
        pairs = list(turns or run_by_run(ALONE[name], trees, pairs=arguments.pairs))
        for figure in pairs[0][0]:
            ours, theirs = ([pair[tree][figure] for pair in pairs] for tree in (0, 1))
            ratios = sorted(one / other for one, other in zip(ours, theirs, strict=True))
            middle = f"{statistics.median(ours):10.3f}{statistics.median(theirs):10.3f}{statistics.median(ratios):8.3f}"
            print(f"{name + ': ' + figure:54}{middle}   {ratios[0]:.2f} to {ratios[-1]:.2f}", flush=True)


if __name__ == "__main__":
    main()
