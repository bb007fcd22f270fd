"""Signals that end a run, and their handlers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType
from typing import Any

from exp.errors import Interrupted, chain_of

# What signal.signal takes and gives back; None was not installed from Python.
Handler = Callable[[int, FrameType | None], Any] | int | None
# Set in a rank that somebody watches and would end by SIGKILL: exp's launcher, torchrun, SLURM.
SUPERVISED = "EXP_SUPERVISED"
# SIGUSR1 is what SLURM sends before it takes a job's machine away: #SBATCH --signal=SIGUSR1@90.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ending_signals() -> tuple[int, ...]:
    """Return the signals that end a run: Ctrl-C, a scheduler's, a closed terminal's, which `nohup` lets it ignore."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(signum for signum in ENDING if not (is_kept and signum == signal.SIGHUP))


def install_handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Install a handler for the signals that end a run, for good."""
    for signum in ending_signals():
        signal.signal(signum, handler)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], *, over: tuple[Handler, ...] | None = None
) -> Iterator[None]:
    """Handle the signals that end a run, and put back what was there. Outside the main thread it does nothing.

    over: handlers that it takes the place of, and of no other; None is all.
    """
    before: dict[int, Handler] = {}
    if threading.current_thread() is threading.main_thread():
        before = {signum: signal.getsignal(signum) for signum in ending_signals()}
    try:
        for signum, held in before.items():
            if over is None or held in over:
                signal.signal(signum, handler)
        yield
    finally:
        for signum, held in before.items():
            # None was not installed from Python: it cannot be put back.
            if held is not None:
                signal.signal(signum, held)


class SignalFlag:
    """Handlers that remember the first signal, and let the second one end the process.

    received: the signal's number; None while there was none.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Handler] = {}

    def install(self) -> None:
        """Take over the handlers; elsewhere than in the main thread there are none to take, and it does nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received = None
        for signum in ending_signals():
            # None is a handler that was not installed from Python: it could not be put back.
            if signal.getsignal(signum) is not None:
                self._before[signum] = signal.signal(signum, self._remember)

    def restore(self) -> None:
        """Put back what was there before, where nobody else has taken over since. Safe to call twice."""
        while self._before:
            signum, handler = self._before.popitem()
            own = signal.SIG_DFL if self.received is not None and not _is_interactive() else self._remember
            if signal.getsignal(signum) == own:
                signal.signal(signum, handler)

    def _remember(self, signum: int, frame: FrameType | None) -> None:
        if self.received is None:
            self.received = signum
            for other in self._before:
                if not _is_interactive() and not _is_supervised():
                    # The system's own action needs no Python, which may hang in a collective.
                    signal.signal(other, signal.SIG_DFL)
            return
        if _is_supervised():
            return  # a cluster signals all processes of a job, and the launcher passes its own on: both reach a rank
        # In a notebook only: the end of the process would be the end of all its variables.
        raise Interrupted(signum=signum, checkpoint=None)


def _is_supervised() -> bool:
    """Return whether a launcher would end this process by SIGKILL where it does not end by itself."""
    return SUPERVISED in os.environ


@contextmanager
def raise_on_signal() -> Iterator[Sequence[Interrupted]]:
    """End the run at once at a signal, while nothing is there to save: as Interrupted, so that it is reported.

    Yields the exceptions that it raised; see `find_interruption`. From the first batch to the last, Stopping has its
    own handlers.
    Lightning answers a KeyboardInterrupt with SystemExit, and leaves SIGINT ignored (seen in 2.6.6).
    """
    raised: list[Interrupted] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        raised.append(Interrupted(signum=signum, checkpoint=None))
        raise raised[-1]

    # A rank has handlers of its own.
    with handle_signals(leave, over=(signal.SIG_DFL, signal.default_int_handler)):
        yield raised


def find_interruption(error: BaseException, raised: Sequence[Interrupted]) -> BaseException:
    """Return the interruption that OmegaConf or Lightning replaced by another error; without one, the error itself.

    Args:
        error: What was caught.
        raised: What the handler of a signal raised.
    """
    return next((cause for cause in chain_of(error) if any(cause is one for one in raised)), error)


def _is_interactive() -> bool:
    return "ipykernel" in sys.modules or getattr(sys, "ps1", None) is not None
