"""Watch the ranks of one launch until all have ended. A failure ends the others, and a signal is passed on once."""

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
# Time for the peers of a failed rank to report, and to leave after SIGTERM.
SETTLE_SECONDS = 0.5
PEER_SECONDS = 2.0
LEAVE_SECONDS = 2.0
# The end of a log that is read, and the part of it that an error shows. A stack of faulthandler has up to 100 lines.
LOG_BYTES, LOG_LINES = 20_000, 40


class _Collector:
    """A handler that keeps every signal."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


@contextmanager
def collect_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run, and restore the handlers at the end. Outside the main thread collect none.

    A nested call yields the list of the outer call, which therefore has every signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Collector) and threading.current_thread() is threading.main_thread():
        yield before.received
        return
    collector = _Collector()
    with handle_signals(collector):
        yield collector.received


class Grace:
    """The time that ranks have after a signal to save and to leave together.

    A rank that waits in a collective for a rank that hangs handles no signal, because its handlers run in Python.

    Args:
        seconds: Time after the signal, extended while files of a checkpoint grow.
        checkpoints: Folder of the checkpoints.
    """

    def __init__(self, *, seconds: float, checkpoints: Path) -> None:
        self.seconds = seconds
        self._checkpoints = checkpoints
        self._written: dict[str, tuple[int, int]] = {}
        self._ends: float | None = None

    def begin(self) -> None:
        """Begin the time, unless it has begun."""
        if self._ends is None:
            self._written = self._file_sizes()
            self._ends = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Return whether the time has begun and ended."""
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
    """Wait until every rank has ended. Return why the run failed, or None if it did not.

    Args:
        ranks: Started ranks.
        exchange: Folder to which ranks write their failures.
        received: Signals that this process has received. The first is passed on, the second kills the ranks.
        grace: Time that ranks have to leave after the first signal.
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
        failures += _early_exits(ranks, failures)
        cause = first_cause(failures, silent=silent)
        return dataclasses.replace(cause, detail=late) if cause.kind == "interrupted" else cause
    finally:
        _end(ranks)


def _collect_failures(
    ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace
) -> list[Failure]:
    """Return the failures of the ranks, after a moment for the others once one has failed.

    Interrupted ranks leave together when all have saved. A report about a peer may come before the peer's death.
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
    """Return the failure after a signal: an error while saving, or else an interruption."""
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
    """Return the failures of the ranks that have failed so far."""
    found = []
    for rank in ranks:
        returncode = rank.process.poll()
        if returncode in (None, 0):
            continue
        failure = read_failure(exchange, rank=rank.rank) or read_hang(exchange, rank=rank.rank)
        found.append(failure or death(rank=rank.rank, returncode=returncode, detail=end_of(rank.log)))
    return found


def _early_exits(ranks: Sequence[RankProcess], failures: Sequence[Failure]) -> list[Failure]:
    """Return the ranks that exited with status 0 if the others failed only because of a peer."""
    if any(failure.kind != "peer" for failure in failures):
        return []
    left = [rank for rank in ranks if rank.process.poll() == 0]
    return [death(rank=rank.rank, returncode=0, detail=end_of(rank.log)) for rank in left]


def _end(ranks: Sequence[RankProcess]) -> None:
    """End the running ranks with their children by SIGTERM and, two seconds later, SIGKILL. Leave no zombie."""
    _signal_ranks(ranks, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        # The whole session, because a loader's workers outlive a killed rank. On macOS a group of zombies is refused.
        with suppress(ProcessLookupError, PermissionError):
            os.killpg(rank.process.pid, signal.SIGKILL)
        rank.process.wait()


def _signal_ranks(ranks: Sequence[RankProcess], signum: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def end_of(log: Path | None) -> str:
    """Return the last lines of a rank's output, for a message. Return "" without any."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(max(0, file.seek(0, os.SEEK_END) - LOG_BYTES))
        lines = file.read().decode("utf-8", "replace").splitlines()[-LOG_LINES:]
    return "\n".join([f"the end of {log}:", *lines]) if lines else ""
