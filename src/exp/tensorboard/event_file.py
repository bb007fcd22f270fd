"""Event file to which batches of events are appended, with one write per batch.

No thread is used, so errors are raised at once. A record is a length, its checksum, bytes and their checksum,
little-endian. tensorboard's writer computes the checksum byte by byte in Python. For a step's event of 8 values (280
bytes) this takes 40 us, ten times as long as its encoding. This module uses a NumPy gather for many records together,
which takes 4 us per record.
"""

from __future__ import annotations

import os
import socket
import struct
import time
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import IO

import numpy as np
from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata

from exp.errors import RunError
from exp.output import describe_write_error
from exp.tensorboard.event_records import EVENTS


class EventFile:
    """Event file that is created by the first write. A write after `close` appends to the same file.

    If the directory or the file cannot be written, RunError is raised once, and later events are dropped.

    Args:
        directory: Directory of the file, which is created if needed.
        suffix: End of the file name. Default: empty.
    """

    def __init__(self, directory: Path, *, suffix: str = "") -> None:
        self.directory = directory
        self.suffix = suffix
        self.failed = False
        self._path: Path | None = None
        self._file: IO[bytes] | None = None

    def write(self, events: Sequence[Event]) -> None:
        """Append events in one write."""
        if self.failed:
            return
        try:
            if self._file is None:
                self._open()
            self._append(events)
        except OSError as error:
            self.failed = True
            self.close()
            raise RunError(
                f"TensorBoard events cannot be written to {describe_write_error(self._path or self.directory, error)}, "
                "or turn it off: logger=[]"
            ) from error

    def close(self) -> None:
        """Close the file. The method may be called twice."""
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
    """Return a file name that sorts after the existing ones, because TensorBoard sorts files by name."""
    earlier = [path.name.split(".")[3] for path in directory.glob(EVENTS)]
    stamp = max([int(time.time()), *(int(text) + 1 for text in earlier if text.isdecimal())])
    return directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.0{suffix}"


_POLYNOMIAL = 0x82F63B78  # Castagnoli's, bits reversed (RFC 3720, appendix B.4)
_BLOCK = 1024


def encode_records(contents: Sequence[bytes]) -> bytes:
    """Return the contents as records.

    A record is the uint64 length, the uint32 masked CRC of the length, the bytes, and the uint32 masked CRC of the
    bytes.
    """
    headers = [struct.pack("<Q", len(content)) for content in contents]
    checks = masked_crc32c([*headers, *contents]).astype("<u4").tobytes()
    parts: list[bytes] = []
    offset = 4 * len(headers)
    for index, (header, content) in enumerate(zip(headers, contents, strict=True)):
        at = 4 * index
        parts += header, checks[at : at + 4], content, checks[offset + at : offset + at + 4]
    return b"".join(parts)


def masked_crc32c(contents: Sequence[bytes]) -> np.ndarray:
    """Return the CRC-32C of each element of `contents`, masked as TFRecord requires: uint32 `[N]`."""
    checks = crc32c(contents)
    return (checks >> 15 | checks << 17) + np.uint32(0xA282EAD8)


def crc32c(contents: Sequence[bytes]) -> np.ndarray:
    """Return the CRC-32C (RFC 3720) of each element of `contents`: uint32 `[N]`.

    A CRC is linear: it is the exclusive or of one term per byte. A term depends on the byte's value and its distance
    from the end. The initial register is combined with the first four bytes.
    """
    checks = np.empty(len(contents), np.uint32)
    short = [index for index, content in enumerate(contents) if 4 <= len(content) <= _BLOCK]
    if short:
        checks[short] = _crc32c_of_short([contents[index] for index in short])
    for index, content in enumerate(contents):
        if not 4 <= len(content) <= _BLOCK:
            checks[index] = _crc32c_of_any(content)
    return checks


def _crc32c_of_short(contents: Sequence[bytes]) -> np.ndarray:
    contributions, offsets = _contributions()
    joined = np.frombuffer(b"".join(contents), np.uint8)
    lengths = np.fromiter(map(len, contents), np.int64, len(contents))
    starts = np.cumsum(lengths) - lengths
    index = np.concatenate([offsets[-length:] for length in lengths.tolist()]) + joined
    index[starts[:, None] + np.arange(4)] ^= 0xFF
    return ~np.bitwise_xor.reduceat(contributions.take(index), starts)


def _crc32c_of_any(content: bytes) -> int:
    contributions, offsets = _contributions()
    register = 0xFFFFFFFF
    whole = np.frombuffer(content, np.uint8)
    for start in range(0, len(content), _BLOCK):
        block = whole[start : start + _BLOCK]
        if len(block) < 4:
            for byte in block.tolist():
                register = register >> 8 ^ int(contributions[(register ^ byte) & 0xFF])
            continue
        index = offsets[-len(block) :] + block
        index[:4] ^= np.frombuffer(register.to_bytes(4, "little"), np.uint8)
        register = int(np.bitwise_xor.reduce(contributions.take(index)))
    return register ^ 0xFFFFFFFF


@cache
def _contributions() -> tuple[np.ndarray, np.ndarray]:
    """Return two arrays for the computation of a CRC.

    Returns:
        The term of byte b at distance d from the end, at index d * 256 + b; and the values d * 256 for decreasing d.
    """
    first: np.ndarray = np.arange(256, dtype=np.uint32)
    for _ in range(8):
        first = first >> 1 ^ np.where(first & 1, np.uint32(_POLYNOMIAL), np.uint32(0))
    table = np.empty((_BLOCK, 256), np.uint32)
    table[0] = first
    for distance in range(1, _BLOCK):
        table[distance] = table[distance - 1] >> 8 ^ first[table[distance - 1] & 0xFF]
    return table.reshape(-1), np.arange(_BLOCK - 1, -1, -1, dtype=np.int64) * 256
