"""python -m exp.export run=DIR format=onnx [weights=best] [output=FILE]: a saved network for other programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from typing import Any, cast

from exp.errors import ConfigError, Fault
from exp.output import exit_status, loading_torch, outliving_output
from exp.spelling import among

HELP = """Export the network of a saved run, check the file against it, and say how large and how fast it is.

  python -m exp.export run=outputs/train/2026-01-31/12-00-00
  python -m exp.export run=DIR format=torch_export weights=last output=network.pt2
  python -m exp.export run=DIR preprocessing=true quantize=int8
  python -m exp.export run=DIR 'dynamic={input: {1: time}}'

  run=DIR              a run directory, a job's in a sweep's directory, or a checkpoint
  format=WORD          onnx (the default), torch_export, state_dict or safetensors
  weights=WORD         best, last, or a checkpoint's path; left out: the best, else the last
  averaged=false       of a run with an average of its weights: those that were trained
  output=FILE          left out: network.onnx, .pt2, .pt or .safetensors in the run's exports/
  preprocessing=true   raw numbers go in: the graph standardises them as the run's data did
  quantize=int8        8-bit weights, with the run's metrics before and after
  dynamic={INPUT: {AXIS: NAME}}   further dimensions that may change; the batch always may
  security.allow=[PACKAGE]   whose classes the run's config may name: trust it first"""
SWITCH = ("true", "false")
# What exp.serve takes, too, which exports first: the words that each may be, or none where they are not few.
OF_A_RUN: Mapping[str, Sequence[str]] = {
    "weights": (), "averaged": SWITCH, "preprocessing": SWITCH, "quantize": ("int8",),
}  # fmt: skip
FORMATS = ("onnx", "torch_export", "state_dict", "safetensors")


def main(argv: Sequence[str] | None = None) -> int:
    """Export, and print what was written.

    Returns: 0; 2 for a fault in the command or the config; 1 where the network cannot be exported.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    if {"-h", "--help"} & set(argv):
        print(HELP)
        return 0
    from exp.cli.run_arguments import RUN, read_arguments
    from exp.cli.train import refuse_ranks

    refuse_ranks("exp.export")
    own = {"format": among(FORMATS), "output": "a file", "dynamic": "{INPUT: {AXIS: NAME}}"}
    keys, words = {"run": RUN, **own, **keys_of_a_run()}, {"format": FORMATS, **words_of_a_run()}
    arguments = read_arguments(argv, keys=keys, words=words, takes_overrides=False)
    values = arguments.values
    dynamic = read_dimensions(values["dynamic"])
    # torch comes in here, behind every fault of the command.
    with loading_torch():
        from exp.extras.export.network_export import Format, export
        from exp.saved_runs.saved_run import load

    with outliving_output():
        run = load(str(values["run"]), allow=arguments.allow)
        exported = export(
            run,
            format=cast(Format, values["format"] or "onnx"),
            output=values["output"],
            dynamic=dynamic,
            **options_of_a_run(values),
        )
        print(exported)
    return 0


def keys_of_a_run() -> dict[str, str]:
    """What each of OF_A_RUN must be, in words."""
    from exp.cli.run_arguments import WEIGHTS

    return {name: among(words) if words else WEIGHTS for name, words in OF_A_RUN.items()}


def words_of_a_run() -> dict[str, Sequence[str]]:
    """The words that each of OF_A_RUN may be, where these are few."""
    return {name: words for name, words in OF_A_RUN.items() if words}


def options_of_a_run(values: Mapping[str, str | None]) -> dict[str, Any]:
    """What `exp.extras.export.network_export.export` is given of OF_A_RUN, as it was typed."""
    return {
        "weights": values["weights"],
        "averaged": values["averaged"] != "false",
        "preprocessing": values["preprocessing"] == "true",
        "quantize": values["quantize"],
    }


def read_dimensions(text: str | None) -> Mapping[str, Mapping[int, str]]:
    """The names of dimensions by input and axis, as they are typed: {input: {1: time}}.

    Raises: ConfigError for anything else.
    """
    if text is None:
        return {}
    from hydra.errors import HydraException

    from exp.config.hydra_adapter import parse_override

    value: object
    try:
        value = parse_override(f"dynamic={text}").value()
    except (HydraException, RecursionError):
        value = None
    is_mapping = isinstance(value, dict) and all(isinstance(axes, dict) for axes in value.values())
    found = {str(name): dict(axes) for name, axes in value.items()} if is_mapping and isinstance(value, dict) else {}
    names = [(axis, name) for axes in found.values() for axis, name in axes.items()]
    if not names or not all(type(axis) is int and str(name).isidentifier() for axis, name in names):
        expected = "names of dimensions by input and axis, such as {input: {1: time}}"
        raise ConfigError([Fault(key="dynamic", got=text, expected=expected, source="command line")])
    return {name: {axis: str(one) for axis, one in axes.items()} for name, axes in found.items()}
