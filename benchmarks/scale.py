"""Growth of the time outside training with the number of layers, parameters, jobs and ranks, each at three sizes.

    python benchmarks/scale.py [layers parameters jobs sweep ranks] [--full]

    layers      a Sequential of N small Linear layers: check, and a run of five steps with its report
    parameters  N parameter tensors in blocks of 100, each with a tag: check, and a run of three steps
    jobs        sweep.dry_run of N jobs, which are composed and checked
    sweep       a sweep of N jobs of one epoch, then exp.report of the sweep
    ranks       exp.plan of a GPT with fsdp on N GPUs

The table shows the processor seconds of the whole command minus those of the same command with N = 4. The last two
columns divide size and seconds by those of the line before. --full takes larger sizes, and an hour.
"""

from __future__ import annotations

import argparse
import os
import resource
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

DEEP = """
# Many layers: model=deep
_target_: exp.models.containers.SequentialModel
constants:
  depth: 1
layers:
  flatten: {_target_: torch.nn.Flatten}
  stem: {_target_: torch.nn.Linear, out_features: 8}
  linears:
    repeat: ${model.constants.depth}
    layer: {_target_: torch.nn.Linear, in_features: 8, out_features: 8}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
"""
WIDE = """
# Many parameters, a hundred in a block: model=wide
_target_: exp.models.containers.SequentialModel
constants:
  blocks_of_100: 1
layers:
  flatten: {_target_: torch.nn.Flatten}
  stem: {_target_: torch.nn.Linear, out_features: 4}
  blocks:
    repeat: ${model.constants.blocks_of_100}
    layer:
      _target_: exp.models.containers.SequentialModel
      layers:
        linears:
          repeat: 50
          layer: {_target_: torch.nn.Linear, in_features: 4, out_features: 4}
  head: {_target_: torch.nn.Linear, out_features: "${data.num_outputs}"}
"""
SHORT = ["trainer.limit_val_batches=1", "trainer.limit_test_batches=1"]
SIZES = {
    "layers": ([125, 250, 500], [1_000, 2_000, 4_000]),
    "parameters": ([1_000, 2_000, 4_000], [10_000, 30_000, 100_000]),
    "jobs": ([100, 200, 400], [1_000, 3_000, 10_000]),
    "sweep": ([50, 100, 200], [500, 1_000, 2_000]),
    "ranks": ([8, 64, 1_024], [8, 64, 1_024]),
}


def command(folder: Path, *words: str) -> tuple[float, float]:
    """Return the processor seconds of all processes of a command, and the peak MiB of the largest process."""
    before = resource.getrusage(resource.RUSAGE_CHILDREN)
    runner = "import resource, subprocess, sys; done = subprocess.run([sys.executable, *sys.argv[1:]]); "
    runner += "print(resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss // 1024); sys.exit(done.returncode)"
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, "-c", runner, *words],
        cwd=folder,
        env=environment,
        check=True,
        stdout=subprocess.PIPE,
        text=True,
    )
    after = resource.getrusage(resource.RUSAGE_CHILDREN)
    seconds = after.ru_utime + after.ru_stime - before.ru_utime - before.ru_stime
    return seconds, float(done.stdout.splitlines()[-1])


def layers(folder: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    chosen = ["model=deep", f"model.constants.depth={size}"]
    yield "check", ["-m", "exp.check", *chosen]
    yield "five steps", ["-m", "exp.train", *chosen, "trainer.max_steps=5", *SHORT]


def parameters(folder: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    chosen = ["model=wide", f"model.constants.blocks_of_100={max(1, size // 100)}"]
    yield "check", ["-m", "exp.check", *chosen]
    yield "three steps", ["-m", "exp.train", *chosen, "trainer.max_steps=3", *SHORT]


def jobs(folder: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    yield "composed and checked", ["-m", "exp.train", "-m", f"seed=range(0,{size})", "sweep.dry_run=true"]


def sweep(folder: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    place = f"hydra.sweep.dir=outputs/{size}"
    wanted = ["-m", "exp.train", "-m", place, f"seed=range(0,{size})", "trainer.max_epochs=1", "data.batch_size=512"]
    yield "sweep", wanted
    yield "report", ["-m", "exp.report", f"outputs/{size}"]


def ranks(folder: Path, size: int) -> Iterator[tuple[str, list[str]]]:
    chosen = ["model=gpt", "data=text", "strategy=fsdp", f"device={size}xH100", "data.batch_size=2048"]
    yield "plan", ["-m", "exp.plan", *chosen]


SECTIONS: Mapping[str, Callable[[Path, int], Iterator[tuple[str, list[str]]]]] = {
    "layers": layers,
    "parameters": parameters,
    "jobs": jobs,
    "sweep": sweep,
    "ranks": ranks,
}


def measure(folder: Path, section: str, sizes: Sequence[int]) -> None:
    commands = SECTIONS[section]
    base = {name: command(folder, *words)[0] for name, words in commands(folder, 4)}
    print(f"\n{section}: with N = 4 {', '.join(f'{name} {seconds:.1f} s' for name, seconds in base.items())}")
    print(f"{'N':>10}{'':24}{'more, s':>10}{'MiB':>8}{'size ratio':>14}{'seconds ratio':>16}")
    before: dict[str, tuple[int, float]] = {}
    for size in sizes:
        for name, words in commands(folder, size):
            seconds, mebibytes = command(folder, *words)
            more = seconds - base[name]
            told = ""
            if name in before and before[name][1] > 0:
                told = f"{size / before[name][0]:14.1f}{more / before[name][1]:16.1f}"
            before[name] = size, more
            print(f"{size:10,}  {name:22}{more:10.1f}{mebibytes:8.0f}{told}", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=list(SECTIONS), choices=list(SECTIONS))
    parser.add_argument("--full", action="store_true")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        folder = Path(place)
        (folder / "conf" / "model").mkdir(parents=True)
        (folder / "conf" / "model" / "deep.yaml").write_text(DEEP.lstrip())
        (folder / "conf" / "model" / "wide.yaml").write_text(WIDE.lstrip())
        for section in options.sections:
            measure(folder, section, SIZES[section][options.full])


if __name__ == "__main__":
    main()
