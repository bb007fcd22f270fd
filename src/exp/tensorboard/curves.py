"""Curves out of event files, without tensorboard and without a failure: what is torn or damaged is left out, and told.

An event file is a list of records: length as uint64, its checksum, the bytes, their checksum. The bytes are a protocol
buffer, Event, of which only the parts that hold a scalar are looked at. A running run may have written half a record.
"""

from __future__ import annotations

import fnmatch
import os
import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import BinaryIO

import numpy as np

PATTERN = "events.out.tfevents.*"
# Wire types of protocol buffers: https://protobuf.dev/programming-guides/encoding
_VARINT, _FIXED64, _BYTES, _FIXED32 = 0, 1, 2, 5
# Fields of Event, SessionLog, Summary, Summary.Value and TensorProto, by tensorboard's own .proto files.
_STEP, _SUMMARY, _SESSION_LOG = 2, 5, 7
_STATUS, _START = 1, 1
_VALUE = 1
_TAG, _SIMPLE_VALUE, _TENSOR = 1, 2, 8
_VALUE_KEY, _TAG_KEY = _VALUE << 3 | _BYTES, _TAG << 3 | _BYTES
_DTYPE, _CONTENT = 1, 4
# By TensorProto's number of a dtype: how its bytes are read, and the field that holds a number of it by itself.
_NUMBERS = {1: ("<f", 5), 2: ("<d", 6), 3: ("<i", 7), 9: ("<q", 10)}
_DAMAGE = (ValueError, IndexError, struct.error)


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """One tag of one run: a value a step, by rising step.

    steps: of the optimizer, int64 `[N]`. values: float64 `[N]`; some may be nan or infinite.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Curves:
    """by_tag: those that were asked for and are there. problems: what could not be read, a line each."""

    by_tag: dict[str, Curve] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_curves(directory: Path, *, wants: Callable[[str], bool]) -> Curves:
    """The scalars of a run's event files, as far as they can be read; nothing of a directory that is not there.

    Files are read by the order of their names, and a session that starts at a step voids what earlier ones have from
    there on: so TensorBoard shows a run that was resumed. Of two values at one step the later holds.

    wants: whether the curve of a tag is read.
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
    """In the order in which they are read. Raises: OSError where the directory cannot be looked into."""
    return [directory / name for name in sorted(os.listdir(directory)) if fnmatch.fnmatchcase(name, PATTERN)]


def _curve(found: dict[int, float]) -> Curve:
    steps = sorted(found)
    return Curve(steps=np.array(steps, np.int64), values=np.array([found[step] for step in steps], np.float64))


class _Points:
    """The values of each tag by step, as event after event brings them."""

    def __init__(self, *, wants: Callable[[str], bool]) -> None:
        self.by_tag: dict[str, dict[int, float]] = {}
        self._wants = wants
        # None of a tag that nobody wants, so that its name is decoded once.
        self._known: dict[bytes, str | None] = {}

    def add(self, event: bytes) -> None:
        """Raises: one of _DAMAGE."""
        step, summaries = 0, []
        for number, value in _fields(event):
            if number == _STEP and isinstance(value, int):
                step = value - (1 << 64) if value >> 63 else value
            elif number == _SUMMARY and isinstance(value, bytes):
                summaries.append(value)
            elif number == _SESSION_LOG and isinstance(value, bytes) and (_STATUS, _START) in _fields(value):
                self._void(step)
        for summary in summaries:
            self._add_summary(step, summary)

    def _add_summary(self, step: int, summary: bytes) -> None:
        """Most values are not wanted, and passed over by their tag, which every writer has first."""
        at, end, known = 0, len(summary), self._known
        while at < end:
            if summary[at] != _VALUE_KEY:
                raise ValueError("a summary holds values alone")
            size, at = summary[at + 1], at + 2
            if size > 127:
                size, at = _varint(summary, at - 1)
            if at + size > end:
                raise ValueError("a value ends behind its summary")
            is_short = size > 1 and summary[at] == _TAG_KEY and summary[at + 1] < 128
            name = summary[at + 2 : at + 2 + summary[at + 1]] if is_short else b""
            if name not in known or known[name] is not None:
                self._add_value(step, summary[at : at + size])
            at += size

    def _void(self, step: int) -> None:
        for tag, found in self.by_tag.items():
            self.by_tag[tag] = {at: value for at, value in found.items() if at < step}

    def _add_value(self, step: int, value: bytes) -> None:
        tag: str | None = None
        scalar: float | None = None
        for number, part in _fields(value):
            if number == _TAG and isinstance(part, bytes):
                tag = self._tag(part)
            elif number == _SIMPLE_VALUE and isinstance(part, bytes):
                (scalar,) = struct.unpack("<f", part)
            elif number == _TENSOR and isinstance(part, bytes):
                scalar = _scalar(part)
        if tag is not None and scalar is not None:
            self.by_tag.setdefault(tag, {})[step] = scalar

    def _tag(self, name: bytes) -> str | None:
        if name not in self._known:
            tag = name.decode()
            self._known[name] = tag if self._wants(tag) else None
        return self._known[name]


def _read(file: BinaryIO, points: _Points) -> Iterator[str]:
    """Feed the events of a file to `points`. Yields what is wrong with it."""
    left = os.fstat(file.fileno()).st_size
    if not left:
        yield "is empty"
    damaged = 0
    while left:
        head = file.read(12)
        length = int.from_bytes(head[:8], "little")
        left -= 12 + length + 4
        event = file.read(length) if left >= 0 else b""
        if left < 0 or len(head) < 12 or len(event) < length:
            yield "ends within an event: it is still being written, or was cut off"
            break
        file.read(4)
        try:
            points.add(event)
        except _DAMAGE:
            damaged += 1
    if damaged:
        yield f"holds {damaged} damaged event{'s' if damaged > 1 else ''}, left out"


def _scalar(tensor: bytes) -> float | None:
    """The number that a 0-d tensor holds; None of any other tensor, such as a text."""
    fields = dict(_fields(tensor))
    form, place = _NUMBERS.get(_as_int(fields.get(_DTYPE)), ("", 0))
    content = fields.get(_CONTENT)
    if not form:
        return None
    if isinstance(content, bytes) and content:
        return float(struct.unpack(form, content)[0]) if len(content) == struct.calcsize(form) else None
    single = fields.get(place)
    if isinstance(single, bytes) and form in ("<f", "<d"):
        return float(struct.unpack(form, single)[0]) if len(single) == struct.calcsize(form) else None
    if isinstance(single, bytes):
        single = _varint(single, 0)[0]
    if single is None:
        return None
    return float(single - (1 << 64) if single >> 63 else single)


def _as_int(value: int | bytes | None) -> int:
    return value if isinstance(value, int) else -1


def _fields(message: bytes) -> Iterator[tuple[int, int | bytes]]:
    """The fields of a message by number: an int of a varint, else bytes.

    Raises: ValueError or IndexError where it is none.
    """
    at, end = 0, len(message)
    while at < end:
        key, at = _varint(message, at)
        wire = key & 7
        if wire == _VARINT:
            value, at = _varint(message, at)
            yield key >> 3, value
            continue
        if wire == _BYTES:
            size, at = _varint(message, at)
        elif wire in (_FIXED32, _FIXED64):
            size = 4 if wire == _FIXED32 else 8
        else:
            raise ValueError(f"no wire type of a message: {wire}")
        if at + size > end:
            raise ValueError("a field ends behind its message")
        yield key >> 3, message[at : at + size]
        at += size


def _varint(message: bytes, at: int) -> tuple[int, int]:
    """The number that begins at a place, seven bits a byte, and the place behind it."""
    byte = message[at]
    if byte < 128:
        return byte, at + 1
    value = shift = 0
    while byte >= 128:
        value |= (byte & 127) << shift
        at, shift = at + 1, shift + 7
        byte = message[at]
        if shift > 63:
            raise ValueError("a number of more than 64 bits")
    return (value | byte << shift) & (1 << 64) - 1, at + 1
