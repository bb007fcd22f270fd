"""python -m exp.data [flags] [overrides]: shows the data that a network is about to see. Trains nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault, RunError, is_installed
from exp.output import exit_status, loading_torch, outliving_output, passing_line, unwritable

if TYPE_CHECKING:
    import numpy as np

    from exp.check.plan import Resolved
    from exp.data.data import Data
    from exp.extras.survey.survey import Survey

PROGRAM = "python -m exp.data"
# The name of a run directory: its date and its time.
RUN = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")
TENSORBOARD = "exp.tensorboard.logger.TensorBoardLogger"


def main(argv: Sequence[str] | None = None) -> int:
    """Look at the data that `python -m exp.train` with the same command line would train on, and write the results.

    Args:
        argv: The command line; None reads `sys.argv`.

    Returns:
        0 if all samples and files can be read; 1 if one cannot; 2 for errors in the config; 130 after Ctrl-C, with
        nothing written.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv))


def _command(argv: Sequence[str]) -> int:
    # Imported here because `main` answers a Ctrl-C during the import of Hydra.
    from exp.cli.command_line import answer_question, is_question, parse_arguments

    arguments = parse_arguments(argv, program=PROGRAM)
    if is_question(arguments):
        answer_question(arguments)
        return 0
    if arguments.multirun:
        raise ConfigError([Fault(key="--multirun", got="several configs", expected="one config", cure="Leave -m out")])
    resolved = _resolved(arguments)
    with outliving_output():
        data = _built(resolved)
        found = _looked_at(data, resolved.plain, count=arguments.samples)
        directory = _written(resolved, data, found, command=f"{PROGRAM} {shlex.join(argv)}".rstrip())
        print((directory / "data.md").read_text(encoding="utf-8"))
        shown = os.path.relpath(directory)
        print(f"results    {shown}")
        if (directory / "tensorboard").is_dir():
            print(f"dashboard  python -m exp.dashboard {shlex.quote(shown)}")
    return 0


def _resolved(arguments: argparse.Namespace) -> Resolved:
    """Return the checked config. The network is not built, and may not fit the data.

    Raises:
        ConfigError: The config has errors.
    """
    from exp.check.stages import compose, refuse_early

    config = compose(arguments.overrides, config_dir=arguments.config_dir, config_name=arguments.config_name)
    refuse_early(config)
    with loading_torch():
        from exp.check.plan import resolve
        from exp.check.stages import located, once

    resolved = resolve(config)
    if resolved.faults:
        raise ConfigError(located(resolved.config, once(resolved.faults)))
    for note in resolved.notes:
        print(note, file=sys.stderr)
    return resolved


def _built(resolved: Resolved) -> Data:
    from exp.check.stages import located
    from exp.construct import build_data
    from exp.data.data import Data

    try:
        data: object = build_data(resolved.plain, keeps_raw=True)
    except ConfigError as error:
        raise ConfigError(located(resolved.config, error.faults)) from error
    if isinstance(data, Data):
        return data
    fault = Fault(
        key="data._target_",
        got=f"{resolved.plain['data']['_target_']}, whose loaders give batches and know no samples",
        expected="exp.data.data.Data, which gives each sample of a part",
        cure="Name its data sets in data.train, data.val and data.test of a YAML in conf/data",
    )
    raise ConfigError(located(resolved.config, [fault]))


def _looked_at(data: Data, plain: Mapping[str, Any], *, count: int | None) -> Survey:
    """Return the survey of at most `count` samples of each part; None reads all."""
    from exp.data.entries import TARGET
    from exp.extras.survey.survey import survey

    # The entries of a batch that are targets, as objective terms and metrics name them.
    nodes = [node for group in ("objective", "metrics") for node in plain[group].values() if isinstance(node, dict)]
    targets = sorted({TARGET, *(name for node in nodes if isinstance(name := node.get("target"), str))})
    with passing_line("reading the data"):
        return survey(data, count=count or sys.maxsize, targets=targets)


def _written(resolved: Resolved, data: Data, found: Survey, *, command: str) -> Path:
    """Write data.md, data.json, pictures and TensorBoard's events to a new directory.

    Returns:
        The directory.

    Raises:
        RunError: The directory cannot be made or written.
    """
    from exp.config.freeze import COMPOSITION, make_exclusively
    from exp.data.entries import TARGET
    from exp.data.in_memory import origin
    from exp.extras.survey.survey_pictures import sheets
    from exp.extras.survey.survey_text import findings, markdown
    from exp.files import write_whole
    from exp.hooks.panels import png

    repeats = [*found.leaks, *found.duplicates]
    places = {(one.part, one.pairs[0][0]) for one in repeats} | {(one.within, one.pairs[0][1]) for one in repeats}
    origins = {place: text for place in places if (text := origin(data.part(place[0]), place[1])) is not None}
    classes = {} if data.spec.num_classes is None else {TARGET: data.spec.num_classes}
    for part in found.parts.values():
        classes |= {name: len(one.names) for name, one in part.classes.items() if one.names}
    lines = findings(found, origins=origins, classes=classes, notes=data.notes, rounded=data.rounded)
    text = markdown(found, command=command, findings=lines)
    content = {
        "command": command,
        "findings": lines,
        "parts": {stage: asdict(part) for stage, part in found.parts.items()},
        "leaks": [asdict(one) for one in found.leaks],
        "repeated": [asdict(one) for one in found.duplicates],
    }
    drawn = dict(sheets(data, found))
    if not is_installed("matplotlib"):
        print("no histograms and no shares of classes are drawn: pip install 'exp-framework[report]'", file=sys.stderr)
    wanted = _directory(Path(resolved.config[COMPOSITION].directory))
    try:
        directory = make_exclusively(wanted)
        write_whole(directory / "data.md", text)
        write_whole(directory / "data.json", json.dumps(content, indent=2, allow_nan=False, default=str) + "\n")
        for name, sheet in drawn.items():
            write_whole(directory / f"{name.replace('/', '_')}.png", png(sheet))
    except OSError as error:
        elsewhere = "or choose another place with hydra.run.dir=outputs/elsewhere"
        raise RunError(f"the results cannot be written to {unwritable(wanted, error)}, {elsewhere}") from error
    if any(node.get("_target_") == TENSORBOARD for node in resolved.plain["logger"].values()):
        _show(directory, text, drawn)
    return directory


def _show(directory: Path, text: str, sheets: Mapping[str, np.ndarray]) -> None:
    """Write the text and the pictures for TensorBoard."""
    import torch
    from tensorboard.compat.proto.event_pb2 import Event
    from tensorboard.compat.proto.summary_pb2 import Summary

    from exp.hooks.panels import Image, Text
    from exp.tensorboard.event_file import EventFile
    from exp.tensorboard.summaries import summary_value

    images = {f"data/{name}": Image(torch.from_numpy(sheet).permute(2, 0, 1)[None]) for name, sheet in sheets.items()}
    values = [summary_value(tag, panel) for tag, panel in {"data/report": Text(text), **images}.items()]
    file = EventFile(directory / "tensorboard")
    file.write([Event(wall_time=time.time(), summary=Summary(value=values))])
    file.close()


def _directory(run: Path) -> Path:
    """Return outputs/<name>/data/<date>/<time> for a run directory; another directory that a user chose as it is."""
    date, moment = run.parts[-2:]
    return run.parents[1] / "data" / date / moment if RUN.fullmatch(f"{date}/{moment}") else run
