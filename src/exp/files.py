"""Write files atomically: readers find the old file or the new one, after a kill, too."""

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

# Of a file that is being written, beside its target; and what older versions called a checkpoint's.
PARTIAL = re.compile(r"\..+\.\d+\.\d+\.partial|\.(last|best)\.ckpt\.partial")
PROBE_SECONDS = 0.1


def write_atomic(path: Path, content: str | bytes, *, is_synced: bool = True) -> None:
    """Write bytes, or text as UTF-8, in the place of what stood there. Secrets in a text are named, not written.

    is_synced: see `open_atomic`.
    Raises: OSError, with the path.
    """
    with open_atomic(path, is_synced=is_synced) as file:
        file.write(redact(content).encode() if isinstance(content, str) else content)


@contextlib.contextmanager
def open_atomic(path: Path, *, is_synced: bool = True) -> Iterator[BinaryIO]:
    """Open a binary file that takes the place of `path` when it is closed well, and leaves nothing behind otherwise.

    is_synced: whether it is on the disk then, where it outlives the machine's fall, too; else it outlives the process's
        alone.
    Raises: OSError, with the path.
    """
    partial = partial_path(path)
    try:
        with _open_locked(partial) as file, close_in_forks(file):
            yield file
            file.flush()
            if is_synced:
                os.fsync(file.fileno())
            # Before it is closed, with which its lock goes.
            partial.replace(path)
        if is_synced:
            sync_directory(path.parent)
    except BaseException as error:
        with contextlib.suppress(OSError):
            partial.unlink()
        if isinstance(error, OSError) and error.errno is not None:
            # A write knows no path, and the user has not heard of the one beside.
            raise OSError(error.errno, os.strerror(error.errno), str(path)) from error
        raise


def is_valid_path(text: str) -> bool:
    """Whether file systems take a text for the name of a file, with an ending behind it; else they raise OSError."""
    return len(text) < 2000 and all(len(part.encode(errors="replace")) <= 250 for part in text.split("/"))


def partial_path(path: Path) -> Path:
    """The name of a file until it is whole: in the same directory, for a rename between file systems is a copy."""
    # Of one's own, for several may write at once.
    return path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}.partial")


def remove_partial_files(directory: Path, *, levels: int = 0) -> None:
    """Remove what killed programs left half written in a directory. What somebody writes now stays.

    levels: how deep below the directory, too. Not the whole tree: a run directory may be anywhere, data beside it.
    """
    for path in (path for level in range(levels + 1) for path in directory.glob("*/" * level + ".*.partial")):
        # Not ours to remove, or gone by now: nothing depends on it.
        with contextlib.suppress(OSError):
            if PARTIAL.fullmatch(path.name) and not path.is_symlink():
                with path.open("rb") as file:
                    if lock(file, wait=False):
                        path.unlink()


def lock(file: BinaryIO, *, wait: bool = True) -> bool:
    """Lock a file until it is closed, or its process ends: whether that was possible, which some file systems forbid.

    wait: for another process that has locked it.
    """
    try:
        fcntl.flock(file, fcntl.LOCK_EX | (0 if wait else fcntl.LOCK_NB))
    except OSError:
        return False
    return True


@contextlib.contextmanager
def hold_lock(path: Path, *, alone: bool = False) -> Iterator[None]:
    """Lock a file or a directory that is there for as long as this is entered, where the file system lets it be locked;
    what this process starts does not hold it.

    alone: raise where another program holds it; else this is entered all the same.
    Raises: BlockingIOError.
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
    """Close a file in every process that another thread forks meanwhile, a loader's worker: it would keep its lock."""
    descriptor = file.fileno()
    _held_here.add(descriptor)
    try:
        yield
    finally:
        _held_here.discard(descriptor)


def _is_held_elsewhere(descriptor: int) -> bool:
    """Whether another program holds it; if not, it is locked now, where that is possible."""
    ends = time.monotonic() + PROBE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            # Whoever asks `is_locked` holds it for a moment.
            if time.monotonic() > ends:
                return True
            time.sleep(0.005)
        except OSError:
            return False
        else:
            return False


def _close_held() -> None:
    """In a forked process, such as a loader's worker, which may outlive this one for a while."""
    for descriptor in _held_here:
        os.close(descriptor)
    _held_here.clear()


_held_here: set[int] = set()
os.register_at_fork(after_in_child=_close_held)


def is_locked(path: Path) -> bool:
    """Whether another program has locked a file or a directory; not known, and no, where it is not there or cannot be
    locked."""
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
    """The new file, locked."""
    while True:
        file = partial.open("wb")
        lock(file)
        # Who sweeps may have taken it for a dead program's before it was locked.
        with contextlib.suppress(FileNotFoundError):
            if os.path.samestat(partial.stat(), os.fstat(file.fileno())):
                return file
        file.close()


def sync_directory(directory: Path) -> None:
    """Make the names of a directory's files last."""
    descriptor = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def natural_order(path: Path) -> list[tuple[int, int, str]]:
    """Return a key that sorts paths with 9 before 10."""
    parts = re.split(r"(\d+)", str(path))
    return [(0, int(part), "") if part.isdecimal() else (1, 0, part) for part in parts]
