"""python -m exp.find_lr [flags] [overrides]: suggests a learning rate by a range test of the run of exp.train.

    python -m exp.find_lr model=mlp optimizer=sgd
    python -m exp.find_lr model=mlp --min 1e-6 --max 10 --steps 200

The command trains the first steps of the run that exp.train would start. The learning rate increases at each step.
Network, optimizer, objective, precision and strategy are those of the run. The command writes lr.csv, lr.json, lr.png
and TensorBoard files to the directory outputs/<name>/find_lr/<date>/<time>. It suggests the rate at which half of the
decrease of the loss is reached, and prints a command for exp.train with this rate.
"""

from __future__ import annotations

import inspect
import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ErrorDetails, RunError, config_error, not_supported_with, raise_errors
from exp.extras.finders.short_run import decide, flag_parser, parse, run, shorten_config, split_callbacks
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from exp.check.plan import Plan

PROGRAM = "exp.find_lr"
# Equal to FEWEST_STEPS in range_test.py, which is not imported here, because it imports torch.
FEWEST_STEPS = 20
ENDS = {
    "steps": "after the last rate",
    "loss_rose": "the smoothed loss rose above 4 times its lowest",
    "not_finite": "the loss was not finite",
}


@command()
def main(argv: Sequence[str]) -> int:
    """Run the range test, and print the suggested learning rate.

    Returns:
        Exit status: 0 if a rate is suggested, 1 if no rate is suggested or the test fails, 2 if the command has an
        error, or 128 + n after signal n.
    """
    parser = flag_parser(PROGRAM, __doc__)
    parser.add_argument("--min", type=float, default=1e-8, help="the first rate; %(default)s")
    parser.add_argument("--max", type=float, default=1.0, help="the last rate; %(default)s")
    parser.add_argument("--steps", type=int, default=100, help="optimizer steps; %(default)s")
    flags, arguments = parse(parser, argv, program=PROGRAM, above={"min": 0, "max": 0, "steps": FEWEST_STEPS - 1})
    if not flags.min < flags.max < math.inf:
        raise config_error("--max", got=f"{flags.max:g}", expected=f"a rate above --min, {flags.min:g}")
    if arguments is None:
        return 0
    with survive_output_errors():
        config, decided = decide(arguments)
        raise_errors(plan_errors(decided))
        test = {
            "_target_": "exp.extras.finders.range_test.RangeTest",
            "lowest": flags.min,
            "highest": flags.max,
            "steps": flags.steps,
        }
        changes = {"callbacks": {"range_test": test}, "trainer.max_steps": flags.steps}
        short = shorten_config(config, decided, changes, room="find_lr", overrides=arguments.overrides)
        left = ["schedule", *(f"callbacks.{name}" for name in split_callbacks(decided)[1])]
        print(f"{flags.steps} steps at learning rates from {flags.min:g} to {flags.max:g}; left out: {', '.join(left)}")
        from exp.start import fit

        report = run(short, fit=fit)
        print(result(Path(report.directory), decided.settings.optimizer, arguments.overrides))
    return 0


def plan_errors(decided: Plan) -> Iterator[ErrorDetails]:
    """Yield an error for each setting that the range test does not support.

    The test needs one optimizer with the parameter lr, which is above 0.
    """
    from exp.config.targets import resolve
    from exp.strategies.strategy import traits_of

    settings = decided.settings
    if settings.phases:
        expected = "none: the range test raises the rate of one optimizer"
        yield not_supported_with("phases", ", ".join(settings.phases), PROGRAM, expected)
    if "owns_step" in traits_of(decided.strategy):
        expected = "a strategy that leaves the steps to the optimizer"
        yield not_supported_with("strategy", settings.strategy["name"], PROGRAM, expected)
    target = settings.optimizer["_target_"]
    if "lr" not in inspect.signature(resolve(target, allow=settings.security.allow)).parameters:
        yield not_supported_with("optimizer._target_", target, PROGRAM, "an optimizer with the parameter lr")
    elif "lr" in settings.optimizer and settings.optimizer["lr"] == 0:
        yield not_supported_with("optimizer.lr", "0", PROGRAM, "above 0: groups have multiples of this rate")


def result(directory: Path, optimizer: Mapping[str, Any], overrides: Sequence[str]) -> str:
    """Return the printed summary of the test. Its last line is a command that uses the suggested rate.

    Args:
        directory: Run directory of the test.
        optimizer: The node `optimizer` of the config.
        overrides: Overrides of the command line.

    Raises:
        RunError: The test suggests no rate.
    """
    from exp.cli.command_line import with_values
    from exp.extras.finders.range_test import PICTURE, SUMMARY, TABLE

    found = json.loads((directory / SUMMARY).read_text(encoding="utf-8"))
    steps, ended, shown = found["steps"], ENDS[found["end"]], os.path.relpath(directory)
    if found["suggestion"] is None:
        raise RunError(
            f"the test suggests no rate: in {steps} steps the loss did not decrease by more than its noise, or the "
            f"steps were too few ({ended}). Look at {shown}/{PICTURE}. Try a lower --min, more --steps or a larger "
            "data.batch_size"
        )
    return "\n".join([
        f"ended at step {steps}: {ended}",
        f"  suggested          {found['suggestion']:.3g}, where half of the decrease of the loss is reached",
        f"  in the config      {found['own_lr']:.3g}",
        f"  curve              {shown}/{PICTURE}, {shown}/{TABLE}",
        f"  TensorBoard        python -m exp.dashboard {shown}",
        with_values(overrides, rates_with(optimizer, found["suggestion"], own=found["own_lr"])),
    ])  # fmt: skip


def rates_with(optimizer: Mapping[str, Any], rate: float, *, own: float) -> dict[str, str]:
    """Return the overrides, as values by config key, that set a new learning rate.

    The rates of parameter groups are multiplied by the same factor as optimizer.lr.

    Args:
        optimizer: The node `optimizer` of the config.
        rate: New learning rate.
        own: Learning rate in the config.
    """
    key = "optimizer.lr" if "lr" in optimizer else "+optimizer.lr"
    groups = {name: group["lr"] for name, group in optimizer["groups"].items() if "lr" in group}
    return {key: f"{rate:.3g}"} | {
        f"optimizer.groups.{name}.lr": f"{rate * lr / own:.3g}" for name, lr in groups.items()
    }
