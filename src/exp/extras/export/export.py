"""python -m exp.export run=DIR format=onnx [weights=best] [output=FILE]: write a saved network for other programs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, cast

from exp.output import announce_torch_import, command, survive_output_errors

HELP = """Export the network of a saved run, and compare the file with the network.

  python -m exp.export run=outputs/train/2026-01-31/12-00-00
  python -m exp.export run=DIR format=torch_export weights=last output=network.pt2
  python -m exp.export run=DIR preprocessing=true

  run=DIR              a run directory, the directory of a sweep's job, or a checkpoint
  format=WORD          onnx (default) or torch_export
  weights=WORD         best, last, or the path of a checkpoint; default: the best, else the last
  output=FILE          default: network.onnx or network.pt2 in exports/ of the run
  preprocessing=true   the inputs are raw numbers: the graph standardizes them as the run's data does
  security.allow=[PACKAGE]   packages whose classes the run's config may name; allow only packages that you trust"""
SWITCH = ("true", "false")


@command(help=HELP)
def main(argv: Sequence[str]) -> int:
    """Export, and print what was written.

    Returns:
        0; 2 for an error in the command or the config; 1 if the network cannot be exported.
    """
    from exp.cli.run_arguments import RUN, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.export")
    keys = {"run": RUN, "format": ("onnx", "torch_export"), "output": "a file", **keys_of_a_run()}
    arguments = read_arguments(argv, keys=keys, takes_overrides=False)
    values = arguments.values
    # Errors of the command are reported before torch is imported.
    with announce_torch_import():
        from exp.extras.export.network_export import Format, export
        from exp.saved_runs.saved_run import load

    with survive_output_errors():
        run = load(str(values["run"]), allow=arguments.allow)
        format = cast(Format, values["format"] or "onnx")
        print(export(run, format=format, output=values["output"], **options_of_a_run(values)))
    return 0


def keys_of_a_run() -> dict[str, str | tuple[str, ...]]:
    """Return the keys that exp.serve, which exports first, takes too."""
    from exp.cli.run_arguments import WEIGHTS

    return {"weights": WEIGHTS, "preprocessing": SWITCH}


def options_of_a_run(values: Mapping[str, str | None]) -> dict[str, Any]:
    """Return the arguments of `network_export.export` for the typed values of `keys_of_a_run`."""
    return {"weights": values["weights"], "preprocessing": values["preprocessing"] == "true"}
