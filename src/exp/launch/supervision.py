"""Watch the ranks of one launch until all have ended: a failure ends the others, a signal is passed on once."""

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
# Neighbours of a failed rank get so long to say what they saw, and so long after SIGTERM to leave.
SETTLE_SECONDS = 0.5
COMPLAINT_SECONDS = 2.0
LEAVE_SECONDS = 2.0
LOG_TAIL_LINES = 20
# Of a stack that faulthandler writes, the innermost frames; a line that names the cause comes before them.
STACK_FRAMES = 5


class _Collector:
    """A handler that keeps every signal."""

    def __init__(self) -> None:
        self.received: list[int] = []

    def __call__(self, signum: int, frame: FrameType | None) -> None:
        self.received.append(signum)


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collect the signals that end a run for `supervise`, and put the handlers back; none outside the main thread.

    Inside another of these it is that one's list, so that whoever asked first hears of every signal.
    """
    before = signal.getsignal(signal.SIGTERM)
    if isinstance(before, _Collector) and threading.current_thread() is threading.main_thread():
        yield before.received
        return
    collector = _Collector()
    with handle_signals(collector):
        yield collector.received


class Grace:
    """The time that ranks have after a signal, to save and to leave together; a second one ends it at once.

    A rank that waits in a collective for one that hangs hears no signal, for its handlers are Python's.

    seconds: from the signal on, and again from each moment at which a file of a checkpoint grew.
    checkpoints: the folder in which they are written.
    """

    def __init__(self, *, seconds: float, checkpoints: Path) -> None:
        self.seconds = seconds
        self._checkpoints = checkpoints
        self._written: dict[str, tuple[int, int]] = {}
        self._ends: float | None = None

    def begin(self) -> None:
        """Begin now; a second call changes nothing."""
        if self._ends is None:
            self._written = self._seen()
            self._ends = time.monotonic() + self.seconds

    @property
    def is_over(self) -> bool:
        """Return whether it has begun, and ended."""
        if self._ends is None or time.monotonic() < self._ends:
            return False
        before, self._written = self._written, self._seen()
        if self._written == before:
            return True
        self._ends = time.monotonic() + self.seconds
        return False

    def _seen(self) -> dict[str, tuple[int, int]]:
        seen = {}
        for path in self._checkpoints.rglob("*"):
            with suppress(FileNotFoundError):  # a whole file takes the place of the one that was written
                status = path.stat()
                seen[str(path)] = (status.st_size, status.st_mtime_ns)
        return seen


def supervise(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace) -> Failure | None:
    """Wait until every rank has ended, and say why the run failed; None where it did not.

    received: signals that came to this process; the first is passed on, the second ends the ranks at once.
    grace: how long ranks have to leave after the first.
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
        failures = _hear(ranks, exchange=exchange, received=received, grace=grace)
        silent = [rank.rank for rank in ranks if rank.process.poll() is None]
        within = f"within {grace.seconds:g} s (launch.grace_seconds)"
        late = "\n".join(
            f"rank {rank} did not leave {within}, and was killed" for rank in (silent if grace.is_over else ())
        )
        if received:
            return _after_signal(failures, received[0], late=late)
        if not failures:
            return None
        failures += _left(ranks, failures)
        cause = first_cause(failures, silent=silent)
        return dataclasses.replace(cause, detail=late) if cause.kind == "interrupted" else cause
    finally:
        _end(ranks)


def _hear(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int], grace: Grace) -> list[Failure]:
    """Hear what the ranks that ended have to say, once one of them has ended otherwise than well.

    The others get a moment: interrupted ranks leave together when all have saved, and a complaint about a neighbour may
    come before the death that it is about.
    """
    heard: set[Kind] = set()
    deadline = time.monotonic()
    signals = len(received)
    while True:
        failures = _failures(ranks, exchange)
        kinds = {failure.kind for failure in failures}
        if kinds != heard:
            heard = kinds
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
    """Say what a signal came to: a failure while saving is told, everything else is an interruption."""
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
    """Return the failures of the ranks that have ended otherwise than well."""
    found = []
    for rank in ranks:
        returncode = rank.process.poll()
        if returncode in (None, 0):
            continue
        failure = read_failure(exchange, rank=rank.rank) or read_hang(exchange, rank=rank.rank)
        failure = failure or death(rank=rank.rank, returncode=returncode, detail=end_of(rank.log))
        found.append(failure)
    return found


def _left(ranks: Sequence[RankProcess], failures: Sequence[Failure]) -> list[Failure]:
    """Return the ranks that ended as if all were done, where the others say no more than that a neighbour is gone."""
    if any(failure.kind != "neighbour" for failure in failures):
        return []
    left = [rank for rank in ranks if rank.process.poll() == 0]
    return [death(rank=rank.rank, returncode=0, detail=end_of(rank.log)) for rank in left]


def _end(ranks: Sequence[RankProcess]) -> None:
    """End what still runs, with its children: SIGTERM, two seconds, SIGKILL. Leaves no zombie."""
    _signal_ranks(ranks, signal.SIGTERM)
    deadline = time.monotonic() + LEAVE_SECONDS
    while any(rank.process.poll() is None for rank in ranks) and time.monotonic() < deadline:
        time.sleep(POLL_SECONDS)
    for rank in ranks:
        # The whole session: a loader's workers outlive a rank that was killed.
        try:
            os.killpg(rank.process.pid, signal.SIGKILL)
        except ProcessLookupError:
            pass
        except PermissionError:  # macOS says so of a group whose last member is a zombie
            pass
        rank.process.wait()


def _signal_ranks(ranks: Sequence[RankProcess], signum: int) -> None:
    for rank in ranks:
        if rank.process.poll() is None:
            rank.process.send_signal(signum)


def end_of(log: Path | None) -> str:
    """The last lines of what a rank printed, for a message; empty where there is nothing."""
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
