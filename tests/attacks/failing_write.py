"""`python -m exp.train` in which write number FAIL_AT fails with the errno FAIL_WITH; with FAIL_AT=0 no write fails.

A write opens a file for writing, writes to it, syncs, closes, renames, links or removes it, or makes a directory. The
writes of all threads and of forked ranks count. The file WRITES gets a line for each write.
"""

from __future__ import annotations

import builtins
import errno
import functools
import io
import multiprocessing
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

real_open, real_write = open, os.write


class Counter:
    """Counter of the writes in a folder, which makes one of them fail."""

    def __init__(self, *, at: int, error: int, record: int, below: str) -> None:
        self.at, self.error, self.record, self.below = at, error, record, below
        # Forked processes share this counter.
        self.count = multiprocessing.get_context("fork").Value("i")

    def __call__(self, kind: str, path: Any) -> None:
        name = os.path.abspath(os.fsdecode(path)) if isinstance(path, (str, bytes, os.PathLike)) else str(path)
        if isinstance(path, int):
            name = os.readlink(f"/proc/self/fd/{path}")
        if not name.startswith(self.below + os.sep) or os.path.basename(name).startswith(".std"):
            return
        with self.count.get_lock():
            self.count.value += 1
            fails = self.count.value == self.at
            real_write(self.record, f"{kind}\t{name}\t{'fails' if fails else ''}\n".encode())
        if fails:
            # The exception of a failed write has no path.
            raise OSError(self.error, os.strerror(self.error), *([] if isinstance(path, int) else [os.fsdecode(path)]))


class File:
    """File that counts its first two writes and then every 40th, because a checkpoint has many."""

    def __init__(self, file: Any, counter: Counter) -> None:
        self._file, self._counter, self._writes = file, counter, 0

    def write(self, content: Any) -> Any:
        self._writes += 1
        if self._writes <= 2 or self._writes % 40 == 0:
            self._counter("write", self._file.fileno())
        return self._file.write(content)

    def close(self) -> None:
        is_open = not self._file.closed
        name = os.readlink(f"/proc/self/fd/{self._file.fileno()}") if is_open else ""
        # A file is closed even if close() fails.
        self._file.close()
        if is_open:
            self._counter("close", name)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def __enter__(self) -> File:
        self._file.__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        self.close()

    def __iter__(self) -> Any:
        return iter(self._file)


def install(counter: Counter) -> None:
    def opened(file: Any, mode: str = "r", *rest: Any, **named: Any) -> Any:
        if not set(mode) & set("wax+") or isinstance(file, int):
            return real_open(file, mode, *rest, **named)
        counter("open", file)
        return File(real_open(file, mode, *rest, **named), counter)

    def counted(kind: str, function: Callable[..., Any], place: int = 0) -> Callable[..., Any]:
        @functools.wraps(function)
        def call(*arguments: Any, **named: Any) -> Any:
            counter(kind, arguments[place])
            return function(*arguments, **named)

        return call

    def descriptor(path: Any, flags: int, *rest: Any, **named: Any) -> int:
        # The .log files of forked ranks belong to the tests.
        if flags & (os.O_WRONLY | os.O_RDWR) and not str(path).endswith(".log"):
            counter("open", path)
        return real_descriptor(path, flags, *rest, **named)

    real_descriptor = os.open
    builtins.open = io.open = opened
    os.open = descriptor
    os.write = counted("write", os.write)
    os.fsync = counted("sync", os.fsync)
    os.replace = counted("rename", os.replace, 1)
    os.rename = counted("rename", os.rename, 1)
    os.mkdir = counted("mkdir", os.mkdir)
    os.link = counted("link", os.link, 1)
    os.unlink = counted("unlink", os.unlink)
    os.remove = counted("unlink", os.remove)


def main() -> int:
    from exp.cli import train

    record = os.open(os.environ["WRITES"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    error = getattr(errno, os.environ["FAIL_WITH"])
    install(Counter(at=int(os.environ["FAIL_AT"]), error=error, record=record, below=str(Path.cwd())))
    return train.main()


if __name__ == "__main__":
    sys.exit(main())
