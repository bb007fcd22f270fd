"""python -m exp.predict run=DIR input=FILE output=FILE [weights=best] [overrides]: predict with a trained network."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

HELP = """Predict with the weights that a run saved.

  python -m exp.predict run=outputs/train/2026-01-31/12-00-00 input=new.csv output=answers.csv
  python -m exp.predict run=DIR input=photos/ output=answers.jsonl
  python -m exp.predict run=DIR input=arrays.npz output=answers.npz weights=last
  python -m exp.predict run=DIR input=new.csv output=answers.csv strategy=ddp launch.devices=2

  run=DIR          a run directory, the directory of a job of a sweep, or a checkpoint
  input=PATH       .csv, .parquet, .jsonl, .npz or .npy; for pictures a folder, a picture or a CSV of paths
  output=FILE      .npz, .csv or .jsonl
  weights=WORD     best, last, or the path of a checkpoint; default: best, or last if there is no best
  security.allow=[PACKAGE]   a package whose classes the run's config may name

The input is standardized, encoded and transformed as in training; classes have the names of training.
Other arguments change the run's command, such as data.batch_size=512."""


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Predict with the saved weights of a run, and write the predictions to a file.

    Returns:
        Exit status: 0; 2 if the command, the config or the input has errors; 1 if the prediction fails.
    """
    from exp.cli.run_arguments import RUN, WEIGHTS, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.predict")
    keys = {
        "run": RUN,
        "input": "a file or a folder of samples",
        "output": "a file in .npz, .csv or .jsonl",
        "weights": WEIGHTS,
    }
    arguments = read_arguments(argv, keys=keys, needed=("run", "input", "output"))
    given, output = Path(str(arguments.values["input"])), Path(str(arguments.values["output"]))
    # torch is imported after parsing, so that errors of the command are reported at once.
    with pause_garbage_collection():
        from exp.cli.prediction_files import refuse_place, write_predictions
        from exp.saved_runs.prediction import predict
        from exp.saved_runs.saved_run import load

    refuse_place(output, given=given)
    with survive_output_errors():
        run = load(str(arguments.values["run"]), allow=arguments.allow)
        run.refuse_own_file(output, weights=arguments.values["weights"])
        weights, overrides = arguments.values["weights"], arguments.overrides
        found = predict(run, given, weights=weights, overrides=overrides, is_shown=True)
        write_predictions(found, output)
        print(f"{len(found)} samples of {given} predicted: {output}")
    return 0
