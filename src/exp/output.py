"""Standard output and standard error of runs and commands.

If the output of a run cannot be written, the run warns once and continues.
"""

from __future__ import annotations

import errno
import faulthandler
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from functools import partial, wraps
from typing import Any, Protocol, TextIO, TypeVar, cast

from exp.errors import INTERRUPTED_BY_KEY, ExpError, describe_exception
from exp.redaction import has_revealed, redact

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# Attribute that `warn_not_written` adds to a log record. Its value has the name of the lost output, and the error.
NOT_WRITTEN = "not_written"
# Error numbers of a full disk.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def warn_not_written(what: str, error: BaseException) -> None:
    """Log a warning that an output, such as a logger or a file, failed and that the run continues without it.

    The log handler `NotWritten` collects these warnings for the report.

    Args:
        what: Name of the output.
        error: Exception that ended the output.
    """
    entry = {"what": what, "error": describe_exception(error)}
    # The traceback of an OSError would not help. Tracebacks of other errors are written to train.log.
    traceback = None if isinstance(error, OSError) else error
    log.warning(
        "%s: %s. The run continues without this output",
        what,
        entry["error"],
        extra={NOT_WRITTEN: entry},
        exc_info=traceback,
    )


def describe_write_error(place: object, error: OSError) -> str:
    """Return a message about a file or folder that cannot be written. It contains the system's message and a fix.

    Args:
        place: Path of the file or folder.
        error: Exception of the failed write.
    """
    fix = "Free disk space there" if error.errno in NO_SPACE else "Fix this error"
    return f"{place}: {error.strerror or error}. {fix}"


class NotWritten(logging.Handler):
    """Log handler that collects the warnings of `warn_not_written` for the run's report.

    Args:
        entries: List to which a dict with the keys `what` and `error` is appended for each warning.
    """

    def __init__(self, entries: list[dict[str, str]]) -> None:
        super().__init__()
        self.entries = entries

    def emit(self, record: logging.LogRecord) -> None:
        entry = vars(record).get(NOT_WRITTEN)
        if entry is not None:
            self.entries.append(entry)


class SafeStream:
    """Wrapper of a text stream that ignores failed writes. After the first failed write, all output is discarded.

    Writes fail if a pipe is closed (`| head -1`), the disk is full, or the terminal is closed. They also fail if the
    parent process has closed the stream.

    Args:
        stream: Stream to write to.
        name: Name of the stream in messages.

    Attributes:
        lost: Error of the first failed write. None: all writes succeeded.
    """

    def __init__(self, stream: TextIO, name: str) -> None:
        self._stream, self.name = stream, name
        self.lost: OSError | None = None

    def write(self, text: str) -> int:
        if self.lost is None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:
                encoding = self._stream.encoding
                return self.write(text.encode(encoding, "backslashreplace").decode(encoding))
            except OSError as error:
                self._lose(error)
        return len(text)

    def flush(self) -> None:
        if self.lost is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def close(self) -> None:
        try:
            self._stream.close()
        except OSError as error:
            warn_not_written(self.name, error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        self.lost = error
        discard_output(self._stream)
        warn_not_written(self.name, error)


def discard_output(stream: TextIO) -> None:
    """Redirect a stream's file descriptor to /dev/null.

    The text in the stream's buffer is then discarded when Python exits. Output of C code is discarded, too.
    """
    with suppress(io.UnsupportedOperation), open(os.devnull, "wb") as nowhere:  # a notebook's stream has no descriptor
        os.dup2(nowhere.fileno(), stream.fileno())


def exit_status(
    command: Callable[[], Result], *, interrupted: str = "interrupted", error_status: int | None = None
) -> Result | int:
    """Run a command, and print errors that users can fix to standard error instead of raising them.

    Args:
        command: Function to run.
        interrupted: Message to print after a Ctrl-C that the command does not handle.
        error_status: Exit status after an ExpError. Default: `exit_status` of the error.

    Returns:
        Result of `command`, which is usually an exit status. If `command` raised an error, the exit status for the
        error.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # a crash in the user's code prints its stack
    try:
        try:
            return command()
        finally:
            if cast("TextIO | None", sys.stdout) is not None:  # None: closed by the parent process (`>&-`)
                sys.stdout.flush()
    except ExpError as error:
        print(redact(str(error)), file=sys.stderr)
        return error.exit_status if error_status is None else error_status
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_BY_KEY
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except Exception as error:
        # The reader may close the pipe, as in `--cfg job | head`.
        if isinstance(error, BrokenPipeError):
            discard_output(sys.stdout)
            return 0
        if isinstance(error, OSError) and error.errno in NO_SPACE and error.filename is None:
            discard_output(sys.stdout)
            print(f"standard output: {error.strerror}. Free space, or redirect it", file=sys.stderr)
            return 1
        if not has_revealed():
            raise
        # The traceback is printed in Python's format, with secrets replaced.
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return 1


class Main(Protocol):
    """Type of the function `main` of a command."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int: ...


def command(
    *, help: str | None = None, interrupted: str = "interrupted", error_status: int | None = None
) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Return a decorator for the function `main` of a command.

    The decorated function reads `sys.argv` by default, prints errors, and returns the exit status.

    Args:
        help: Text to print for -h and --help. None: the command itself handles these flags.
        interrupted: Message to print after a Ctrl-C that the command does not handle.
        error_status: Exit status after an ExpError. Default: `exit_status` of the error.
    """

    def decorate(run: Callable[[Sequence[str]], int]) -> Main:
        def answer(words: Sequence[str]) -> int:
            if help is None or not {"-h", "--help"} & set(words):
                return run(words)
            print(help)
            return 0

        @wraps(run)
        def main(argv: Sequence[str] | None = None) -> int:
            words = sys.argv[1:] if argv is None else argv
            return exit_status(partial(answer, words), interrupted=interrupted, error_status=error_status)

        return main

    return decorate


@contextmanager
def survive_output_errors() -> Iterator[None]:
    """Ignore failed writes to standard output and standard error within the context.

    The first failed write of each stream logs a warning. Contexts may be nested; inner contexts have no effect.
    """
    before = sys.stdout, sys.stderr
    _occupy_descriptors()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = _make_safe(sys.stdout or nowhere, "standard output")
        sys.stderr = _make_safe(sys.stderr or nowhere, "standard error")
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


def _make_safe(stream: TextIO, name: str) -> TextIO:
    return stream if type(cast(object, stream)) is SafeStream else cast(TextIO, SafeStream(stream, name))


def _occupy_descriptors() -> None:
    """Open /dev/null at each of the file descriptors 0, 1 and 2 that is closed.

    If a descriptor stayed closed, the next opened file would get its number. Standard output would then be written to
    this file.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return the lines of a Markdown table. Cells are padded, so that the table is also readable in a terminal.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
        left: Number of columns that are aligned to the left; the others are aligned to the right.
    """
    # Vertical bars are escaped, because they would end the cell.
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rules = ["-" * width if place < left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rules, *cells[1:]):
        padded = [one.ljust(width) for one, width in zip(row[:left], widths[:left], strict=True)]
        padded += [one.rjust(width) for one, width in zip(row[left:], widths[left:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    return lines
