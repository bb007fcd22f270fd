"""python -m exp.evaluate run=DIR [weights=best] [stage=test] [overrides]: evaluate the saved weights of a run."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, cast

from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

if TYPE_CHECKING:
    from exp.saved_runs.evaluation import Evaluated

HELP = """Evaluate the weights that a run saved, on a split of its data or of other data.

  python -m exp.evaluate run=outputs/train/2026-01-31/12-00-00
  python -m exp.evaluate run=DIR weights=last stage=val
  python -m exp.evaluate run=DIR data.dataset.path=new.csv stage=all
  python -m exp.evaluate run=DIR strategy=ddp launch.devices=2

  run=DIR          a run directory, the directory of a job of a sweep, or a checkpoint
  weights=WORD     best, last, or the path of a checkpoint; default: best, or last if there is no best
  stage=WORD       test (default), val, or all: the whole data set, for new data
  security.allow=[PACKAGE]   a package whose classes the run's config may name

Other arguments change the run's command. Metrics are printed, and saved in outputs/<name>/evaluations/."""


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Evaluate the saved weights of a run, and print the metrics.

    Returns:
        Exit status: 0; 2 if the command or the config has errors; 1 if the evaluation fails.
    """
    from exp.cli.run_arguments import RUN, WEIGHTS, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.evaluate")
    arguments = read_arguments(argv, keys={"run": RUN, "weights": WEIGHTS, "stage": ("test", "val", "all")})
    # torch is imported after parsing, so that errors of the command are reported at once.
    with pause_garbage_collection():
        from exp.run_report import print_report
        from exp.saved_runs.saved_run import load

    with survive_output_errors():
        run = load(str(arguments.values["run"]), allow=arguments.allow)
        stage = cast("Evaluated", arguments.values["stage"] or "test")
        report = run.evaluate(stage=stage, weights=arguments.values["weights"], overrides=arguments.overrides)
        print_report(report)
    return 0 if report.status == "completed" else 1
