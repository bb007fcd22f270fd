"""Output of a run and of commands. A run continues if its output cannot be written, and warns once."""

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

# Attribute of a log record that names what cannot be written.
NOT_WRITTEN = "not_written"
# Errors of a full disk.
NO_SPACE = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)


def warn_not_written(what: str, error: BaseException) -> None:
    """Warn that a run's output cannot be written from now on. `NotWritten` keeps the warning for the report."""
    entry = {"what": what, "error": describe_exception(error)}
    # train.log gets the traceback of an error that is not the system's.
    traceback = None if isinstance(error, OSError) else error
    log.warning(
        "%s: %s. The run continues without it", what, entry["error"], extra={NOT_WRITTEN: entry}, exc_info=traceback
    )


def describe_write_error(place: object, error: OSError) -> str:
    """Return what is wrong with a place that cannot be written, in the system's own words, and the fix as far as they
    say it."""
    fix = "Make room there" if error.errno in NO_SPACE else "Fix that"
    return f"{place}: {error.strerror or error}. {fix}"


class NotWritten(logging.Handler):
    """Collects the warnings of `warn_not_written` for the report.

    Args:
        entries: The list to which {what, error} is appended.
    """

    def __init__(self, entries: list[dict[str, str]]) -> None:
        super().__init__()
        self.entries = entries

    def emit(self, record: logging.LogRecord) -> None:
        entry = vars(record).get(NOT_WRITTEN)
        if entry is not None:
            self.entries.append(entry)


class SafeStream:
    """A text stream whose writes never fail. After the first error nothing is written.

    Errors are a closed pipe (`| head -1`), a full disk, a closed terminal, or a stream closed before the process began.

    Args:
        name: Name in messages.

    Attributes:
        lost: The error that ended the writing. None: no error.
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
        """Discard the stream's buffer, the output of C code, and the flush when Python exits."""
        with suppress(io.UnsupportedOperation):  # a notebook's stream has no descriptor
            nowhere = os.open(os.devnull, os.O_WRONLY)
            try:
                os.dup2(nowhere, self._stream.fileno())
            finally:
                os.close(nowhere)


class OutputError(OSError):
    """The output of a command cannot be written."""


class _CheckedStream(SafeStream):
    """Raises OutputError, or BrokenPipeError, at the first write that fails, and discards later output."""

    def _lose(self, error: OSError) -> None:
        self.lost = error
        if isinstance(error, BrokenPipeError):
            raise error
        self._discard()
        raise OutputError(error.errno, error.strerror) from error


@contextmanager
def _checked_output() -> Iterator[None]:
    """Raise OutputError if standard output cannot be written or, at the end, flushed."""
    before = sys.stdout
    if before is None:  # closed by the parent process (`>&-`)
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
    """Run a command, and print errors that users can fix to stderr.

    Args:
        interrupted: Message after a Ctrl-C that the command does not handle.
        error_status: Exit status after an ExpError. Default: that of the error.

    Returns:
        The result of the command, its exit status, or the exit status of the error that ended it.
    """
    if not faulthandler.is_enabled():
        faulthandler.enable(file=2)  # a crash in the user's code prints its stack
    try:
        with _checked_output():
            return command()
    except OutputError as error:
        print(f"standard output: {error.strerror}. Free space, or redirect it", file=sys.stderr)
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
        # `--cfg job | head` has closed the pipe. Python would report it once more at exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception:
        if not has_revealed():
            raise
        # Python's traceback without secrets.
        print(redact(traceback.format_exc()), file=sys.stderr, end="")
        return 1


class Main(Protocol):
    """Type of the `main` of a command."""

    def __call__(self, argv: Sequence[str] | None = None, /) -> int: ...


def command(
    *, help: str | None = None, interrupted: str = "interrupted", error_status: int | None = None
) -> Callable[[Callable[[Sequence[str]], int]], Main]:
    """Return a decorator for the `main` of a command. The command line is `sys.argv` by default.

    Args:
        help: Text that -h and --help print.
        interrupted, error_status: See `exit_status`.
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
    """Let writes to standard output and error never fail. Within another such context it does nothing."""
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
    """Show a line on the terminal of standard error until the end of the context."""
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
    """Show a line while torch is imported, and collect no garbage while torch and Lightning are imported."""
    if "lightning" in sys.modules:
        yield
        return
    line = nullcontext() if "torch" in sys.modules else show_transient_line("loading torch")
    with line, pause_garbage_collection():
        yield


def _make_safe(stream: TextIO, name: str) -> TextIO:
    return stream if type(cast(object, stream)) is SafeStream else cast(TextIO, SafeStream(stream, name))


def _occupy_descriptors() -> None:
    """Open descriptors 0 to 2 if they are closed: otherwise other output would go to the next opened file."""
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number


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
