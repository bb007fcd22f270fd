"""Atomic writes and locks of files.

After an atomic write, a file has either the complete old content or the complete new content, even after a kill.
"""

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

# Names of the temporary files of atomic writes. The second pattern is that of earlier versions of exp, for checkpoints.
PARTIAL = re.compile(r"\..+\.\d+\.\d+\.partial|\.(last|best)\.ckpt\.partial")
PROBE_SECONDS = 0.1


def write_atomic(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Write a file atomically. An existing file is replaced.

    Args:
        path: File to write.
        content: Bytes, or a text to encode as UTF-8. In a text, values of secrets are replaced by `${oc.env:NAME}`.
        is_synced: Sync the file to disk, as in `open_atomic`. Default: true.

    Raises:
        OSError: The file cannot be written. The error contains its path.
    """
    with open_atomic(path, is_synced=is_synced) as file:
        file.write(redact(content).encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomic(path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Open a temporary binary file that replaces `path` at the end of the context.

    If an exception is raised in the context, the temporary file is removed, and `path` is not changed.

    Args:
        path: File to write.
        is_synced: Sync the file to disk, so that its content survives a crash of the machine. If false, the content
            survives only a crash of the process.

    Raises:
        OSError: The file cannot be written. The error contains `path`.
    """
    partial = partial_path(path)
    try:
        with _open_locked(partial) as file, close_in_forks(file):
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            # Renamed before the file is closed, because closing releases the lock.
            partial.replace(path)
        if is_synced:
            sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # The error of a write has no path, and users should not see the path of the temporary file.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def is_valid_path(text: str) -> bool:
    """Return whether a path is short enough for file systems. The limits leave room for a suffix that exp appends."""
    return len(text) < 2000 and all(len(part.encode(errors="replace")) <= 250 for part in text.split("/"))


def partial_path(path: Path) -> Path:
    """Return the path of the temporary file that an atomic write renames to `path`.

    The temporary file is in the same directory, because a rename to another file system would copy the file.
    """
    # The name contains the ids of process and thread, because several threads may write the same file at once.
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")


def remove_partial_files(directory: Path, *, levels: int = 0) -> None:
    """Remove the temporary files that killed programs left in a directory. Files that are being written are kept.

    Args:
        directory: Directory to search.
        levels: Levels of subdirectories to search. Default: 0, only the directory itself. Deeper levels are not
            searched, because a run directory may contain other data.
    """
    for path in (path for level in range(levels + 1) for path in directory.glob("*/" * level + ".*.partial")):
        # Errors are ignored, because the file may be removed already or belong to another user.
        with contextlib.suppress(OSError):
            if PARTIAL.fullmatch(path.name) and not path.is_symlink():
                with path.open("rb") as file:
                    if lock(file, wait=False):
                        path.unlink()


def lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Lock an open file. The lock ends when the file is closed or the process ends.

    Args:
        file: Open file.
        wait: If another process has a lock on the file, wait until that process releases it.

    Returns:
        True if this process has the lock. False if another process has it, or the file system supports no locks.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Lock an existing file or directory during the context.

    If the file system does not support locks, the context has no effect. Forked child processes do not keep the lock.

    Args:
        path: File or directory.
        alone: If another program has the lock, raise an error. By default, the context is then entered without the
            lock.

    Raises:
        BlockingIOError: `alone` is true, and another program has the lock.
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
    """Close a file in each child process that is forked during the context.

    An open file would keep the file's lock in the child.
    """
    descriptor = file.fileno()
    _held_here.add(descriptor)
    try:
        yield
    finally:
        _held_here.discard(descriptor)


def _is_held_elsewhere(descriptor: int) -> bool:
    """Try for at most PROBE_SECONDS to lock a file. Return whether another program has the lock.

    If the file system does not support locks, return False.

    Args:
        descriptor: Descriptor of the open file.
    """
    ends = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # The function `is_locked` of another process may have locked the file for a moment.
            if time.monotonic() > ends:
                return True
            time.sleep(0.005)
        except OSError:
            return False
        else:
            return False


def _close_held() -> None:
    """Close all locked files in a forked child process.

    A child, such as the worker of a data loader, may run longer than its parent and would keep the locks.
    """
    for descriptor in _held_here:
        os.close(descriptor)
    _held_here.clear()


_held_here: set[int] = set()
os.register_at_fork(after_in_child=_close_held)


def is_locked(path: Path) -> bool:
    """Return whether another program has locked a file or directory.

    Return False if the path does not exist or the file system does not support locks.
    """
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
        # remove_partial_files of another process may have removed the file before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(file.fileno())):
                return file
        file.close()


def sync_directory(directory: Path) -> None:
    """Sync a directory to disk, so that new and renamed files in it survive a crash of the machine."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
