"""The command python -m exp.data [flags] [overrides], which shows statistics of the data without training.

It also reports leaks: samples that occur in several splits.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

from exp.errors import ConfigError, RunError, config_error, not_supported_with
from exp.lighter_imports import pause_garbage_collection
from exp.output import command, describe_write_error, survive_output_errors

if TYPE_CHECKING:
    from exp.check.plan import Resolved
    from exp.data.data import Data
    from exp.extras.survey.survey import Survey

PROGRAM = "python -m exp.data"
# Maximum number of pairs of equal samples that data.json lists for two splits.
MOST_PAIRS = 100
# Matches the last two parts of the path of a run directory: date and time.
RUN = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")


@command()
def main(argv: Sequence[str]) -> int:
    """Run the command: read the data that `python -m exp.train` uses with the same arguments, and write the results.

    Args:
        argv: Arguments of the command.

    Returns:
        Exit status 0. Errors set the exit status 2 for an error in the config, and 1 if a sample cannot be read or a
        file cannot be written. Ctrl-C sets the exit status 130. No results are written in these cases.
    """
    # The import is in the function, so that Ctrl-C during the import of Hydra is handled.
    from exp.cli.command_line import answer_question, parse_arguments

    arguments = parse_arguments(argv, program=PROGRAM)
    if answer_question(arguments):
        return 0
    if arguments.multirun:
        raise config_error("--multirun", got="several configs", expected="one config", fix="Leave -m out")
    resolved = _resolve_config(arguments)
    with survive_output_errors():
        data = _build(resolved)
        from exp.data.entries import TARGET
        from exp.extras.survey.survey import survey

        # The targets are the values of a batch that objective terms and metrics use as targets.
        nodes = [
            node for group in ("objective", "metrics") for node in getattr(resolved.settings, group).values() if node
        ]
        targets = sorted({TARGET, *(name for node in nodes if isinstance(name := node.get("target"), str))})
        found = survey(data, count=arguments.samples or sys.maxsize, targets=targets)
        directory = _write(resolved, data, found, command=f"{PROGRAM} {shlex.join(argv)}".rstrip())
        print((directory / "data.md").read_text(encoding="utf-8"))
        print(f"results    {os.path.relpath(directory)}")
    return 0


def _resolve_config(arguments: argparse.Namespace) -> Resolved:
    """Return the config after its checks. The network is neither built nor checked.

    Args:
        arguments: The parsed arguments of the command.

    Raises:
        ConfigError: The config has errors.
    """
    from exp.check.stages import compose, refuse_early

    config = compose(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    refuse_early(config)
    with pause_garbage_collection():
        from exp.check.resolution import resolve
        from exp.check.stages import locate_errors, unique_errors

    resolved = resolve(config)
    if resolved.errors:
        raise ConfigError(locate_errors(resolved.config, unique_errors(resolved.errors)))
    for note in resolved.notes:
        print(note, file=sys.stderr)
    return resolved


def _build(resolved: Resolved) -> Data:
    from exp.check.stages import locate_errors
    from exp.construct import build_data
    from exp.data.data import Data

    try:
        data: object = build_data(resolved.settings, keeps_raw=True)
    except ConfigError as error:
        raise ConfigError(locate_errors(resolved.config, error.errors)) from error
    if isinstance(data, Data):
        return data
    expected = "exp.data.data.Data, which has samples: the loaders of other classes have only batches"
    fix = "Name its data sets in data.train, data.val and data.test of a YAML in conf/data"
    detail = not_supported_with("data._target_", str(resolved.settings.data["_target_"]), "exp.data", expected, fix)
    raise ConfigError(locate_errors(resolved.config, [detail]))


def _write(resolved: Resolved, data: Data, found: Survey, *, command: str) -> Path:
    """Write data.md and data.json to a new directory.

    Args:
        resolved: The config.
        data: The data.
        found: The survey of the data.
        command: The command line, which is written to the files.

    Returns:
        The path of the directory: outputs/<name>/data/<date>/<time>, or the value of hydra.run.dir.

    Raises:
        RunError: The directory cannot be created or written.
    """
    from exp.config.freeze import make_exclusively
    from exp.config.frozen import COMPOSITION
    from exp.extras.survey.read_once import origin
    from exp.extras.survey.survey_text import findings, markdown
    from exp.files import write_atomic

    lines = findings(found, origin=lambda stage, index: origin(data.part(stage), index), notes=data.notes)
    repeats = [
        {"part": part, "within": within, "count": len(pairs), "pairs": pairs[:MOST_PAIRS]}
        for (part, within), pairs in found.repeats.items()
    ]
    content = {
        "command": command,
        "findings": lines,
        "parts": {stage: asdict(part) for stage, part in found.parts.items()},
        "leaks": [one for one in repeats if one["part"] != one["within"]],
        "repeated": [one for one in repeats if one["part"] == one["within"]],
    }
    wanted = Path(resolved.config[COMPOSITION].directory)
    if RUN.fullmatch("/".join(wanted.parts[-2:])):
        wanted = wanted.parents[1].joinpath("data", *wanted.parts[-2:])
    try:
        directory = make_exclusively(wanted)
        write_atomic(directory / "data.md", markdown(found, command=command, findings=lines))
        write_atomic(directory / "data.json", json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")
    except OSError as error:
        elsewhere = "or choose another place with hydra.run.dir=outputs/elsewhere"
        raise RunError(
            f"the results cannot be written to {describe_write_error(wanted, error)}, {elsewhere}"
        ) from error
    return directory
