"""Watches the ranks of one launch until all have ended: a failure ends the others, a signal is passed on once."""

from __future__ import annotations

import dataclasses
import os
import signal
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from exp.ending import heed, leave_closed_terminal
from exp.engine.failure import Failure, death, first_cause, read_failure
from exp.engine.spawn import RankProcess

POLL_SECONDS = 0.05
# Neighbours of a failed rank get so long to say what they saw, and so long after SIGTERM to leave.
SETTLE_SECONDS = 0.5
COMPLAINT_SECONDS = 2.0
LEAVE_SECONDS = 2.0
# Ranks that were interrupted leave together, after the last of them has saved.
TOGETHER_SECONDS = 60.0
LOG_TAIL_LINES = 20


@contextmanager
def collected_signals() -> Iterator[list[int]]:
    """Collects the signals that end a run for `supervise`, and puts the handlers back; none outside the main thread."""
    received: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield received
        return
    before: dict[int, Any] = {}

    def collect(signum: int, frame: Any) -> None:
        leave_closed_terminal()
        received.append(signum)

    try:
        before = heed(collect)
        yield received
    finally:
        for signum, handler in before.items():
            signal.signal(signum, handler)


def supervise(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int]) -> Failure | None:
    """Waits until every rank has ended, and says why the run failed; None where it did not.

    received: signals that came to this process; the first is passed on, the second ends the ranks at once.
    """
    passed_on = 0
    try:
        while any(rank.process.poll() is None for rank in ranks):
            if len(received) > passed_on:
                _signal_ranks(ranks, received[0] if passed_on == 0 else signal.SIGKILL)
                passed_on = len(received)
            if any(rank.process.poll() not in (None, 0) for rank in ranks):
                break
            time.sleep(POLL_SECONDS)
        failures = _hear(ranks, exchange=exchange, received=received)
        silent = [rank.rank for rank in ranks if rank.process.poll() is None]
        if received:
            return _after_signal(failures, received[0])
        if not failures:
            return None
        cause = first_cause(failures, silent=silent)
        if cause.rank in silent:
            return dataclasses.replace(cause, detail=_stack(ranks[cause.rank], exchange))
        return cause
    finally:
        _end(ranks)


def _hear(ranks: Sequence[RankProcess], *, exchange: Path, received: Sequence[int]) -> list[Failure]:
    """What the ranks that ended have to say, once one of them has ended otherwise than well.

    The others get a moment: interrupted ranks leave together when all have saved, and a complaint about a neighbour may
    come before the death that it is about.
    """
    heard: set[str] = set()
    deadline = time.monotonic()
    signals = len(received)
    while True:
        failures = _failures(ranks, exchange)
        kinds = {failure.kind for failure in failures}
        if kinds != heard:
            heard = kinds
            deadline = time.monotonic() + _patience(kinds)
        running = any(rank.process.poll() is None for rank in ranks)
        if not running or time.monotonic() >= deadline or len(received) > max(1, signals):
            return _failures(ranks, exchange)
        time.sleep(POLL_SECONDS)


def _patience(kinds: set[str]) -> float:
    if kinds == {"interrupted"}:
        return TOGETHER_SECONDS
    return COMPLAINT_SECONDS if kinds == {"neighbour"} else SETTLE_SECONDS


def _after_signal(failures: Sequence[Failure], signum: int) -> Failure | None:
    """What a signal came to: a failure while saving is told, everything else is an interruption."""
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
        exit_status=128 + signum,
        signum=signum,
        checkpoint=saved[0] if saved else None,
    )


def _failures(ranks: Sequence[RankProcess], exchange: Path) -> list[Failure]:
    """Of the ranks that have ended otherwise than well."""
    found = []
    for rank in ranks:
        returncode = rank.process.poll()
        if returncode in (None, 0):
            continue
        failure = read_failure(exchange, rank=rank.rank)
        found.append(failure or death(rank=rank.rank, returncode=returncode, detail=_tail(rank.log)))
    return found


def _end(ranks: Sequence[RankProcess]) -> None:
    """Ends what still runs, with its children: SIGTERM, two seconds, SIGKILL. Leaves no zombie."""
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


def _stack(rank: RankProcess, exchange: Path) -> str:
    """Where a rank hangs: it writes its stack on SIGUSR2, whatever it is doing."""
    path = exchange / f"rank{rank.rank}.stack"
    rank.process.send_signal(signal.SIGUSR2)
    time.sleep(SETTLE_SECONDS)
    return path.read_text(encoding="utf-8", errors="replace").rstrip() if path.is_file() else ""


def _tail(log: Path | None) -> str:
    if log is None or not log.is_file():
        return ""
    with log.open("rb") as file:
        file.seek(0, os.SEEK_END)
        file.seek(max(0, file.tell() - 20_000))
        lines = file.read().decode("utf-8", "replace").splitlines()[-LOG_TAIL_LINES:]
    return "\n".join([f"the end of {log}:", *lines]) if lines else ""
