"""The command python -m exp.export run=DIR [weights=best] [output=FILE].

It writes the network of a saved run as an ONNX file.
"""

from __future__ import annotations

from collections.abc import Sequence

from exp.lighter_imports import pause_garbage_collection
from exp.output import command, survive_output_errors

HELP = """Export the network of a saved run as an ONNX file, and compare the file with the network.

  python -m exp.export run=outputs/train/2026-01-31/12-00-00
  python -m exp.export run=DIR weights=last output=network.onnx

  run=DIR              a run directory, the directory of a sweep's job, or a checkpoint
  weights=WORD         best, last, or the path of a checkpoint; default: the best, else the last
  output=FILE          default: network.onnx in exports/ of the run
  security.allow=[PACKAGE]   packages whose classes the run's config may name; allow only packages that you trust"""


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Run the command: export the network of a run, and print a description of the file.

    Args:
        argv: Arguments of the command.

    Returns:
        Exit status 0. Errors set the exit status 2 for an error in the command or the config, and 1 if the network
        cannot be exported.
    """
    from exp.cli.run_arguments import RUN, WEIGHTS, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.export")
    keys = {"run": RUN, "output": "a file", "weights": WEIGHTS}
    arguments = read_arguments(argv, keys=keys, takes_overrides=False)
    values = arguments.values
    # Errors of the command are reported before torch is imported.
    with pause_garbage_collection():
        from exp.extras.export.network_export import export
        from exp.saved_runs.saved_run import load

    with survive_output_errors():
        run = load(str(values["run"]), allow=arguments.allow)
        print(export(run, output=values["output"], weights=values["weights"]))
    return 0
