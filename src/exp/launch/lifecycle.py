"""Functions that run a rank in its process.

If the rank fails, its process writes the reason to a file. If the parent of the process ends, the process ends, too.
"""

from __future__ import annotations

import ctypes
import faulthandler
import logging
import os
import signal
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import NoReturn

from exp.errors import Interrupted
from exp.interpreter_exit import run_exit_functions
from exp.launch.failure import failure_of, hang_file, write_failure
from exp.launch.spawn import EXCHANGE, PARENT
from exp.output import survive_output_errors
from exp.signals import SUPERVISED, ending_signals, find_interruption, install_handler
from exp.strategies.process_group import meet
from exp.strategies.rank import ALONE, Rank, rank_of

PR_SET_PDEATHSIG = 1


def live(body: Callable[[Rank], None]) -> NoReturn:
    """Run a function in this process, which is one rank of a run, and end the process.

    The exit status is 0 on success, 1 after a failure, 2 after an error in the config, and 128 + n after signal n.

    The process ends by os._exit, because threads of collectives may prevent a normal exit or abort it (seen with
    DTensor).

    Args:
        body: Function to run. It is called with the rank.
    """
    status = 1
    with survive_output_errors():
        try:
            if PARENT in os.environ:
                end_with_parent(int(os.environ[PARENT]))
            status = _status_of(body)
        finally:
            leave(status)


def leave(status: int) -> NoReturn:
    """End this process by os._exit.

    Args:
        status: Exit status. If it is 0, the functions registered by atexit run first, such as uploads of libraries.
    """
    try:
        if status == 0:
            run_exit_functions()
    finally:
        logging.shutdown()
        with suppress(OSError):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(status)


def _status_of(body: Callable[[Rank], None]) -> int:
    rank = ALONE
    early: list[Interrupted] = []
    try:
        _install_first_handlers(early)
        rank = rank_of()
        if rank.world_size > 1 or PARENT in os.environ:
            os.environ[SUPERVISED] = "1"
        faulthandler.enable()
        body(rank)
        meet()
    except BaseException as error:
        return _report(find_interruption(error, early), rank=rank)
    return 0


def _report(error: BaseException, *, rank: Rank) -> int:
    """Report the error that ended this rank, and return the exit status.

    If exp's launcher started the rank, the error is written to a file for the launcher. The error is also printed on
    standard error, unless the launcher prints it on the same terminal.
    """
    failure = failure_of(error, rank=rank.global_rank)
    if EXCHANGE in os.environ:
        with suppress(OSError):  # on a full disk, the failure is only printed
            write_failure(failure, Path(os.environ[EXCHANGE]))
            if failure.rank == 0:
                return failure.exit_status  # the parent prints the error on the same terminal
    print(f"rank {failure.rank} {failure.reason}\n{failure.detail}".rstrip(), file=sys.stderr)
    return failure.exit_status


def hang_path(directory: Path, *, rank: Rank) -> Path:
    """Return the path of the file for the stacks of a rank that hangs.

    If exp's launcher started the rank, the launcher reads the file. Otherwise, the file is train.log.
    """
    if EXCHANGE in os.environ:
        return hang_file(Path(os.environ[EXCHANGE]), rank=rank.global_rank)
    return directory / "train.log"


def _install_first_handlers(early: list[Interrupted]) -> None:
    """Install signal handlers that raise Interrupted at once, because there is no state to save yet.

    The engine replaces these handlers when the training starts.

    Args:
        early: List to which the raised exceptions are appended.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        early.append(Interrupted(signum=signum, checkpoint=None))
        raise early[-1]

    install_handler(leave)
    # The signals are unblocked, because Ray starts processes with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())


def end_with_parent(parent: int) -> None:
    """Make this process end when its parent ends, even if the parent ends by SIGKILL.

    Args:
        parent: Process id of the parent.
    """
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have ended before the code above took effect.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
