"""What checkpoints cost a run that trains a GPT of 10 million parameters and saves every 100 steps.

    python benchmarks/checkpoints.py [--saves 8] [--batch-size 8]

The network is that of benchmarks/hooks.py, on one thread of a CPU, with AdamW: a checkpoint of 114 MiB. Its batch is 8
texts of 64 characters; of a larger one a step takes longer, and the share is smaller. To end within minutes the run
saves every 8 steps: what the steps around a save take more than the quiet ones before the next is its cost, and that is
held against 100 steps. With checkpoint.async=true the thread that writes is in it, as far as it takes time from the
steps (wall) or works itself (processor).
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
Times = tuple[float, float]


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
    """A quiet step, and what a checkpoint costs, both in seconds of the wall's clock and of the processor's."""
    with tempfile.TemporaryDirectory(dir=".", prefix="checkpoints-") as folder:
        words = overrides(Path(folder).resolve(), saves=saves, batch_size=batch_size, is_threaded=is_threaded)
        exp.fit(exp.compose(words))
    times = loop_clock.StepTimes.times
    steps, costs = [], []
    # Each save comes before the first step of a period; the first period has none.
    for start in range(EVERY, len(times) - EVERY + 1, EVERY):
        period = times[start : start + EVERY]
        quiet = [statistics.median(step[clock] for step in period[-QUIET:]) for clock in (0, 1)]
        steps.append(quiet)
        costs.append([sum(step[clock] for step in period) - EVERY * quiet[clock] for clock in (0, 1)])
    middle = [[statistics.median(one[clock] for one in many) for clock in (0, 1)] for many in (steps, costs)]
    return (middle[0][0], middle[0][1]), (middle[1][0], middle[1][1])


@contextlib.contextmanager
def timed(seconds: list[float]):
    """Times the look at what is saved for numbers that are not finite, by the processor's clock."""
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
    print(f"{'':24}    a step, s          a checkpoint, s       of a run that saves every {SAVED_EVERY} steps")
    print(f"{'':24}    wall   processor   wall   processor      wall      processor")
    for is_threaded in (False, True):
        looks: list[float] = []
        with contextlib.redirect_stdout(io.StringIO()), timed(looks):
            step, cost = measure(saves=arguments.saves, batch_size=arguments.batch_size, is_threaded=is_threaded)
        shares = [100 * cost[clock] / (SAVED_EVERY * step[clock]) for clock in (0, 1)]
        print(
            f"checkpoint.async={str(is_threaded).lower():5}  {step[0]:8.3f} {step[1]:8.3f}"
            f"  {cost[0]:9.3f} {cost[1]:8.3f}   {shares[0]:7.2f} per cent {shares[1]:6.2f} per cent"
            f"; to look for nan {statistics.median(looks):.3f} s",
            flush=True,
        )


if __name__ == "__main__":
    main()
