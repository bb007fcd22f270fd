"""Time of checkpoints in a run that trains a GPT of 10 million parameters and saves every 100 steps.

    python benchmarks/checkpoints.py [--saves 8] [--batch-size 8]

The network is the GPT of benchmarks/hooks.py, trained with AdamW on one thread of a CPU. A checkpoint has 114 MiB. A
batch has 8 texts of 64 characters. With a larger batch a step takes longer, and checkpoints take a smaller share.

The run saves every 8 steps, so that the benchmark ends within minutes. The last 4 steps of each 8 are not affected by
the save. The cost of a save is the time of the 8 steps minus 8 times the median of those 4 steps. It is printed as a
share of 100 steps, by three clocks: wall clock, processor time of all threads, processor time of the training thread.

With checkpoint.async=true, the wall clock shows by how much the run is longer. The processor time of the training
thread shows by how much it is longer if another core is free for the thread that writes.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import logging
import os
import statistics
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import loop_clock
import torch

import exp
from exp.engine import module

EVERY, QUIET, SAVED_EVERY = 8, 4, 100
CLOCKS = ("wall", "processor", "own thread")
Times = list[float]


def overrides(place: Path, *, saves: int, batch_size: int, is_threaded: bool) -> list[str]:
    steps = EVERY * (saves + 1)
    return [
        f"hydra.run.dir={place}/run",
        *("data=text", f"data.batch_size={batch_size}", "model.layers.blocks.repeat=8"),
        *("model.constants.width=320", "model.constants.hidden=1280", "model.constants.heads=5"),
        *("trainer.max_epochs=null", f"trainer.max_steps={steps}", "trainer.limit_val_batches=0", "test=false"),
        *("metrics=[]", "monitor=loss/train", f"checkpoint.every_n_steps={EVERY}"),
        *("runtime.threads=1", "strategy=single", "launch.accelerator=cpu", "trainer.enable_progress_bar=false"),
        *("security.allow=[loop_clock]", "hooks=[]", "+hooks.times={_target_: loop_clock.StepTimes}"),
        f"checkpoint.async={str(is_threaded).lower()}",
    ]


def measure(*, saves: int, batch_size: int, is_threaded: bool) -> tuple[Times, Times]:
    """Return the seconds of a step without a save and of a checkpoint, each by the three CLOCKS."""
    with tempfile.TemporaryDirectory(dir=".", prefix="checkpoints-") as folder:
        words = overrides(Path(folder).resolve(), saves=saves, batch_size=batch_size, is_threaded=is_threaded)
        exp.fit(exp.compose(words))
    times = loop_clock.StepTimes.times
    steps, costs = [], []
    # A save is made before the first step of each 8 steps, except the first 8.
    for start in range(EVERY, len(times) - EVERY + 1, EVERY):
        period = list(zip(*times[start : start + EVERY], strict=True))
        steps.append([statistics.median(clock[-QUIET:]) for clock in period])
        costs.append([sum(clock) - EVERY * quiet for clock, quiet in zip(period, steps[-1], strict=True)])
    return tuple([statistics.median(clock) for clock in zip(*many, strict=True)] for many in (steps, costs))


@contextlib.contextmanager
def timed(seconds: list[float]):
    """Append the processor seconds of each check of a checkpoint for NaN and infinity to `seconds`."""
    look: Callable[..., None] = module.require_finite

    def looking(*arguments, **named) -> None:
        began = loop_clock.time.process_time()
        look(*arguments, **named)
        seconds.append(loop_clock.time.process_time() - began)

    module.require_finite = looking
    try:
        yield
    finally:
        module.require_finite = look


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--saves", type=int, default=8)
    parser.add_argument("--batch-size", type=int, default=8)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    warnings.filterwarnings("ignore")
    logging.getLogger("lightning.pytorch").setLevel(logging.ERROR)
    print(f"share of a run that saves every {SAVED_EVERY} steps")
    for is_threaded in (False, True):
        looks: list[float] = []
        with contextlib.redirect_stdout(io.StringIO()), timed(looks):
            step, cost = measure(saves=arguments.saves, batch_size=arguments.batch_size, is_threaded=is_threaded)
        print(f"checkpoint.async={str(is_threaded).lower()}, check for nan and inf {statistics.median(looks):.3f} s")
        for clock, quiet, more in zip(CLOCKS, step, cost, strict=True):
            share = 100 * more / (SAVED_EVERY * quiet)
            print(f"  {clock:12} a step {quiet:7.3f} s, a checkpoint {more:7.3f} s {share:8.2f} percent", flush=True)


if __name__ == "__main__":
    main()
