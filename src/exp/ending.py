"""Which signals end a run, and how it goes on without the terminal that it was started from."""

from __future__ import annotations

import errno
import os
import signal
import termios
from typing import Any

ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


def heeded() -> tuple[int, ...]:
    """The signals that end a run: Ctrl-C, a scheduler's, and a closed terminal's, which `nohup` lets it ignore."""
    is_kept = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(signum for signum in ENDING if not (is_kept and signum == signal.SIGHUP))


def heed(handler: Any) -> dict[int, Any]:
    """Installs a handler for the signals that end a run. Returns: the handlers that were there before."""
    return {signum: signal.signal(signum, handler) for signum in heeded()}


def leave_closed_terminal() -> None:
    """Lets what is still printed fall away where the terminal is gone: a write to it fails, and would end the run."""
    for descriptor in (1, 2):
        try:
            termios.tcgetattr(descriptor)
        except termios.error as error:
            if error.args[0] == errno.EIO:
                nowhere = os.open(os.devnull, os.O_WRONLY)
                os.dup2(nowhere, descriptor)
                os.close(nowhere)
