"""How long a person has waited for a command: since its process began, the imports of the interpreter included."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager

# When the command began, by the clock of `now`; None where none is under way.
_began: float | None = None


def now() -> float:
    """Seconds since the machine began, those in which it slept included; elsewhere than on Linux since the epoch."""
    return time.clock_gettime(time.CLOCK_BOOTTIME) if sys.platform == "linux" else time.time()


def process_began(pid: int | None = None) -> float:
    """When a process began by the clock of `now`, a hundredth of a second early at most.

    pid: None for this one; where the system does not say it of this one, as in a container without /proc, it is now.
    """
    if sys.platform == "linux":
        try:
            with open(f"/proc/{'self' if pid is None else pid}/stat", encoding="utf-8", errors="replace") as file:
                words = file.read().rpartition(")")[2].split()
        except OSError:
            if pid is None:
                return now()
            raise
        return int(words[19]) / os.sysconf("SC_CLK_TCK")
    import psutil

    return float(psutil.Process(pid).create_time())


def began_at(moment: float) -> None:
    """Count from a moment: of the command that this process, which has begun before or after it, runs for another."""
    global _began
    _began = moment


@contextmanager
def counting() -> Iterator[None]:
    """Count while a command goes on: since its process began where exp is the program of that, else from now.

    Within another command that one's count goes on.
    """
    global _began
    if _began is not None:
        yield
        return
    program = getattr(sys.modules["__main__"], "__spec__", None)
    file = getattr(sys.modules["__main__"], "__file__", None) or ""
    is_exps = program.name.startswith("exp.") if program is not None else file.startswith(os.path.dirname(__file__))
    _began = process_began() if is_exps else now()
    try:
        yield
    finally:
        _began = None


def waited_seconds() -> float | None:
    """How long the command goes on; None where none is under way, as in a notebook."""
    return None if _began is None else now() - _began
