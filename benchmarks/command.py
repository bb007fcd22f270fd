"""Time of whole commands, with imports and exit: exp, a script by hand, plain Lightning, lightning-hydra-template.

    python benchmarks/command.py [costs shares epoch_end] [--epochs 1,10,60,300] [--networks mlp,lenet,gpt]
        [--repetitions 3] [--threads 1]

    costs      processor seconds and wall clock of each program, and the ratio of exp to each of the others
    shares     processor seconds of exp by phase (imports, check, build, steps, ...), per network and number of epochs
    epoch_end  time of the end of an epoch: a validation of five batches and a save of last and best, in exp and by
               hand. It is the time of 300 epochs of two steps minus the time of the same steps without these ends

The programs run alternately. Each trains the same network, on digits or on characters, with AdamW for the same number
of epochs of 20 steps. At the end of each epoch it validates and saves the last and the best state. It writes event
files, and at its end it tests the best state.

exp runs with its default settings: gradient norms of each parameter, memory, throughput, a report. The script by hand
is benchmarks/sweep_programs/bare.py --save --events: torch, a SummaryWriter with loss and gradient norm of each step,
torch.save. plain.py logs every 50 steps, as Lightning's documentation shows. template.py follows
lightning-hydra-template.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path

from sweep import PROGRAMS, Bench, Cost, Grid

TITLES = {
    "exp": "exp, default settings",
    "bare_events": "by hand",
    "plain": "Hydra and Lightning",
    "template": "as lightning-hydra-template",
}
ENDS, STEPS_BETWEEN = 300, 2
WITHOUT_ENDS = [
    *("trainer.limit_val_batches=0", "monitor=loss/train"),
    *("checkpoint.save_last=false", "checkpoint.save_best=false"),
]
# Prints the processor seconds of each phase as JSON. A phase that runs within another phase is subtracted from it.
SHARES = """
import sys, time
clock, seconds, running = time.process_time, {}, []

def turn_to(part):
    now = clock()
    if running:
        name, since = running[-1]
        seconds[name] = seconds.get(name, 0.0) + now - since
        running[-1] = name, now
    return now

def timed(part, call):
    def timed_call(*arguments, **named):
        running.append((part, turn_to(part)))
        try:
            return call(*arguments, **named)
        finally:
            turn_to(part)
            running.pop()
            if running:
                running[-1] = running[-1][0], clock()
    return timed_call

def count(part, owner, name):
    setattr(owner, name, timed(part, getattr(owner, name)))

seconds["interpreter"] = clock()
running.append(("command line and report", clock()))

def imported():
    import exp.run, exp.start, exp.check.stages, exp.data.digits
    import exp.tensorboard.logger, exp.hooks.gradients, exp.hooks.throughput

timed("imports", imported)()
import exp.run, exp.start
from exp.engine.checkpoint import AtomicCheckpointIO, ThreadedCheckpointIO
from exp.engine.checkpointing import Checkpointing
from lightning.pytorch import Trainer
from lightning.pytorch.loops.evaluation_loop import _EvaluationLoop
from exp.cli.train import main

count("check", exp.start, "prepare")
count("build", exp.run, "build")
count("steps", Trainer, "fit")
count("test", Trainer, "test")
count("validation", _EvaluationLoop, "run")
count("checkpoints", Checkpointing, "_write")
status = main(sys.argv[1:])
turn_to(None)
import json
print(json.dumps(seconds))
sys.exit(status)
"""


def costs(bench: Bench, options: argparse.Namespace) -> None:
    for network in options.networks:
        for epochs in options.epochs:
            turns = []
            for turn in range(options.repetitions):
                names = list(TITLES) if turn % 2 == 0 else list(TITLES)[::-1]
                turns.append({name: cost(bench, name, network=network, epochs=epochs) for name in names})
            print(f"\n{network}, {epochs} epochs, {options.repetitions} alternating repetitions; ratio: exp / program")
            print(f"{'':38}{'processor, s':>13}{'wall, s':>9}{'ratio, processor':>19}{'ratio, wall':>14}")
            for name, title in TITLES.items():
                own = [turn[name] for turn in turns]
                middle = [statistics.median(getattr(one, clock) for one in own) for clock in ("processor", "wall")]
                ratios = [
                    statistics.median(getattr(turn["exp"], clock) / getattr(turn[name], clock) for turn in turns)
                    for clock in ("processor", "wall")
                ]
                told = "" if name == "exp" else f"{ratios[0]:19.2f}{ratios[1]:14.2f}"
                print(f"{title:38}{middle[0]:13.2f}{middle[1]:9.2f}{told}", flush=True)


def cost(bench: Bench, name: str, *, network: str, epochs: int) -> Cost:
    if name == "exp":
        words = [*bench.words(network), f"trainer.max_epochs={epochs}", "optimizer.lr=0.001"]
        return bench.exp([*words, *([f"runtime.threads={bench.threads}"] if bench.threads else [])])
    return bench.other(name, Grid(rates=[1e-3], seeds=[0]), network=network, epochs=epochs)[0]


def epoch_end(bench: Bench, options: argparse.Namespace) -> None:
    for network in options.networks:
        own = [sys.executable, "-m", "exp.train", *bench.words(network), f"trainer.max_epochs={ENDS}", "test=false"]
        own += [f"trainer.limit_train_batches={STEPS_BETWEEN}", "optimizer.lr=0.001"]
        hand = [
            sys.executable,
            str(PROGRAMS / "bare.py"),
            "--data",
            str(bench.data(network)),
            "--network",
            network,
            "--save",
        ]
        hand += ["--events", "--epochs", str(ENDS), "--batches", str(STEPS_BETWEEN), "--rates", "1e-3", "--seeds", "0"]
        hand += ["--threads", "1"]
        commands = {"exp": (own, WITHOUT_ENDS), "by hand": (hand, ["--without-ends"])}
        turns = []
        for turn in range(options.repetitions):
            names = list(commands) if turn % 2 == 0 else list(commands)[::-1]
            turns.append({name: seconds_of_an_end(bench, *commands[name]) for name in names})
        print(f"\n{network}, the end of an epoch, {options.repetitions} alternating repetitions")
        for name in commands:
            wall, processor = (1000 * statistics.median(turn[name][clock] for turn in turns) for clock in (0, 1))
            print(f"    {name:24}{processor:8.2f} ms processor time{wall:8.2f} ms wall clock")
        for clock, title in ((1, "processor"), (0, "wall")):
            ratios = sorted(turn["exp"][clock] / turn["by hand"][clock] for turn in turns)
            middle = statistics.median(ratios)
            print(f"    exp / by hand, {title:9}{middle:8.2f} ({ratios[0]:.2f} to {ratios[-1]:.2f})", flush=True)


def seconds_of_an_end(bench: Bench, command: Sequence[str], without: Sequence[str]) -> tuple[float, float]:
    """Return the wall and processor seconds of the end of an epoch.

    Args:
        command: program with arguments that trains ENDS epochs
        without: arguments that switch validations and saves off
    """
    none, all_of_them = bench.timed([*command, *without]), bench.timed(command)
    return (all_of_them[0] - none[0]) / ENDS, (all_of_them[1] - none[1]) / ENDS


def shares(bench: Bench, folder: Path, *, network: str, epochs: int, repetitions: int) -> None:
    command = [sys.executable, "-c", SHARES, *bench.words(network), f"trainer.max_epochs={epochs}"]
    found: list[dict[str, float]] = []
    for number in range(repetitions):
        place = folder / f"shares-{network}-{epochs}-{number}"
        place.mkdir()
        done = subprocess.run(command, cwd=place, check=True, capture_output=True, text=True)
        found.append(json.loads(done.stdout.splitlines()[-1]))
    middle = {name: statistics.median(one.get(name, 0.0) for one in found) for name in found[0]}
    total = sum(middle.values())
    print(f"\n{network}, {epochs} epochs: {total:.2f} s processor time")
    for name, seconds in middle.items():
        print(f"    {name:24}{seconds:8.2f} s{seconds / total:8.0%}", flush=True)


def numbers(text: str) -> Sequence[int]:
    return [int(word) for word in text.split(",")]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("sections", nargs="*", default=["costs", "shares"])
    parser.add_argument("--epochs", type=numbers, default=[1, 10, 60, 300])
    parser.add_argument("--networks", type=lambda text: text.split(","), default=["mlp", "lenet", "gpt"])
    parser.add_argument("--repetitions", type=int, default=3)
    parser.add_argument("--threads", type=int, default=1, help="threads of torch in each program; 0: torch's default")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as place:
        bench = Bench(Path(place), threads=options.threads)
        if "costs" in options.sections:
            costs(bench, options)
        if "epoch_end" in options.sections:
            epoch_end(bench, options)
        if "shares" in options.sections:
            for network in options.networks:
                for epochs in options.epochs:
                    shares(bench, Path(place), network=network, epochs=epochs, repetitions=options.repetitions)


if __name__ == "__main__":
    main()
