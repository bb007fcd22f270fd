"""Reader of scalars in event files. Incomplete or damaged files raise no error."""

from __future__ import annotations

import fnmatch
import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_ndarray

from exp.tensorboard.event_records import EVENTS, read_records


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Values of one tag of one run.

    Attributes:
        steps: Optimizer steps in increasing order, int64 `[N]`.
        values: Values, float64 `[N]`. They may be nan or infinite.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves in a directory.

    Attributes:
        by_tag: Requested curves that exist, by tag.
        problems: A text for each file or event that cannot be read.
    """

    by_tag: dict[str, Curve] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_curves(directory: Path, *, wants: Callable[[str], bool]) -> Curves:
    """Return the scalars in a run's event files. Events that cannot be read are skipped and reported.

    If the directory does not exist, there are no curves. Files are read in the order of their names. If a session
    starts at a step, earlier values of this and later steps are dropped, as TensorBoard does for a resumed run. If a
    step has two values, the later one counts.

    Args:
        directory: Directory with the event files.
        wants: Function that returns whether to read the curve of a tag.
    """
    points, problems = _Points(wants=wants), []
    try:
        paths = event_files(directory)
    except FileNotFoundError:
        return Curves()
    except OSError as error:
        return Curves(problems=[f"{directory.name} cannot be read: {error.strerror or error}"])
    for path in paths:
        try:
            with path.open("rb") as file:
                problems += [f"{path.name} {problem}" for problem in _read(file, points)]
        except OSError as error:
            problems.append(f"{path.name} cannot be read: {error.strerror or error}")
    return Curves(by_tag={tag: _curve(found) for tag, found in points.by_tag.items() if found}, problems=problems)


def event_files(directory: Path) -> list[Path]:
    """Return the event files in the order in which they are read.

    Raises:
        OSError: The directory cannot be listed.
    """
    return [directory / name for name in sorted(os.listdir(directory)) if fnmatch.fnmatchcase(name, EVENTS)]


def _curve(found: dict[int, float]) -> Curve:
    steps = sorted(found)
    return Curve(steps=np.array(steps, np.int64), values=np.array([found[step] for step in steps], np.float64))


class _Points:
    """Values by tag and step."""

    def __init__(self, *, wants: Callable[[str], bool]) -> None:
        self.by_tag: dict[str, dict[int, float]] = {}
        self._wants = wants

    def add(self, event: Event) -> None:
        """Add the scalars of an event. Raise TypeError or ValueError for a damaged tensor."""
        if event.session_log.status == SessionLog.START:
            for tag, found in self.by_tag.items():
                self.by_tag[tag] = {at: value for at, value in found.items() if at < event.step}
        for value in event.summary.value:
            scalar = _scalar(value) if self._wants(value.tag) else None
            if scalar is not None:
                self.by_tag.setdefault(value.tag, {})[event.step] = scalar


def _scalar(value: Summary.Value) -> float | None:
    """Return the number in a summary value; None for other content, such as a text or a picture."""
    if value.HasField("simple_value"):
        return float(value.simple_value)
    if not value.HasField("tensor"):
        return None
    tensor = make_ndarray(value.tensor)
    return float(tensor) if tensor.ndim == 0 and tensor.dtype.kind in "fi" else None


def _read(file: BinaryIO, points: _Points) -> Iterator[str]:
    """Add the events of a file to `points`, and yield the problems of the file."""
    count = damaged = 0
    try:
        for count, content in enumerate(read_records(file), start=1):  # noqa: B007
            try:
                points.add(Event.FromString(content))
            except (DecodeError, TypeError, ValueError):
                damaged += 1
        if not count:
            yield "is empty"
    except EOFError:
        yield "ends within an event: it is still being written, or was cut off"
    if damaged:
        yield f"holds {damaged} damaged event{'s' if damaged > 1 else ''}, left out"
