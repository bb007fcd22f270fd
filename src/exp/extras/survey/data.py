"""python -m exp.data [flags] [overrides]: what the network is about to see. Builds the data, and trains nothing."""

from __future__ import annotations

import argparse
import json
import os
import re
import shlex
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from exp.errors import ConfigError, Fault, RunError
from exp.output import exit_status, loading_torch, outliving_output, unwritable

if TYPE_CHECKING:
    import numpy as np
    from torch import Tensor

    from exp.check.plan import Resolved
    from exp.data.data import Data
    from exp.extras.survey.survey import PartSurvey, Survey

PROGRAM = "python -m exp.data"
# For which the loader's speed is measured.
SECONDS = 1.0
# The name of a run directory: its date and its time.
RUN = re.compile(r"\d{4}-\d\d-\d\d/\d\d-\d\d-\d\d")
# A picture's longer side, in pixels; of larger ones each shows the mean of several.
SIDE = 256
# Classes that are drawn.
BARS = 200


def main(argv: Sequence[str] | None = None, *, seconds: float = SECONDS) -> int:
    """Looks at the data that `python -m exp.train` with the same command line would train on, and writes what it saw.

    seconds: how long the speed of the loader is measured.
    Returns: 0 where all of it could be read, whatever it is like; 1 where a sample or a file could not; 2 after a list
    of faults in the config; 130 after a Ctrl-C, with nothing written.
    """
    return exit_status(lambda: _command(sys.argv[1:] if argv is None else argv, seconds))


def _command(argv: Sequence[str], seconds: float) -> int:
    # Hydra comes in here, and what else takes longer than a Ctrl-C: main answers that.
    from exp.config.command import answer_question, is_question, parse_arguments

    arguments = parse_arguments(argv, program=PROGRAM)
    if is_question(arguments):
        answer_question(arguments)
        return 0
    if arguments.multirun:
        fault = Fault(
            key="--multirun", got="several configs", expected="one: what their networks see, they see one by one"
        )
        raise ConfigError([fault])
    resolved = _resolved(arguments)
    with outliving_output():
        data = _built(resolved)
        targets = sorted(_targets(resolved.plain))
        found = _looked_at(data, targets, count=arguments.samples, seconds=seconds)
        directory = _written(resolved, data, found, command=f"{PROGRAM} {shlex.join(argv)}".rstrip())
        print((directory / "data.md").read_text(encoding="utf-8"))
        shown = os.path.relpath(directory)
        print(f"results    {shown}")
        if (directory / "tensorboard").is_dir():
            print(f"dashboard  python -m exp.dashboard {shlex.quote(shown)}")
    return 0


def _resolved(arguments: argparse.Namespace) -> Resolved:
    """The config without faults, but for those of a network that does not fit: nothing of it is built.

    Raises: ConfigError.
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
        expected="exp.data.data.Data: what is looked at is each sample of a part, once",
        cure="Name its data sets in data.train, data.val and data.test of a YAML in conf/data",
    )
    raise ConfigError(located(resolved.config, [fault]))


def _targets(plain: Mapping[str, Any]) -> set[str]:
    """The entries of a batch that are targets: `target`, and whatever terms and metrics call theirs."""
    from exp.data.entries import TARGET

    nodes = [node for group in ("objective", "metrics") for node in plain[group].values() if isinstance(node, dict)]
    return {TARGET, *(name for node in nodes if isinstance(name := node.get("target"), str))}


def _looked_at(data: Data, targets: Sequence[str], *, count: int | None, seconds: float) -> Survey:
    """count: of samples in each part; None for all."""
    from exp.extras.survey.survey import survey

    if not sys.stderr.isatty():
        return survey(data, count=count or sys.maxsize, targets=targets, seconds=seconds)
    try:
        return survey(data, count=count or sys.maxsize, targets=targets, seconds=seconds, tell=_teller())
    finally:
        print("\r\033[K", end="", file=sys.stderr, flush=True)


def _teller() -> Callable[[str], None]:
    """What writes into one line of a terminal, a few times a second."""
    last = 0.0

    def tell(text: str) -> None:
        nonlocal last
        if time.monotonic() - last > 0.2:
            last = time.monotonic()
            print(f"\r\033[K{text}", end="", file=sys.stderr, flush=True)

    return tell


def _written(resolved: Resolved, data: Data, found: Survey, *, command: str) -> Path:
    """Writes data.md, data.json, pictures and TensorBoard's events. Returns: their directory, a new one.

    Raises: RunError where it cannot be made or written.
    """
    from exp.config.freeze import COMPOSITION, make_exclusively
    from exp.extras.survey.survey_text import findings, markdown, plain
    from exp.files import write_whole
    from exp.hooks.panels import png

    told = findings(found, origins=_origins(data, found), classes=_class_counts(data, found), notes=data.notes)
    text = markdown(found, command=command, findings=told)
    sheets = dict(_sheets(data, found))
    content = json.dumps(plain(found, command=command, findings=told), indent=2, allow_nan=False, default=str)
    wanted = _directory(Path(resolved.config[COMPOSITION].directory))
    try:
        directory = make_exclusively(wanted)
        write_whole(directory / "data.md", text)
        write_whole(directory / "data.json", content + "\n")
        for name, sheet in sheets.items():
            write_whole(directory / f"{name.replace('/', '_')}.png", png(sheet))
    except OSError as error:
        raise RunError(
            f"the results cannot be written to {unwritable(wanted, error)}, or choose another place with "
            "hydra.run.dir=outputs/elsewhere"
        ) from error
    if any(node.get("_target_") == TENSORBOARD for node in resolved.plain["logger"].values()):
        _show(directory, text, sheets)
    return directory


TENSORBOARD = "exp.tensorboard.logger.TensorBoardLogger"


def _show(directory: Path, text: str, sheets: Mapping[str, np.ndarray]) -> None:
    """Writes the text and the pictures where TensorBoard finds them."""
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
    """Beside the runs of the same name: outputs/<name>/data/<date>/<time>; one that was chosen is taken as it is."""
    date, moment = run.parts[-2:]
    return run.parents[1] / "data" / date / moment if RUN.fullmatch(f"{date}/{moment}") else run


def _origins(data: Data, found: Survey) -> dict[tuple[Any, int], str]:
    """Where the samples come from that are told first of those that are the same."""
    from exp.data.in_memory import origin

    places = [(one.part, one.pairs[0][0]) for one in (*found.leaks, *found.duplicates)]
    places += [(one.within, one.pairs[0][1]) for one in (*found.leaks, *found.duplicates)]
    named = {(stage, index): origin(data.part(stage), index) for stage, index in places}
    return {place: text for place, text in named.items() if text is not None}


def _class_counts(data: Data, found: Survey) -> dict[str, int]:
    """How many classes there are, by target, where that is known."""
    from exp.data.entries import TARGET

    counts = {name: len(one.names) for part in found.parts.values() for name, one in part.classes.items() if one.names}
    return {**({} if data.spec.num_classes is None else {TARGET: data.spec.num_classes}), **counts}


def _sheets(data: Data, found: Survey) -> Iterator[tuple[str, np.ndarray]]:
    """The pictures, by name: samples/<entry>/<part>, histograms/<entry>, classes/<target>."""
    from exp.hooks.small_multiples import class_shares, histograms

    for part in found.parts.values():
        for name, values in part.pictures.items():
            yield f"samples/{name}/{part.stage}", _grid(data, part, name, values)
    for name in dict.fromkeys(name for part in found.parts.values() for name in part.rows):
        rows: dict[str, np.ndarray] = {
            stage: part.rows[name].numpy() for stage, part in found.parts.items() if name in part.rows
        }
        width = min(own.shape[1] for own in rows.values())
        titles = [one.name or name for one in next(p for p in found.parts.values() if name in p.rows).numbers[name]]
        columns = {titles[place]: {stage: own[:, place] for stage, own in rows.items()} for place in range(width)}
        yield f"histograms/{name}", histograms(columns, title=f"{name}, each part with the same area")
    for name in dict.fromkeys(name for part in found.parts.values() for name in part.classes):
        own = {stage: part.classes[name] for stage, part in found.parts.items() if name in part.classes}
        labels = sorted(
            {label for one in own.values() for label in one.counts},
            key=lambda label: -max(one.counts.get(label, 0) / one.total for one in own.values() if one.total),
        )
        few = sorted(labels[:BARS])
        rest = f", the {BARS} most frequent of {len(labels):,}" if len(labels) > BARS else ""
        shares: dict[str, list[float]] = {
            stage: [one.counts.get(label, 0) / max(one.total, 1) for label in few] for stage, one in own.items()
        }
        named = [next(iter(own.values())).named(label) for label in few]
        yield f"classes/{name}", class_shares(shares, named, title=f"{name}, share of each part{rest}")


def _grid(data: Data, part: PartSurvey, name: str, values: Tensor) -> np.ndarray:
    """Some samples as pictures, each with its number and its targets."""
    from torch.nn.functional import avg_pool2d

    from exp.hooks.figures import Caption, captioned
    from exp.hooks.samples import coloured, pictures

    is_input = name == "input"
    pixels = pictures(values, mean=data.input_mean if is_input else None, std=data.input_std if is_input else None)
    factor = -(-max(pixels.shape[-2:]) // SIDE)
    if factor > 1:
        pixels = avg_pool2d(pixels.float(), factor, ceil_mode=True).round().to(pixels.dtype)
    captions = []
    for place, index in enumerate(part.shown[: len(pixels)]):
        targets = [f"{target} {_words(part, target, labels[place])}" for target, labels in part.labels.items()]
        captions.append(Caption(lines=[f"{part.stage} {index}", *targets]))
    title = f"{name} of {part.stage}, {len(captions)} of {part.seen:,} samples"
    return captioned(coloured(pixels), captions, title=title, columns=4)


def _words(part: PartSurvey, name: str, label: Tensor) -> str:
    """A target in a caption."""
    if label.numel() > 3:
        return str(list(label.shape))
    if name in part.classes and not label.dim():
        return part.classes[name].named(int(label))
    return " ".join(f"{number:.3g}" for number in label.reshape(-1).tolist())
