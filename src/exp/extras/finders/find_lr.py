"""python -m exp.find_lr [flags] [overrides]: the learning-rate range test of the run that exp.train would make.

    python -m exp.find_lr model=mlp optimizer=sgd
    python -m exp.find_lr model=mlp --min 1e-6 --max 10 --steps 200

It trains the run's own network with its own optimizer, objective, precision and strategy, from its own first batches,
at rates that rise from step to step, in a directory of its own, outputs/<name>/find_lr/<date>/<time>: lr.csv, lr.json,
lr.png and TensorBoard. It prints the rate at which the loss has fallen by half of its fall, as the command to type.
"""

from __future__ import annotations

import argparse
import inspect
import json
import math
import sys
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault, RunError
from exp.output import exit_status, outliving_output

if TYPE_CHECKING:
    from exp.check.plan import Plan

PROGRAM = "exp.find_lr"
# Those of engine.range_test, which comes with torch.
FEWEST_STEPS = 20
ENDS = {
    "steps": "the last of the rates",
    "loss_rose": "the smoothed loss rose above {factor:g} times its lowest",
    "not_finite": "the loss was not finite",
}


def main(argv: Sequence[str] | None = None) -> int:
    """Run the test and print what it suggests.

    Returns: 0 with a suggestion, 1 where there is none or the test fails, 2 for a fault in the command, 128 + n where
        signal n ended it.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    from exp.extras.finders.short_run import decide, parse, parted_callbacks, run, shortened

    flags, arguments = parse(_parser(), argv, program=PROGRAM)
    if faults := list(_flag_faults(flags)):
        raise ConfigError(faults)
    if arguments is None:
        return 0
    with outliving_output():
        config, decided = decide(arguments)
        if faults := list(unfit(decided)):
            raise ConfigError(faults)
        test = {
            "_target_": "exp.extras.finders.range_test.RangeTest",
            "lowest": flags.min,
            "highest": flags.max,
            "steps": flags.steps,
            "stop_factor": None if math.isinf(flags.stop_factor) else flags.stop_factor,
        }
        changes = {"callbacks": {"range_test": test}, "trainer.max_steps": flags.steps}
        short = shortened(config, decided, changes, room="find_lr", overrides=arguments.overrides)
        left = ["schedule", *(f"callbacks.{name}" for name in parted_callbacks(decided)[1])]
        print(f"{flags.steps} steps at learning rates from {flags.min:g} to {flags.max:g}; no {', '.join(left)}")
        from exp.start import fit

        report = run(short, fit=fit)
        print(told(Path(report.directory), decided.plain, arguments.overrides, factor=flags.stop_factor))
    return 0


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog=f"python -m {PROGRAM}",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
        allow_abbrev=False,
        usage="%(prog)s [--min LR] [--max LR] [--steps N] [--stop-factor X] [flags and overrides of exp.train]",
    )
    parser.add_argument("--min", type=float, default=1e-8, metavar="LR", help="the first rate; 1e-8")
    parser.add_argument("--max", type=float, default=1.0, metavar="LR", help="the last rate; 1")
    parser.add_argument("--steps", type=int, default=100, metavar="N", help="of the optimizer; 100")
    said = "it ends where the smoothed loss is above X times its lowest; 4, and inf never ends it"
    parser.add_argument("--stop-factor", type=float, default=4.0, metavar="X", help=said)
    return parser


def _flag_faults(flags: argparse.Namespace) -> Iterator[Fault]:
    if not 0 < flags.min < math.inf:
        yield Fault(key="--min", got=f"{flags.min:g}", expected="a rate above 0")
    elif not flags.min < flags.max < math.inf:
        yield Fault(key="--max", got=f"{flags.max:g}", expected=f"a rate above --min, {flags.min:g}")
    if flags.steps < FEWEST_STEPS:
        expected = f"{FEWEST_STEPS} or more: the loss is smoothed over steps"
        yield Fault(key="--steps", got=str(flags.steps), expected=expected)
    if not flags.stop_factor > 1:  # of a nan, too
        yield Fault(key="--stop-factor", got=f"{flags.stop_factor:g}", expected="a factor above 1, or inf")


def unfit(decided: Plan) -> Iterator[Fault]:
    """What has no one rate that could be raised."""
    from exp.config.targets import resolve
    from exp.strategies.strategy import traits_of

    plain = decided.plain
    if plain["phases"]:
        yield Fault(
            key="phases",
            got=f"{', '.join(plain['phases'])}, each with an optimizer of its own",
            expected="none: the range test raises the rate of one optimizer",
            cure="Try rates in runs of their own: -m phases.NAME.optimizer.lr=1e-4,1e-3",
        )
    if "owns_step" in traits_of(decided.strategy):
        got = f"{plain['strategy']['name']}, whose engine makes the optimizer's steps"
        yield Fault(key="strategy", got=got, expected="a strategy that leaves them to the optimizer")
    kind = resolve(plain["optimizer"]["_target_"], allow=plain["security"]["allow"])
    parameters = inspect.signature(kind).parameters
    if "lr" not in parameters:
        got = f"{kind.__name__}, which takes no lr"
        yield Fault(key="optimizer._target_", got=got, expected="an optimizer with a learning rate of that name")
    elif "lr" in plain["optimizer"] and plain["optimizer"]["lr"] == 0:
        yield Fault(key="optimizer.lr", got="0", expected="above 0: the rates of groups are multiples of it")


def told(directory: Path, plain: Mapping[str, Any], overrides: Sequence[str], *, factor: float) -> str:
    """What the test came to, and the command to type.

    factor: of --stop-factor. Raises: RunError where it suggests nothing.
    """
    from exp.cli.command_line import with_values
    from exp.extras.finders.range_test import PICTURE, SUMMARY, TABLE

    found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    steps, ended = found["steps"], ENDS[found["end"]].format(factor=factor)
    shown = directory.relative_to(Path.cwd()) if directory.is_relative_to(Path.cwd()) else directory
    if found["suggestion"] is None:
        raise RunError(
            f"the test suggests no rate: in {steps} steps the loss did not fall by more than it varies, or there were "
            f"too few ({ended}). Look at {shown / PICTURE}. Try a lower --min, more --steps or a larger data.batch_size"
        )
    rates = {rule: f"{rate:.3g}" for rule, rate in found["suggestion"].items()}
    return "\n".join([
        f"ended at step {steps}: {ended}",
        f"  half of the fall   {rates['halfway']}",
        f"  steepest descent   {rates['steepest']}",
        f"  minimum / 10       {rates['tenth']}",
        f"  in the config      {found['own_lr']:.3g}",
        f"  curve              {shown / PICTURE}, {shown / TABLE}",
        f"  TensorBoard        python -m exp.dashboard {shown}",
        with_values(overrides, rates_with(plain["optimizer"], found["suggestion"]["halfway"], own=found["own_lr"])),
    ])  # fmt: skip


def rates_with(optimizer: Mapping[str, Any], rate: float, *, own: float) -> dict[str, str]:
    """The keys and values that set a rate, and those of groups with one of their own in the ratio that they have now.

    optimizer: the config's node. own: the rate that it has now.
    """
    key = "optimizer.lr" if "lr" in optimizer else "+optimizer.lr"
    groups = {name: group["lr"] for name, group in optimizer["groups"].items() if "lr" in group}
    return {key: f"{rate:.3g}"} | {
        f"optimizer.groups.{name}.lr": f"{rate * lr / own:.3g}" for name, lr in groups.items()
    }
