"""Write files atomically: readers find the old file or the new one, after a kill, too."""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO


def write_whole(path: Path, content: str | bytes) -> None:
    """Write bytes, or text as UTF-8, in the place of what stood there.

    Raises: OSError, with the path.
    """
    # Of one's own, for several may write at once.
    with replacing(path, f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp") as file:
        file.write(content.encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def replacing(path: Path, beside: str) -> Iterator[BinaryIO]:
    """Open a binary file that takes the place of `path` when it is closed well, and leaves nothing behind otherwise.

    beside: its name until then, in the same directory, for a rename between file systems is a copy.
    Raises: OSError, with the path.
    """
    partial = path.with_name(beside)
    try:
        with partial.open("wb") as file:
            yield file
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)
        sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # A write knows no path, and the user has not heard of the one beside.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def sync_directory(directory: Path) -> None:
    """Make the names of a directory's files last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
