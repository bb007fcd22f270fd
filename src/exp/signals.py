"""Signals that end a run, and their handlers."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from exp.errors import Interrupted, chain_of

# Arguments and results of signal.signal; None is a handler that was not installed from Python.
Handler = Callable[[int, FrameType | None], object] | int | None
# Set on ranks whose launcher (exp, torchrun, SLURM) would end them with SIGKILL.
SUPERVISED = "EXP_SUPERVISED"
# SLURM sends SIGUSR1 before the time limit of a job: #SBATCH --signal=SIGUSR1@90.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ending_signals() -> tuple[int, ...]:
    """Return the signals that end a run. A closed terminal does not end a run under `nohup`."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(signum for signum in ENDING if not (is_kept and signum == signal.SIGHUP))


def install_handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Install a handler for the signals that end a run, permanently."""
    for signum in ending_signals():
        signal.signal(signum, handler)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], *, over: tuple[Handler, ...] | None = None
) -> Iterator[None]:
    """Handle the signals that end a run during the context. Outside the main thread it does nothing.

    Args:
        over: Handlers that are replaced. None: all.
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
            # A handler that was not installed from Python cannot be restored.
            if held is not None:
                signal.signal(signum, held)


class SignalFlag:
    """Handlers that remember the first signal, and let the second one end the process.

    Attributes:
        received: Number of the first signal. None: no signal yet.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Handler] = {}

    def install(self) -> None:
        """Install the handlers. Outside the main thread it does nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received = None
        for signum in ending_signals():
            # A handler that was not installed from Python could not be restored.
            if signal.getsignal(signum) is not None:
                self._before[signum] = signal.signal(signum, self._remember)

    def restore(self) -> None:
        """Restore the earlier handlers, except where others were installed since. Safe to call twice."""
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
                    # The system's default action works even if Python hangs in a collective.
                    signal.signal(other, signal.SIG_DFL)
            return
        if _is_supervised():
            return  # a rank gets the signal twice: from the cluster and from its launcher
        # Only in a notebook, where the end of the process would lose all variables.
        raise Interrupted(signum=signum, checkpoint=None)


def _is_supervised() -> bool:
    """Return whether a launcher ends this process with SIGKILL if it does not exit."""
    return SUPERVISED in os.environ


@contextmanager
def raise_on_signal() -> Iterator[Sequence[Interrupted]]:
    """Raise Interrupted at a signal during the context, in which there is nothing to save.

    Yields the exceptions that it raised; see `find_interruption`. From the first batch to the last, Stopping replaces
    the handlers. Lightning turns KeyboardInterrupt into SystemExit, and ignores SIGINT afterwards (2.6.6).
    """
    raised: list[Interrupted] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        raised.append(Interrupted(signum=signum, checkpoint=None))
        raise raised[-1]

    # Ranks have other handlers.
    with handle_signals(leave, over=(signal.SIG_DFL, signal.default_int_handler)):
        yield raised


def find_interruption(error: BaseException, raised: Sequence[Interrupted]) -> BaseException:
    """Return the interruption that OmegaConf or Lightning replaced by another error, or the error itself.

    Args:
        error: The caught exception.
        raised: The exceptions of the signal handler.
    """
    return next((cause for cause in chain_of(error) if any(cause is one for one in raised)), error)


def _is_interactive() -> bool:
    return "ipykernel" in sys.modules or getattr(sys, "ps1", None) is not None
