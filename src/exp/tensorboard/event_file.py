"""An event file that grows by whole batches of events, by one write each: no thread, so a failure is raised at once."""

from __future__ import annotations

import itertools
import os
import socket
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO

from tensorboard.compat.proto.event_pb2 import Event, SourceMetadata

from exp.errors import RunError
from exp.tensorboard.records import records


class EventFile:
    """The event file of one writer. It is made by the first write, and closing it keeps it: a later write goes on.

    directory: where it is; made if it does not exist. suffix: the last part of its name, by which it is found again.

    Raises RunError: the directory or the file cannot be written; once, what comes later is dropped.
    """

    def __init__(self, directory: Path, *, suffix: str = "") -> None:
        self.directory = directory
        self.suffix = suffix
        self.failed = False
        self._path: Path | None = None
        self._file: IO[bytes] | None = None

    def write(self, events: Sequence[Event]) -> None:
        """Append `events`, in one write."""
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
                f"TensorBoard events cannot be written to {self._path or self.directory}: {error.strerror}; "
                "expected a folder that can be written and has space. Make room there, or turn it off: logger=[]"
            ) from error

    def close(self) -> None:
        """Close the file. Safe to call twice."""
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
        content = memoryview(records([event.SerializeToString() for event in events]))
        while content:
            content = content[self._file.write(content) :]


def _next_path(directory: Path, suffix: str) -> Path:
    """A name that sorts behind those in `directory`: TensorBoard reads a folder's files in the order of their names."""
    earlier = [path.name.split(".")[3] for path in directory.glob("events.out.tfevents.*")]
    stamp = max([int(time.time()), *(int(text) + 1 for text in earlier if text.isdecimal())])
    for attempt in itertools.count():
        path = directory / f"events.out.tfevents.{stamp:010d}.{socket.gethostname()}.{os.getpid()}.{attempt}{suffix}"
        if not path.exists():
            return path
    raise AssertionError("unreachable: count() does not end")
