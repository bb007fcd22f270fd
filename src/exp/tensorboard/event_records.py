"""Reader of event files. A record is a uint64 length, its checksum, the bytes of an Event, and their checksum."""

from __future__ import annotations

import os
from collections.abc import Iterator
from typing import BinaryIO

EVENTS = "events.out.tfevents.*"


def read_records(file: BinaryIO) -> Iterator[bytes]:
    """Yield the contents of the records. Checksums are not verified.

    Raises:
        EOFError: The last record is incomplete: it is still being written, or was cut off.
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
