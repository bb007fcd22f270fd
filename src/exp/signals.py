"""Handlers for the signals that end a run: SIGINT, SIGTERM, SIGHUP and SIGUSR1."""

from __future__ import annotations

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from types import FrameType

from exp.errors import Interrupted, chain_of

# A handler, as signal.signal accepts and returns it. None: the handler was not installed from Python.
Handler = Callable[[int, FrameType | None], object] | int | None
# Environment variable of a rank. It is set if the launcher (exp, torchrun, SLURM) will kill a rank that does not exit.
SUPERVISED = "EXP_SUPERVISED"
# SLURM sends SIGUSR1 before the time limit of a job: #SBATCH --signal=SIGUSR1@90.
ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1)


def ending_signals() -> tuple[int, ...]:
    """Return the signals that end a run. Under `nohup`, SIGHUP is left out, so that a closed terminal is ignored."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(signum for signum in ENDING if not (is_kept and signum == signal.SIGHUP))


def install_handler(handler: Callable[[int, FrameType | None], None] | signal.Handlers) -> None:
    """Install a handler for all signals that end a run. Previous handlers are not restored."""
    for signum in ending_signals():
        signal.signal(signum, handler)


@contextmanager
def handle_signals(
    handler: Callable[[int, FrameType | None], None], *, over: tuple[Handler, ...] | None = None
) -> Iterator[None]:
    """Install a handler for the signals that end a run, and restore the previous handlers after the context.

    Outside the main thread, the context has no effect.

    Args:
        handler: Handler to install.
        over: Handlers that may be replaced. A signal with another handler is not changed. None: all handlers are
            replaced.
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
    """Signal handlers that record the first signal. A second signal ends the process.

    Attributes:
        received: Number of the first signal. None: no signal has arrived.
    """

    def __init__(self) -> None:
        self.received: int | None = None
        self._before: dict[int, Handler] = {}

    def install(self) -> None:
        """Install the handlers. Outside the main thread, do nothing."""
        if self._before or threading.current_thread() is not threading.main_thread():
            return
        self.received = None
        for signum in ending_signals():
            # A handler that was not installed from Python could not be restored.
            if signal.getsignal(signum) is not None:
                self._before[signum] = signal.signal(signum, self._remember)

    def restore(self) -> None:
        """Restore the handlers that were installed before `install`.

        If other code has installed a handler after `install`, this handler is kept.

        This method may be called several times.
        """
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
            return  # a rank gets each signal twice: from the cluster and from its launcher
        # Only a notebook gets here. The exception is raised because an exit would lose all variables of the notebook.
        raise Interrupted(signum=signum, checkpoint=None)


def _is_supervised() -> bool:
    """Return whether a launcher will kill this process if it does not exit."""
    return SUPERVISED in os.environ


@contextmanager
def raise_on_signal() -> Iterator[Sequence[Interrupted]]:
    """Raise Interrupted in the context when a signal arrives.

    This context is for the time in which a run has no state to save. From the first to the last batch, the callback
    Stopping installs other handlers. KeyboardInterrupt is not raised, because Lightning 2.6.6 converts
    KeyboardInterrupt to SystemExit and then ignores SIGINT.

    Yields:
        List to which each raised exception is appended. Pass it to `find_interruption`.
    """
    raised: list[Interrupted] = []

    def leave(signum: int, frame: FrameType | None) -> None:
        raised.append(Interrupted(signum=signum, checkpoint=None))
        raise raised[-1]

    # Only default handlers are replaced, because ranks have already installed other handlers.
    with handle_signals(leave, over=(signal.SIG_DFL, signal.default_int_handler)):
        yield raised


def find_interruption(error: BaseException, raised: Sequence[Interrupted]) -> BaseException:
    """Return the exception Interrupted that caused an error; the error itself if no signal caused the error.

    The search is needed because OmegaConf and Lightning may catch Interrupted and raise another error.

    Args:
        error: Caught exception.
        raised: Exceptions that the signal handler of `raise_on_signal` raised.
    """
    return next((cause for cause in chain_of(error) if any(cause is one for one in raised)), error)


def _is_interactive() -> bool:
    return "ipykernel" in sys.modules or getattr(sys, "ps1", None) is not None
