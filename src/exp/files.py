"""Atomic writes: readers find the old file or the new file, even after a kill."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import os
import re
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import BinaryIO

from exp.redaction import redact

# Names of unfinished files next to their targets, and those of checkpoints of earlier versions.
PARTIAL = re.compile(r"\..+\.\d+\.\d+\.partial|\.(last|best)\.ckpt\.partial")
PROBE_SECONDS = 0.1


def write_atomic(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Replace the content of a file by bytes, or by text as UTF-8. Secrets in a text are replaced by their names.

    Args:
        is_synced: See `open_atomic`.

    Raises:
        OSError: With the path.
    """
    with open_atomic(path, is_synced=is_synced) as file:
        file.write(redact(content).encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomic(path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Open a binary file that replaces `path` at the end of the context, or is removed after an exception.

    Args:
        is_synced: Sync the file to disk, so that it survives a crash of the machine and not only of the process.

    Raises:
        OSError: With the path.
    """
    partial = partial_path(path)
    try:
        with _open_locked(partial) as file, close_in_forks(file):
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            # Before the file is closed, which releases its lock.
            partial.replace(path)
        if is_synced:
            sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # The error of a write has no path, and users do not know the partial file.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def is_valid_path(text: str) -> bool:
    """Return whether a text can be a path with a suffix. Otherwise file systems raise OSError."""
    return len(text) < 2000 and all(len(part.encode(errors="replace")) <= 250 for part in text.split("/"))


def partial_path(path: Path) -> Path:
    """Return the path of an unfinished file, in the same directory: a rename between file systems is a copy."""
    # Several processes and threads may write the file at once.
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")


def remove_partial_files(directory: Path, *, levels: int = 0) -> None:
    """Remove unfinished files of killed programs in a directory, except files that are being written.

    Args:
        levels: Levels of subdirectories. Never the whole tree: a run directory may contain other data.
    """
    for path in (path for level in range(levels + 1) for path in directory.glob("*/" * level + ".*.partial")):
        # Nothing depends on the removal: the file may be gone, or belong to another user.
        with contextlib.suppress(OSError):
            if PARTIAL.fullmatch(path.name) and not path.is_symlink():
                with path.open("rb") as file:
                    if lock(file, wait=False):
                        path.unlink()


def lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Lock a file until it is closed or its process ends. Return False if it is locked or cannot be locked.

    Args:
        wait: Wait for another process that holds the lock.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Lock an existing file or directory during the context, if the file system supports it.

    Child processes do not hold the lock.

    Args:
        alone: Raise an error if another program holds the lock; otherwise continue without it.

    Raises:
        BlockingIOError: Another program holds the lock.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        if _is_held_elsewhere(descriptor) and alone:
            raise BlockingIOError(errno.EWOULDBLOCK, os.strerror(errno.EWOULDBLOCK), str(path))
        _held_here.add(descriptor)
        yield
    finally:
        _held_here.discard(descriptor)
        os.close(descriptor)


@contextlib.contextmanager
def close_in_forks(file: BinaryIO) -> Iterator[None]:
    """Close a file in processes that other threads fork during the context, which would keep its lock."""
    descriptor = file.fileno()
    _held_here.add(descriptor)
    try:
        yield
    finally:
        _held_here.discard(descriptor)


def _is_held_elsewhere(descriptor: int) -> bool:
    """Return whether another program holds the lock. If not, take it, if possible."""
    ends = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # `is_locked` of another process holds the lock for a moment.
            if time.monotonic() > ends:
                return True
            time.sleep(0.005)
        except OSError:
            return False
        else:
            return False


def _close_held() -> None:
    """Close held files in a forked process, such as a loader's worker, which may outlive this process."""
    for descriptor in _held_here:
        os.close(descriptor)
    _held_here.clear()


_held_here: set[int] = set()
os.register_at_fork(after_in_child=_close_held)


def is_locked(path: Path) -> bool:
    """Return whether another program has locked a file or directory; False if it is missing or cannot be locked."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(descriptor)
    return False


def _open_locked(partial: Path) -> BinaryIO:
    """Open and lock a new file."""
    while True:
        file = partial.open("wb")
        lock(file)
        # remove_partial_files may have removed it before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(file.fileno())):
                return file
        file.close()


def sync_directory(directory: Path) -> None:
    """Sync the names of a directory's files to disk."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts paths with 9 before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
