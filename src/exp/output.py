"""What a run says and draws is no reason to end it: where that cannot be written, it goes on, and tells so once."""

from __future__ import annotations

import errno
import faulthandler
import io
import logging
import os
import sys
import traceback
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext, suppress
from functools import partial, wraps
from typing import Any, Protocol, TextIO, TypeVar, cast

from exp.errors import INTERRUPTED_BY_KEY, ExpError, describe_exception
from exp.lighter_imports import pause_garbage_collection
from exp.redaction import has_revealed, redact

log = logging.getLogger(__name__)
Result = TypeVar("Result")

# The attribute of a record of the log that says what could not be written.
NOT_WRITTEN = "not_written"
# What of the system's words says that room is the fix.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def warn_not_written(what: str, error: BaseException) -> None:
    """Say in the log that something of a run cannot be written from now on; `NotWritten` keeps it for the report."""
    entry = {"what": what, "error": describe_exception(error)}
    # A traceback is for train.log, where the error is not the system's.
    traceback = None if isinstance(error, OSError) else error
    log.warning(
        "%s: %s. The run goes on without it", what, entry["error"], extra={NOT_WRITTEN: entry}, exc_info=traceback
    )


def describe_write_error(place: object, error: OSError) -> str:
    """Return what is wrong with a place that cannot be written, in the system's own words, and the fix as far as they
    say it."""
    fix = "Make room there" if error.errno in NO_SPACE else "Fix that"
    return f"{place}: {error.strerror or error}. {fix}"


class NotWritten(logging.Handler):
    """Collects what `warn_not_written` says, for the report.

    entries: {what, error} of each.
    """

    def __init__(self, entries: list[dict[str, str]]) -> None:
        super().__init__()
        self.entries = entries

    def emit(self, record: logging.LogRecord) -> None:
        entry = vars(record).get(NOT_WRITTEN)
        if entry is not None:
            self.entries.append(entry)


class SafeStream:
    """A text stream whose writes do not fail: behind the first that would, nothing is written any more.

    A reader that has left (`| head -1`), a full disk, a terminal that was closed, a stream that was closed before
    the process began.

    name: for people. lost: why it is written to no longer; None while it is.
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

    def writelines(self, lines: Sequence[str]) -> None:
        self.write("".join(lines))

    def flush(self) -> None:
        if self.lost is None:
            try:
                self._stream.flush()
            except OSError as error:
                self._lose(error)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def _lose(self, error: OSError) -> None:
        self.lost = error
        self._discard()
        warn_not_written(self.name, error)

    def _discard(self) -> None:
        """Let what waits in the stream, what C prints, and what Python flushes at its end fall away."""
        with suppress(io.UnsupportedOperation):  # a notebook's stream has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


class OutputError(OSError):
    """What a command prints cannot be written."""


class _CheckedStream(SafeStream):
    """Raises OutputError at the write that fails, BrokenPipeError of a reader that left, and is silent behind that."""

    def _lose(self, error: OSError) -> None:
        self.lost = error
        if isinstance(error, BrokenPipeError):
            raise error
        self._discard()
        raise OutputError(error.errno, error.strerror) from error


@contextmanager
def _checked_output() -> Iterator[None]:
    """Raise OutputError where standard output cannot be written, what waits in it at the end included."""
    before = sys.stdout
    if before is None:  # closed by whoever started this process (`>&-`)
        yield
        return
    sys.stdout = cast(TextIO, _CheckedStream(before, "standard output"))
    try:
        yield
        sys.stdout.flush()
    except SystemExit:  # --help, --version
        sys.stdout.flush()
        raise
    finally:
        sys.stdout = before


def exit_status(
    command: Callable[[], Result], *, interrupted: str = "interrupted", error_status: int | None = None
) -> Result | int:
    """Run a command, and print on stderr what a user can fix.

    interrupted: the message after a Ctrl-C that the command does not handle.
    error_status: the exit status after any ExpError; default: the status that the error has.
    Returns: what the command returns, its own status; or that of the error which ended it.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # code of the user's own that crashes says where
    try:
        with _checked_output():
            return command()
    except OutputError as error:
        print(f"standard output: {error.strerror}. Send it where there is room", file=sys.stderr)
        return 1
    except ExpError as error:
        print(redact(str(error)), file=sys.stderr)
        return error.exit_status if error_status is None else error_status
    except KeyboardInterrupt:
        print(interrupted, file=sys.stderr)
        return INTERRUPTED_BY_KEY
    except SystemExit as error:
        return error.code if isinstance(error.code, int) else 1
    except BrokenPipeError:
        # The reader of `--cfg job | head` has left. Python would complain once more when it flushes at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        if not has_revealed():
            raise
        # As Python prints it, but for what must not be shown.
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return 1


class Main(Protocol):
    """The `main` of a command."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int: ...


def command(
    *, help: str | None = None, interrupted: str = "interrupted", error_status: int | None = None
) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Return a decorator for the `main` of a command. The command line is `sys.argv` by default.

    help: Text that -h and --help print. interrupted, error_status: As for `exit_status`.
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
    """Let standard output and error be outlived by what runs within; within another such context it does nothing."""
    before = sys.stdout, sys.stderr
    _occupy_descriptors()
    with open(os.devnull, "w", encoding="utf-8") as nowhere:
        sys.stdout = _make_safe(sys.stdout or nowhere, "standard output")
        sys.stderr = _make_safe(sys.stderr or nowhere, "standard error")
        try:
            yield
        finally:
            sys.stdout, sys.stderr = before


@contextmanager
def show_transient_line(words: str) -> Iterator[None]:
    """Show words on a terminal while this goes on, to be written over; where standard error is none, nothing."""
    stream = cast("TextIO | None", sys.stderr)
    if stream is None or not stream.isatty():
        yield
        return
    stream.write(f"{words}\r")
    stream.flush()
    try:
        yield
    finally:
        stream.write(f"{' ' * len(words)}\r")
        stream.flush()


@contextmanager
def announce_torch_import() -> Iterator[None]:
    """Say so on a terminal while torch is imported, and collect no garbage while torch and Lightning are."""
    if "lightning" in sys.modules:
        yield
        return
    line = nullcontext() if "torch" in sys.modules else show_transient_line("loading torch")
    with line, pause_garbage_collection():
        yield


def _make_safe(stream: TextIO, name: str) -> TextIO:
    return stream if type(cast(object, stream)) is SafeStream else cast(TextIO, SafeStream(stream, name))


def _occupy_descriptors() -> None:
    """Open what was closed of 0, 1 and 2: else the next file has that number, and what others print is in it."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # the lowest number that is free


def markdown_table(head: Sequence[str], rows: Sequence[Sequence[str]], *, left: int) -> list[str]:
    """Return the lines of a table in Markdown, with columns of one width that are readable in a terminal.

    Args:
        head: Titles of the columns.
        rows: Cells of each row.
        left: Number of columns that are aligned to the left; the others are aligned to the right.
    """
    # A vertical bar in a cell would end the cell.
    cells = [[" ".join(cell.split()).replace("|", "\\|") for cell in row] for row in (head, *rows)]
    widths = [max(map(len, column)) for column in zip(*cells, strict=True)]
    rules = ["-" * width if place < left else "-" * (width - 1) + ":" for place, width in enumerate(widths)]
    lines = []
    for row in (cells[0], rules, *cells[1:]):
        padded = [one.ljust(width) for one, width in zip(row[:left], widths[:left], strict=True)]
        padded += [one.rjust(width) for one, width in zip(row[left:], widths[left:], strict=True)]
        lines.append(f"| {' | '.join(padded)} |")
    return lines
