"""The life of a rank: it ends with its parent, reports its failure, and waits for the others at exit."""

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
from exp.launch.failure import UNWRITABLE, Failure, failure_of, hang_file, write_failure
from exp.launch.spawn import EXCHANGE, PARENT
from exp.output import survive_output_errors
from exp.signals import SUPERVISED, ending_signals, find_interruption, install_handler
from exp.strategies.process_group import meet
from exp.strategies.rank import ALONE, Rank, rank_of

PR_SET_PDEATHSIG = 1


def live(body: Callable[[Rank], None]) -> NoReturn:
    """Run `body` as this process's rank, and exit.

    Exit status: 0 success, 1 failure, 2 an error in the config, 129, 130 and 143 interrupted with the state saved. The
    process exits by os._exit: threads of collectives may block an interpreter's exit, or abort it (with DTensor).
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
    """Exit by os._exit. After a success the exit functions of libraries run, such as uploads and flushes."""
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
        return _report_end(find_interruption(error, early), rank=rank)
    return 0


def _report_end(error: BaseException, *, rank: Rank) -> int:
    """Report why this rank ends, and return its exit status."""
    failure = failure_of(error, rank=rank.global_rank)
    try:
        _report(failure, error)
    except OSError as second:
        print(f"rank {failure.rank} {failure.reason}\nIt cannot write that down: {second}", file=sys.stderr)
        return UNWRITABLE
    return failure.exit_status


def _report(failure: Failure, error: BaseException) -> None:
    """Write a failure to the file of exp's launcher or torchrun, and print it."""
    if EXCHANGE in os.environ:
        write_failure(failure, Path(os.environ[EXCHANGE]))
        if failure.rank == 0:
            return  # the parent prints it on the same terminal
    elif "TORCHELASTIC_ERROR_FILE" in os.environ and isinstance(error, Exception):
        from torch.distributed.elastic.multiprocessing.errors import get_error_handler

        handler = get_error_handler()
        handler.initialize()
        handler.record_exception(error)
    print(f"rank {failure.rank} {failure.reason}\n{failure.detail}".rstrip(), file=sys.stderr)


def hang_path(directory: Path, *, rank: Rank) -> Path:
    """Return the file for the stacks of a rank that hangs: a file of exp's launcher, or train.log."""
    if EXCHANGE in os.environ:
        return hang_file(Path(os.environ[EXCHANGE]), rank=rank.global_rank)
    return directory / "train.log"


def _install_first_handlers(early: list[Interrupted]) -> None:
    """End a rank at a signal until the engine installs its handlers: there is nothing to save.

    Args:
        early: List to which the raised exceptions are appended.
    """

    def leave(signum: int, frame: FrameType | None) -> None:
        early.append(Interrupted(signum=signum, checkpoint=None))
        raise early[-1]

    install_handler(leave)
    # Processes of Ray start others with SIGINT blocked.
    signal.pthread_sigmask(signal.SIG_UNBLOCK, ending_signals())


def end_with_parent(parent: int) -> None:
    """Let this process end if its parent is killed."""
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, int(signal.SIGKILL), 0, 0, 0)
    else:
        threading.Thread(target=_watch, args=(parent,), daemon=True).start()
    # The parent may have died before the call above.
    if os.getppid() != parent:
        os._exit(1)


def _watch(parent: int) -> None:
    while os.getppid() == parent:
        time.sleep(1.0)
    os._exit(1)
