"""Watches the ranks of a launch until all have ended: a failure ends the others, a signal is passed on once."""

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
# Time for the other ranks to report after a failure, and to exit after SIGTERM, in seconds.
SETTLE_SECONDS = 0.5
COMPLAINT_SECONDS = 2.0
LEAVE_SECONDS = 2.0
LOG_TAIL_LINES = 20
# Innermost frames of a stack of faulthandler, after a line with the cause.
STACK_FRAMES = 5


class _Collector:
    """A handler that records every signal."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run, for `supervise`. Outside the main thread there are none.

    A nested context yields the list of the outer one, so that the outer one sees every signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Collector) and threading.current_thread() is threading.main_thread():
        yield before.received
        return
    collector = _Collector()
    with handle_signals(collector):
        yield collector.received


class Grace:
    """The time that ranks have to save and exit after a signal. A second signal ends it.

    A rank that waits in a collective for a hanging rank cannot handle signals, because its handlers are in Python.

    Args:
        seconds: Time after the signal, extended whenever a file of a checkpoint grows, in seconds.
        checkpoints: Folder of the checkpoints.
    """

    def __init__(self, *, seconds: float, checkpoints: Path) -> None:
        self.seconds = seconds
        self._checkpoints = checkpoints
        self._written: dict[str, tuple[int, int]] = {}
        self._ends: float | None = None

    def begin(self) -> None:
        """Begin now. A second call has no effect."""
        if self._ends is None:
            self._written = self._file_sizes()
            self._ends = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Return whether the time has begun and is over."""
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
            with suppress(FileNotFoundError):  # a finished file replaces the partial one
                status = path.stat()
                seen[str(path)] = (status.st_size, status.st_mtime_ns)
        return seen


def supervise(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace) -> Failure | None:
    """Wait until every rank has ended, and return the cause of a failure, or None.

    Args:
        received: Signals to this process. The first one is passed on, the second one ends the ranks.
        grace: Time to exit after the first signal.
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
        failures += _ranks_that_left(ranks, failures)
        cause = first_cause(failures, silent=silent)
        return dataclasses.replace(cause, detail=late) if cause.kind == "interrupted" else cause
    finally:
        _end(ranks)


def _collect_failures(
    ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace
) -> list[Failure]:
    """Return the failures of the ranks after the first rank failed.

    The other ranks get some time: interrupted ranks exit together when all have saved, and a failed collective may be
    reported before the death of the rank that caused it.
    """
    known: set[Kind] = set()
    deadline = time.monotonic()
    signals = len(received)
    while True:
        failures = _failures(ranks, exchange)
        kinds = {failure.kind for failure in failures}
        if kinds != known:
            known = kinds
            deadline = time.monotonic() + (COMPLAINT_SECONDS if kinds <= {"neighbour", "hang"} else SETTLE_SECONDS)
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
    """Return the failure after a signal: an error while saving, or an interruption."""
    errors = [failure for failure in failures if failure.kind in ("config", "known", "bug")]
    if errors:
        return first_cause(errors, silent=())
    interrupted = [failure for failure in failures if failure.kind == "interrupted"]
    saved = [failure.checkpoint for failure in interrupted if failure.checkpoint]
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
    """Return the failures of the ranks that have failed."""
    found = []
    for rank in ranks:
        returncode = rank.process.poll()
        if returncode in (None, 0):
            continue
        failure = read_failure(exchange, rank=rank.rank) or read_hang(exchange, rank=rank.rank)
        failure = failure or death(rank=rank.rank, returncode=returncode, detail=end_of(rank.log))
        found.append(failure)
    return found


def _ranks_that_left(ranks: Sequence[RankProcess], failures: Sequence[Failure]) -> list[Failure]:
    """Return failures for ranks that exited successfully, if all others only report failed collectives."""
    if any(failure.kind != "neighbour" for failure in failures):
        return []
    left = [rank for rank in ranks if rank.process.poll() == 0]
    return [death(rank=rank.rank, returncode=0, detail=end_of(rank.log)) for rank in left]


def _end(ranks: Sequence[RankProcess]) -> None:
    """End the running ranks with their children: SIGTERM, two seconds, SIGKILL. Leave no zombies."""
    _signal_ranks(ranks, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        # The whole session, because a loader's workers outlive a killed rank.
        try:
            os.killpg(rank.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:  # macOS raises it for a group of zombies
            pass
        rank.process.wait()


def _signal_ranks(ranks: Sequence[RankProcess], signum: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def end_of(log: Path | None) -> str:
    """Return the last lines of a rank's output for a message, or an empty text."""
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 20_000))
        lines = _shortened_stacks(file.read().decode("utf-8", "replace").splitlines())[-LOG_TAIL_LINES:]
    return "\n".join([f"the end of {log}:", *lines]) if lines else ""


def _shortened_stacks(lines: Sequence[str]) -> list[str]:
    kept, frames = [], 0
    for line in lines:
        frames = frames + 1 if line.startswith('  File "') else 0
        if frames <= STACK_FRAMES and not line.startswith("Extension modules: "):
            kept.append(line)
    return kept
