"""The reason why a rank ended: written by the rank as one JSON file, read by the process that started it.

The first cause is found among several: a rank that dies takes its neighbours with it, and they say "connection closed".
"""

from __future__ import annotations

import dataclasses
import json
import re
import signal
import time
import traceback
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from exp.errors import ConfigError, ErrorDetails, ExpError, Interrupted, RankError, UserCodeError
from exp.files import write_atomic
from exp.redaction import redact

# Messages of gloo, NCCL and torch's stores about a rank that died or does not answer (torch 2.13).
NEIGHBOUR = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo/transport|socket ?timeout|"
    r"ncclRemoteError|ncclSystemError|remote process exited|wait timeout|watchdog caught|"
    r"collective operation timeout|store.*(timeout|timed out)",
    re.IGNORECASE,
)
# Exit status of a rank that cannot write its failure: EX_IOERR of sysexits.h.
UNWRITABLE = 74
Kind = Literal["config", "known", "bug", "neighbour", "death", "hang", "interrupted"]
TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why a rank failed.

    Attributes:
        time: Seconds since the epoch, by this machine's clock.
        kind: config (an error in the config), known (an ExpError), bug (any other exception), neighbour (a collective
            that failed because of another rank), death (a signal, or an exit without a message), hang (a step took
            longer than runtime.step_timeout), interrupted.
        detail: Traceback, stack or end of a log; empty for known errors.
    """

    rank: int
    time: float
    kind: Kind
    reason: str
    detail: str = ""
    exit_status: int = 1
    errors: Sequence[dict[str, Any]] = ()
    signum: int | None = None
    checkpoint: str | None = None

    def error(self) -> ExpError:
        """Return the exception that the parent raises for it."""
        if self.kind == "interrupted" and self.signum is not None:
            return Interrupted(signum=self.signum, checkpoint=self.checkpoint, detail=self.detail)
        if self.kind == "config" and self.errors:
            return ConfigError([ErrorDetails(**error) for error in self.errors])
        error = RankError(rank=self.rank, reason=self.reason, detail=self.detail)
        error.exit_status = self.exit_status
        return error


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Return the failure of a rank that ends with an exception."""
    now = time.time()
    if isinstance(error, Interrupted):
        return Failure(
            rank=rank,
            time=now,
            kind="interrupted",
            reason=str(error),
            exit_status=error.exit_status,
            signum=error.signum,
            checkpoint=error.checkpoint,
        )
    if isinstance(error, KeyboardInterrupt):
        return failure_of(Interrupted(signum=signal.SIGINT, checkpoint=None), rank=rank)
    if isinstance(error, UserCodeError):
        # Treated like its cause: a restart may succeed, and another rank may be the cause.
        kind: Kind = "bug" if error.__cause__ is None else failure_of(error.__cause__, rank=rank).kind
        reason, detail = redact(f"failed with {error.cause}"), redact(f"{error.what}\n{error.frames}".rstrip())
        return Failure(rank=rank, time=now, kind=kind, reason=reason, detail=detail)
    if isinstance(error, ExpError):
        errors = [dataclasses.asdict(error) for error in error.errors] if isinstance(error, ConfigError) else []
        kind = "config" if errors else "known"
        reason = f"failed: {error}"
        return Failure(rank=rank, time=now, kind=kind, reason=reason, exit_status=error.exit_status, errors=errors)
    text = redact("".join(traceback.format_exception(error)).rstrip())
    said = redact(traceback.format_exception_only(error)[-1].strip())
    return Failure(
        rank=rank,
        time=now,
        kind="neighbour" if isinstance(error, RuntimeError) and NEIGHBOUR.search(str(error)) else "bug",
        reason=f"failed with {said.splitlines()[0]}",
        detail=text,
    )


def death(*, rank: int, returncode: int, detail: str) -> Failure:
    """Return the failure of a rank without a report. returncode: That of subprocess, -9 for a killed rank."""
    if returncode < 0:
        number = -returncode
        reason = f"was killed by {_signal_name(number)}"
        if number == signal.SIGKILL:
            reason += " (the system does so when the memory is used up)"
    elif returncode == UNWRITABLE:
        reason = "could not write why it failed, as on a full disk: its output above, or its log, says it"
        return Failure(rank=rank, time=time.time(), kind="known", reason=reason, detail=detail)
    else:
        reason = f"ended with status {returncode} without a word"
    return Failure(rank=rank, time=time.time(), kind="death", reason=reason, detail=detail)


def write_failure(failure: Failure, directory: Path) -> None:
    """Write a failure atomically."""
    write_atomic(directory / f"rank{failure.rank}.json", json.dumps(dataclasses.asdict(failure)))


def read_failure(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure that a rank wrote, or None."""
    path = directory / f"rank{rank}.json"
    if not path.is_file():
        return None
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def hang_file(directory: Path, *, rank: int) -> Path:
    """Return the file to which faulthandler writes the stacks of a rank that hangs."""
    return directory / f"rank{rank}.hang"


def read_hang(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure of a rank that was ended because it hung; None for any other rank."""
    path = hang_file(directory, rank=rank)
    stacks = path.read_text(encoding="utf-8", errors="replace").rstrip() if path.is_file() else ""
    if not stacks:
        return None
    reason = (
        "failed: it hangs. A step took longer than runtime.step_timeout. The stacks of all threads are in train.log. "
        "If the step is slow and does not hang, raise runtime.step_timeout"
    )
    return Failure(rank=rank, time=path.stat().st_mtime, kind="hang", reason=reason, detail=f"rank {rank}:\n{stacks}")


def first_cause(failures: Sequence[Failure], *, silent: Sequence[int]) -> Failure:
    """Return the failure that caused the others.

    A death or a hang comes before reports, because other ranks report it before the parent can see it. Then comes the
    earliest report, and last the failure of a collective. If a collective timed out, a silent rank is the cause.

    Args:
        silent: Ranks that were running without a report when the first failure was seen.
    """
    hangs = [failure for failure in failures if failure.kind == "hang"]
    deaths = [failure for failure in failures if failure.kind == "death"]
    reports = [failure for failure in failures if failure.kind in ("config", "known", "bug")]
    if hangs and not deaths:
        # Ranks that wait in a collective hang as well. The stacks show the difference.
        stacks = "\n".join(failure.detail for failure in hangs)
        return dataclasses.replace(min(hangs, key=lambda failure: failure.time), detail=stacks)
    if deaths or reports:
        return min(deaths or reports, key=lambda failure: failure.time)
    # A rank that a signal ended is the cause of failed collectives.
    first = min(failures, key=lambda failure: (failure.kind == "neighbour", failure.time))
    if first.kind == "neighbour" and silent and TIMEOUT.search(first.reason):
        names = ", ".join(str(rank) for rank in silent)
        return dataclasses.replace(
            first,
            rank=silent[0],
            reason=f"does not answer (silent: {names}); rank {first.rank} waited for it in vain, and {first.reason}",
            detail="",
        )
    return first


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:
        return f"signal {number}"
