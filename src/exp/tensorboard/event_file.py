"""Read and write TensorBoard's event files.

An event file is a sequence of records. A record consists of a length, the checksum of the length, the bytes of an
Event, and the checksum of these bytes. Numbers are little-endian.

`EventFile` appends lists of events, with one write per list. No thread is used, so errors are raised immediately.
tensorboard's own writer computes checksums byte by byte in Python. For an event with 8 values (280 bytes), this takes
40 us, ten times as long as encoding the event. This module computes checksums by NumPy in a sixth of that time.

`read_curves` reads scalars. It does not raise an error for incomplete or damaged files.
"""

from __future__ import annotations

import fnmatch
import os
import socket
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import IO, BinaryIO

import numpy as np
from google.protobuf.message import DecodeError
from tensorboard.compat.proto.event_pb2 import Event, SessionLog, SourceMetadata
from tensorboard.compat.proto.summary_pb2 import Summary
from tensorboard.util.tensor_util import make_ndarray

EVENTS = "events.out.tfevents.*"


class EventFile:
    """Event file for writing. The first write creates the file. A write after `close` appends to the same file.

    Args:
        directory: Directory of the file. The first write creates the directory if needed.
        suffix: End of the file name. Default: empty.
    """

    def __init__(self, directory: Path, *, suffix: str = "") -> None:
        self.directory = directory
        self.suffix = suffix
        self._path: Path | None = None
        self._file: IO[bytes] | None = None

    def write(self, events: Sequence[Event]) -> None:
        """Append events to the file in one write.

        Raises:
            OSError: The directory or the file cannot be written.
        """
        try:
            if self._file is None:
                self._open()
            self._append(events)
        except OSError:
            self.close()
            raise

    def close(self) -> None:
        """Close the file. The method may be called several times."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _open(self) -> None:
        if self._path is not None:
            self._file = self._path.open("ab", buffering=0)
            return
        self.directory.mkdir(parents=True, exist_ok=True)
        self._path = _next_path(self.directory, self.suffix)
        self._file = self._path.open("xb", buffering=0)
        first = Event(wall_time=time.time(), file_version="brain.Event:2", source_metadata=SourceMetadata(writer="exp"))
        self._append([first])

    def _append(self, events: Sequence[Event]) -> None:
        assert self._file is not None
        content = memoryview(encode_records([event.SerializeToString() for event in events]))
        while content:
            content = content[self._file.write(content) :]


def _next_path(directory: Path, suffix: str) -> Path:
    """Return the path of a new event file.

    The name sorts after the names of all existing files, because TensorBoard reads files in the order of their names.

    Args:
        directory: Directory of the event files.
        suffix: End of the file name.
    """
    earlier = [path.name.split(".")[3] for path in directory.glob(EVENTS)]
    stamp = max([int(time.time()), *(int(text) + 1 for text in earlier if text.isdecimal())])
    return directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0{suffix}"


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed (RFC 3720, appendix B.4)
_BLOCK = 1024


def encode_records(contents: Sequence[bytes]) -> bytes:
    """Return the bytes of one record for each content.

    A record consists of the length (uint64), the masked CRC of the length (uint32), the content, and the masked CRC of
    the content (uint32).

    Args:
        contents: Serialized events.
    """
    parts: list[bytes] = []
    for content in contents:
        parts += _header(len(content)), content, masked_crc32c(content)
    return b"".join(parts)


@cache
def _header(length: int) -> bytes:
    header = struct.pack("<Q", length)
    return header + masked_crc32c(header)


def masked_crc32c(content: bytes) -> bytes:
    """Return the CRC-32C (RFC 3720) of `content`, masked as TFRecord requires: a little-endian uint32.

    A CRC is linear: it is the exclusive or of one term per byte. A term depends on the byte's value and on the byte's
    distance from the end. The content is processed in blocks. The CRC of the previous blocks, initially all ones, is
    combined with the first four bytes of the next block.

    Args:
        content: At least four bytes. All events and lengths have at least four.
    """
    contributions, offsets = _contributions()
    register = 0xFFFFFFFF
    whole = np.frombuffer(content, np.uint8)
    blocks = [whole] if len(whole) <= _BLOCK else np.array_split(whole, len(whole) // _BLOCK + 1)
    for block in blocks:
        index = offsets[-len(block) :] + block
        index[:4] ^= np.frombuffer(struct.pack("<I", register), np.uint8)
        register = int(np.bitwise_xor.reduce(contributions.take(index)))
    check = register ^ 0xFFFFFFFF
    return struct.pack("<I", ((check >> 15 | check << 17) + 0xA282EAD8) & 0xFFFFFFFF)


@cache
def _contributions() -> tuple[np.ndarray, np.ndarray]:
    """Return two lookup arrays for the computation of a CRC.

    Returns:
        Terms, uint32. The term of byte b at distance d from the end has the index d * 256 + b.
        Offsets, int64: the numbers d * 256 for decreasing d.
    """
    first: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = first >> 1 ^ np.where(first & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = np.empty((_BLOCK, 256), np.uint32)
    table[0] = first
    for distance in range(1, _BLOCK):
        table[distance] = table[distance - 1] >> 8 ^ first[table[distance - 1] & 0xFF]
    return table.reshape(-1), np.arange(_BLOCK - 1, -1, -1, dtype=np.int64) * 256


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the content of each record in an event file. Checksums are not verified.

    Raises:
        EOFError: The last record is incomplete, because it is still being written or its writer was killed.
    """
    left = os.fstat(file.fileno()).st_size
    while left:
        head = file.read(12)
        length = int.from_bytes(head[:8], "little")
        left -= 12 + length + 4
        content = file.read(length) if left >= 0 else b""
        if left < 0 or len(head) < 12 or len(content) < length:
            raise EOFError
        file.read(4)
        yield content


@dataclass(frozen=True, kw_only=True, eq=False)
class Curve:
    """Scalars of one tag of one run.

    Attributes:
        steps: Optimizer steps in increasing order, int64 `[N]`.
        values: Scalar at each step, float64 `[N]`. Values may be nan or infinite.
    """

    steps: np.ndarray
    values: np.ndarray


@dataclass(frozen=True, kw_only=True)
class Curves:
    """Curves that were read from the event files in a directory.

    Attributes:
        by_tag: Curves by tag. Tags without values are missing.
        problems: Messages about files and events that cannot be read.
    """

    by_tag: dict[str, Curve] = field(default_factory=dict)
    problems: list[str] = field(default_factory=list)


def read_curves(directory: Path, *, wants: Callable[[str], bool]) -> Curves:
    """Return the scalars in a run's event files. Events that cannot be read are skipped and reported.

    If the directory does not exist, the result has no curves. Files are read in the order of their names. An event that
    a resumed run writes at its first step discards previous values of this step and of later steps, as in TensorBoard.
    If a step has two values, the last value is used.

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
    """Return the paths of the event files in a directory, sorted by name. TensorBoard reads them in this order.

    Raises:
        OSError: The directory cannot be listed.
    """
    return [directory / name for name in sorted(os.listdir(directory)) if fnmatch.fnmatchcase(name, EVENTS)]


def _curve(found: dict[int, float]) -> Curve:
    steps = sorted(found)
    return Curve(steps=np.array(steps, np.int64), values=np.array([found[step] for step in steps], np.float64))


class _Points:
    """Scalars by tag and step, collected from events.

    Args:
        wants: Function that returns whether to collect the scalars of a tag.
    """

    def __init__(self, *, wants: Callable[[str], bool]) -> None:
        self.by_tag: dict[str, dict[int, float]] = {}
        self._wants = wants

    def add(self, event: Event) -> None:
        """Add the scalars of an event.

        Raises:
            TypeError, ValueError: The event contains a damaged tensor.
        """
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
    """Add the scalars of an event file to `points`. Yield a message for each problem of the file."""
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
        yield "ends within an event: the file is still being written, or is incomplete"
    if damaged:
        yield f"has damaged events, which are skipped: {damaged}"
