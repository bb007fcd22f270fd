"""Time of the default hooks per step on a CPU, for ready models and for models with over a million parameters.

    python benchmarks/hooks.py [gpt-10M mlp-2.2M mlp lenet ...] [--steps 200]

One run has the hooks gradients, memory and throughput with their default settings: norms every step, memory every 50
steps, histograms, ratios and shares every 100 steps. The other run has no hooks. The runs are two processes of one
thread each, which alternate step by step, so that other load on the machine affects both equally. The times are those
of whole steps, including the writes to TensorBoard.

Steps are compared by kind, because a step with a histogram is rare and takes longest. The printed cost is the sum over
the kinds: median difference times the number of such steps in a hundred.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import multiprocessing
import os
import statistics
import tempfile
from pathlib import Path

os.environ["OMP_NUM_THREADS"] = "1"

import exp

SKIPPED = 3
HOOKS = "gradients,memory,throughput"
DATA_OF_GPT = ("model=gpt", "data=text", "data.batch_size=8")
MODELS = {
    "gpt-10M": (
        *DATA_OF_GPT,
        *("model.layers.blocks.repeat=8", "model.constants.width=320", "model.constants.hidden=1280"),
        "model.constants.heads=5",
    ),
    "mlp-2.2M": ("model=mlp", "model.constants.width=1024"),
    "transformer-1.6M": ("model=transformer", "model.constants.width=256", "model.constants.hidden=1024"),
    "resnet-1.3M": ("model=resnet", "model.constants.width=80", "model.constants.width2=160"),
    "gpt": DATA_OF_GPT,
    "resnet": ("model=resnet",),
    "transformer": ("model=transformer",),
    "mlp": ("model=mlp",),
    "sequential": ("model=sequential",),
    "lenet": ("model=lenet",),
    "branches": ("model=branches",),
    "parameter_dict": ("model=parameter_dict",),
}
Times = list[tuple[float, float]]


def overrides(place: Path, *, name: str, steps: int, model: str) -> list[str]:
    """Return the overrides of one of the two runs.

    Args:
        place: folder of the named pipes, run directories and results
        name: "with" for the run with hooks, "without" for the run without
        steps: number of optimizer steps
        model: key of MODELS
    """
    other = "without" if name == "with" else "with"
    turns = {
        "_target_": "hook_turns.Turns",
        "own": str(place / name),
        "other": str(place / other),
        "begins": str(name == "with").lower(),
        "steps": str(steps),
        "out": str(place / f"{name}.json"),
    }
    return [
        f"hydra.run.dir={place}/run_{name}",
        *MODELS[model],
        *("trainer.max_epochs=null", f"trainer.max_steps={steps}", "trainer.limit_val_batches=0", "test=false"),
        *("metrics=[]", "monitor=loss/train", "checkpoint.save_last=false", "checkpoint.save_best=false"),
        *("runtime.threads=1", "strategy=single", "launch.accelerator=cpu", "trainer.enable_progress_bar=false"),
        *("security.allow=[hook_turns]", f"hooks=[{HOOKS if name == 'with' else ''}]"),
        f"+hooks.turns={{{', '.join(f'{key}: {value}' for key, value in turns.items())}}}",
    ]


def train(place: Path, name: str, steps: int, model: str) -> None:
    os.chdir(place)
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stdout(nowhere):
        exp.fit(exp.compose(overrides(place, name=name, steps=steps, model=model)))


def kind_of(index: int) -> str:
    """Return what the hooks record in optimizer step `index`, counted from 1."""
    if index % 100 == 0:
        return "memory, histograms, ratios, shares"
    return "memory" if index % 50 == 0 else "norms"


def compare(ours: Times, bare: Times, *, clock: int) -> None:
    """Print the difference of the two runs per kind of step.

    Args:
        ours: times of the run with hooks, (wall, processor) in seconds per step
        bare: times of the run without hooks
        clock: 0 for the wall clock, 1 for processor time
    """
    kinds: dict[str, list[int]] = {}
    for index in range(SKIPPED + 1, min(len(ours), len(bare))):
        kinds.setdefault(kind_of(index), []).append(index)
    # Differences are taken between steps with the same number, which ran right after each other. Index 0 is step 1.
    step = statistics.median(time[clock] for time in bare[SKIPPED:])
    share = {"norms": 98, "memory": 1, "memory, histograms, ratios, shares": 1}
    cost = 0.0
    for kind, indices in kinds.items():
        difference = statistics.median(ours[index - 1][clock] - bare[index - 1][clock] for index in indices)
        cost += difference * share[kind] / 100
        print(f"  {kind:36} {len(indices):4} pairs  {1000 * difference:9.3f} ms more with hooks (median)")
    total = sum(time[clock] for time in ours[SKIPPED:]) / sum(time[clock] for time in bare[SKIPPED:])
    print(f"  a step without hooks {1000 * step:8.2f} ms; with hooks {100 * cost / step:5.2f} percent more", end="")
    print(f" (by the sums of all steps: {100 * (total - 1):5.2f})", flush=True)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("models", nargs="*", default=list(MODELS), choices=list(MODELS))
    arguments = parser.parse_args()
    for model in arguments.models:
        measure(model, arguments.steps)


def measure(model: str, steps: int) -> None:
    context = multiprocessing.get_context("spawn")
    with tempfile.TemporaryDirectory(dir=".", prefix="hooks-") as folder:
        place = Path(folder).resolve()
        (place / "conf" / "hooks").mkdir(parents=True)
        names = ("with", "without")
        for name in names:
            os.mkfifo(place / name)
        processes = [context.Process(target=train, args=(place, name, steps, model)) for name in names]
        for process in processes:
            process.start()
        for process in processes:
            process.join()
        ours, bare = (json.loads((place / f"{name}.json").read_text()) for name in names)
    for clock, title in enumerate(("wall clock", "processor time")):
        print(f"{model}, {title}, {steps} steps")
        compare(ours, bare, clock=clock)


if __name__ == "__main__":
    main()
