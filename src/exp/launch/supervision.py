"""Functions that wait until all ranks of a launch have ended.

If one rank fails, the other ranks are ended. A signal to this process is passed on to the ranks. A second signal kills
the ranks.
"""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

from exp.launch.failure import Failure, Kind, death, first_cause, read_failure, read_hang
from exp.launch.spawn import RankProcess
from exp.signals import handle_signals

POLL_SECONDS = 0.05
# Waiting times in seconds after a failure. SETTLE_SECONDS: for failures of other ranks. PEER_SECONDS: for the failure
# that caused a "peer" failure or a hang. LEAVE_SECONDS: for ranks to exit after SIGTERM.
SETTLE_SECONDS = 0.5
PEER_SECONDS = 2.0
LEAVE_SECONDS = 2.0
# Number of bytes that are read at the end of a log, and number of lines of a log in an error message.
LOG_BYTES, LOG_LINES = 20_000, 40


class _Collector:
    """A signal handler that appends each signal to the list `received`."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run in a list, and restore the previous handlers after the context.

    Outside the main thread, no signals are collected. A nested context yields the list of the outer context, so that
    the list contains all signals.
    """
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Collector) and threading.current_thread() is threading.main_thread():
        yield before.received
        return
    collector = _Collector()
    with handle_signals(collector):
        yield collector.received


class Grace:
    """The time limit for ranks to save their state and exit after a signal.

    The limit is needed because a rank may wait in a collective for a rank that hangs. During this wait, the rank cannot
    handle the signal, because Python runs signal handlers only between bytecode instructions.

    Args:
        seconds: Time limit in seconds. The limit starts again if files of checkpoints have grown when it passes.
        checkpoints: Folder of the checkpoints.
    """

    def __init__(self, *, seconds: float, checkpoints: Path) -> None:
        self.seconds = seconds
        self._checkpoints = checkpoints
        self._written: dict[str, tuple[int, int]] = {}
        self._ends: float | None = None

    def begin(self) -> None:
        """Start the time limit. Further calls have no effect."""
        if self._ends is None:
            self._written = self._file_sizes()
            self._ends = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Return whether the time limit has passed. If checkpoint files grew since its start, start the limit again."""
        if self._ends is None or time.monotonic() < self._ends:
            return False
        before, self._written = self._written, self._file_sizes()
        if self._written == before:
            return True
        self._ends = time.monotonic() + self.seconds
        return False

    def _file_sizes(self) -> dict[str, tuple[int, int]]:
        seen = {}
        for path in self._checkpoints.rglob("*"):
            with suppress(FileNotFoundError):  # a partial file was renamed
                status = path.stat()
                seen[str(path)] = (status.st_size, status.st_mtime_ns)
        return seen


def supervise(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace) -> Failure | None:
    """Wait until all ranks have ended. If a rank fails, end the other ranks.

    Args:
        ranks: Started ranks.
        exchange: Folder to which ranks write their failures.
        received: Signals that this process has received. The first signal is passed on to the ranks. A second signal
            kills the ranks.
        grace: Time limit for the ranks to exit after the first signal.

    Returns:
        The failure that ended the run. None: all ranks ended successfully.
    """
    passed_on = 0
    try:
        while any(rank.process.poll() is None for rank in ranks):
            if len(received) > passed_on:
                _signal_ranks(ranks, received[0] if passed_on == 0 else signal.SIGKILL)
                passed_on = len(received)
                grace.begin()
            if grace.is_over or any(rank.process.poll() not in (None, 0) for rank in ranks):
                break
            time.sleep(POLL_SECONDS)
        failures = _collect_failures(ranks, exchange=exchange, received=received, grace=grace)
        silent = [rank.rank for rank in ranks if rank.process.poll() is None]
        within = f"within {grace.seconds:g} s (launch.grace_seconds)"
        late = "\n".join(
            f"rank {rank} did not exit {within}, and was killed" for rank in (silent if grace.is_over else ())
        )
        if received:
            return _after_signal(failures, received[0], late=late)
        if not failures:
            return None
        cause = first_cause(failures, silent=silent)
        return dataclasses.replace(cause, detail=late) if cause.kind == "interrupted" else cause
    finally:
        _end(ranks)


def _collect_failures(
    ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace
) -> list[Failure]:
    """Wait for a short time after the first failure, and return the failures of all ranks.

    If all failures are interruptions, wait until all ranks have saved or the time limit has passed. If all failures are
    of the kinds "peer" and "hang", wait for PEER_SECONDS instead of SETTLE_SECONDS, because the rank that caused the
    failures may die later.
    """
    seen: set[Kind] = set()
    deadline = time.monotonic()
    signals = len(received)
    while True:
        kinds = {failure.kind for failure in _failures(ranks, exchange)}
        if kinds != seen:
            seen = kinds
            deadline = time.monotonic() + (PEER_SECONDS if kinds <= {"peer", "hang"} else SETTLE_SECONDS)
        if kinds == {"interrupted"}:
            grace.begin()
            is_late = grace.is_over
        else:
            is_late = time.monotonic() >= deadline
        running = any(rank.process.poll() is None for rank in ranks)
        if not running or is_late or len(received) > max(1, signals):
            return _failures(ranks, exchange)
        time.sleep(POLL_SECONDS)


def _after_signal(failures: Sequence[Failure], signum: int, *, late: str) -> Failure:
    """Return the failure of a run that received a signal.

    If a rank raised an error while saving, the failure is that error. Otherwise, it is an interruption.

    Args:
        failures: Failures of the ranks.
        signum: Number of the signal.
        late: Text of the failure about ranks that did not exit in time. Empty if all ranks exited.
    """
    errors = [failure for failure in failures if failure.kind in ("config", "known", "bug")]
    if errors:
        return first_cause(errors, silent=())
    saved = [failure.checkpoint for failure in failures if failure.kind == "interrupted" and failure.checkpoint]
    return Failure(
        rank=0,
        time=time.time(),
        kind="interrupted",
        reason=f"was interrupted by signal {signum}",
        detail=late,
        exit_status=128 + signum,
        signum=signum,
        checkpoint=saved[0] if saved else None,
    )


def _failures(ranks: Sequence[RankProcess], exchange: Path) -> list[Failure]:
    """Return the failures of all ranks that have ended with an error."""
    found = []
    for rank in ranks:
        returncode = rank.process.poll()
        if returncode in (None, 0):
            continue
        failure = read_failure(exchange, rank=rank.rank) or read_hang(exchange, rank=rank.rank)
        found.append(failure or death(rank=rank.rank, returncode=returncode, detail=end_of(rank.log)))
    return found


def _end(ranks: Sequence[RankProcess]) -> None:
    """Send SIGTERM to all running ranks. After LEAVE_SECONDS, kill the ranks and their child processes."""
    _signal_ranks(ranks, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        # The whole group is killed, because workers of a loader outlive a killed rank. macOS raises PermissionError for
        # a group of zombies.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()


def _signal_ranks(ranks: Sequence[RankProcess], signum: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def end_of(log: Path | None) -> str:
    """Return the last lines of a rank's log for an error message; "" if the log is missing or empty."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"the end of {log}:", *lines]) if lines else ""
