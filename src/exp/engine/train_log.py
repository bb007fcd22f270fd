"""train.log: what is logged and warned during a run, in its directory."""

from __future__ import annotations

import logging
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from exp.strategies.rank import Rank

# Lightning's loggers print to the screen by themselves.
CHATTY = ("lightning", "lightning.pytorch", "lightning.fabric")


@contextmanager
def run_log(directory: Path | str, *, rank: Rank) -> Iterator[Path]:
    """Sends what is logged and warned in this process to a file in the run directory: train.log, train.rank1.log ...

    On the screen stay warnings and errors of exp's own, of rank 0. Everything is put back at the end.
    """
    path = Path(directory) / ("train.log" if rank.is_first else f"train.rank{rank.global_rank}.log")
    file = _LogFile(path, encoding="utf-8", delay=True)
    file.setFormatter(logging.Formatter("%(asctime)s %(levelname)-7s %(name)s: %(message)s"))
    screen = _ScreenHandler(logging.WARNING if rank.is_first else logging.CRITICAL)
    root, own = logging.getLogger(), logging.getLogger("exp")
    chatty = [(logger, logger.handlers[:], logger.propagate) for logger in map(logging.getLogger, CHATTY)]
    level = own.level
    try:
        root.addHandler(file)
        own.addHandler(screen)
        own.setLevel(logging.INFO)
        for logger, _, _ in chatty:
            logger.handlers, logger.propagate = [], True
        logging.captureWarnings(True)
        yield path
    finally:
        logging.captureWarnings(False)
        for logger, handlers, propagate in chatty:
            logger.handlers, logger.propagate = handlers, propagate
        own.setLevel(level)
        own.removeHandler(screen)
        root.removeHandler(file)
        file.close()


class _LogFile(logging.FileHandler):
    """A log that ends, with one line on the screen, where the disk is full: a run does not fail for its log."""

    _has_ended = False

    def emit(self, record: logging.LogRecord) -> None:
        if not self._has_ended:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        error = sys.exc_info()[1]
        if isinstance(error, OSError):
            self._end(error)
        else:
            super().handleError(record)

    def close(self) -> None:
        try:
            super().close()
        except OSError as error:  # what is left in the buffer does not fit either
            self._end(error)

    def _end(self, error: OSError) -> None:
        if not self._has_ended:
            self._has_ended = True
            print(f"{self.baseFilename} ends here: {error.strerror or error}", file=sys.stderr)


class _ScreenHandler(logging.Handler):
    """Writes to sys.stderr as it is at that moment: a bar puts its own there, so that lines appear above it."""

    def emit(self, record: logging.LogRecord) -> None:
        # A traceback is for the file; the screen has the message.
        print(record.getMessage(), file=sys.stderr)
