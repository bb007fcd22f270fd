"""Write files atomically."""

from __future__ import annotations

import contextlib
import os
import threading
from pathlib import Path


def write_whole(path: Path, content: str | bytes) -> None:
    """Writes bytes, or text as UTF-8, in the place of what stood there. Readers see the old file or the new one.

    Raises: OSError.
    """
    # In the same directory, for a rename between file systems is a copy; of one's own, for several may write at once.
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.tmp")
    try:
        with temporary.open("wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink()
        raise
