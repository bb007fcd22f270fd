"""The reason why a rank failed.

A rank writes the reason to a JSON file. The process that started the rank reads the file. If one rank dies, all other
ranks fail with "connection closed". Therefore, `first_cause` searches the failures of all ranks for the original cause.
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
from functools import partial
from pathlib import Path
from typing import Any, Literal

from exp.errors import ConfigError, ErrorDetails, ExpError, Interrupted, RankError, UserCodeError
from exp.files import write_atomic
from exp.redaction import redact

# Messages of gloo, NCCL and torch's stores if another rank has ended or does not respond (seen in torch 2.13).
PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo/transport|socket ?timeout|"
    r"ncclRemoteError|ncclSystemError|remote process exited|wait timeout|watchdog caught|"
    r"collective operation timeout|store.*(timeout|timed out)",
    re.IGNORECASE,
)
Kind = Literal["config", "known", "bug", "peer", "death", "hang", "interrupted"]
TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why one rank failed.

    Attributes:
        rank: Global rank.
        time: Time of the failure in seconds since the epoch, by the clock of the rank's machine.
        kind: Kind of failure.
            "config": an error in the config.
            "known": another ExpError.
            "bug": any other exception.
            "peer": a collective failed because of another rank.
            "death": the rank was killed, or exited without a message.
            "hang": a step took longer than runtime.step_timeout.
            "interrupted": a signal ended the run.
        reason: Reason in one line. It continues a sentence that begins with "rank 3", for example.
        detail: Traceback, stack or end of a log. Empty for known errors.
        exit_status: Exit status of the rank.
        errors: Errors in the config. Each dict has the fields of ErrorDetails.
        signum: Signal that interrupted the rank. None: the rank was not interrupted.
        checkpoint: Path of the checkpoint that an interrupted rank saved. None: the rank saved no checkpoint.
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
        """Return the exception for this failure. The process that started the ranks raises the exception."""
        if self.kind == "interrupted" and self.signum is not None:
            return Interrupted(signum=self.signum, checkpoint=self.checkpoint, detail=self.detail)
        if self.kind == "config" and self.errors:
            return ConfigError([ErrorDetails(**error) for error in self.errors])
        error = RankError(rank=self.rank, reason=self.reason, detail=self.detail)
        error.exit_status = self.exit_status
        return error


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Return a Failure for the exception that ended a rank."""
    failure = partial(Failure, rank=rank, time=time.time())
    if isinstance(error, Interrupted):
        status, saved = error.exit_status, error.checkpoint
        return failure(kind="interrupted", reason=str(error), exit_status=status, signum=error.signum, checkpoint=saved)
    if isinstance(error, KeyboardInterrupt):
        return failure_of(Interrupted(signum=signal.SIGINT, checkpoint=None), rank=rank)
    if isinstance(error, UserCodeError):
        # The kind is that of the cause. For example, the kind "peer" means that a restart may succeed.
        kind: Kind = "bug" if error.__cause__ is None else failure_of(error.__cause__, rank=rank).kind
        detail = redact(f"{error.what}\n{error.frames}".rstrip())
        return failure(kind=kind, reason=redact(f"failed with {error.cause}"), detail=detail)
    if isinstance(error, ExpError):
        errors = [dataclasses.asdict(one) for one in error.errors] if isinstance(error, ConfigError) else []
        kind = "config" if errors else "known"
        return failure(kind=kind, reason=f"failed: {error}", exit_status=error.exit_status, errors=errors)
    kind = "peer" if isinstance(error, RuntimeError) and PEER.search(str(error)) else "bug"
    message = redact(traceback.format_exception_only(error)[-1].strip()).splitlines()[0]
    detail = redact("".join(traceback.format_exception(error)).rstrip())
    return failure(kind=kind, reason=f"failed with {message}", detail=detail)


def death(*, rank: int, returncode: int, detail: str) -> Failure:
    """Return the failure of a rank that died without writing a failure.

    Args:
        rank: Global rank.
        returncode: Return code as defined by subprocess, such as -9 after SIGKILL.
        detail: Last lines of the output of the rank.
    """
    if returncode < 0:
        names = {int(one): one.name for one in signal.Signals}
        reason = f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
        if returncode == -signal.SIGKILL:
            reason += " (the system kills a process when memory runs out)"
    else:
        reason = f"ended with status {returncode} without a message"
    return Failure(rank=rank, time=time.time(), kind="death", reason=reason, detail=detail)


def write_failure(failure: Failure, directory: Path) -> None:
    """Write the failure of a rank atomically to the folder that the launcher reads."""
    write_atomic(directory / f"rank{failure.rank}.json", json.dumps(dataclasses.asdict(failure)))


def read_failure(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure that a rank wrote; None if the file does not exist."""
    path = directory / f"rank{rank}.json"
    if not path.is_file():
        return None
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def hang_file(directory: Path, *, rank: int) -> Path:
    """Return the path of the file to which faulthandler writes the stacks of a rank that hangs."""
    return directory / f"rank{rank}.hang"


def read_hang(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure of a rank that was killed because a step hung; None for any other rank."""
    path = hang_file(directory, rank=rank)
    stacks = path.read_text(encoding="utf-8", errors="replace").rstrip() if path.is_file() else ""
    if not stacks:
        return None
    reason = (
        "failed: a step took longer than runtime.step_timeout. The stacks of all threads are in train.log. "
        "If the step is slow but does not hang, increase runtime.step_timeout"
    )
    return Failure(rank=rank, time=path.stat().st_mtime, kind="hang", reason=reason, detail=f"rank {rank}:\n{stacks}")


def first_cause(failures: Sequence[Failure], *, silent: Sequence[int]) -> Failure:
    """Return the failure that caused the other failures.

    The function returns the first of these failures that exists:

    1. The earliest death, or else the earliest hang. A death causes exceptions in other ranks.
    2. The earliest exception: "config", "known" or "bug".
    3. The earliest interruption.
    4. The earliest "peer". If its rank waited for another rank until a timeout, the failure names the silent rank.

    Args:
        failures: Failures of ranks, at least one.
        silent: Ranks that were running without a failure when the first failure was detected.
    """
    hangs = [failure for failure in failures if failure.kind == "hang"]
    deaths = [failure for failure in failures if failure.kind == "death"]
    reports = [failure for failure in failures if failure.kind in ("config", "known", "bug")]
    if hangs and not deaths:
        # All stacks are shown, because ranks that wait for the hanging rank in a collective also count as hanging.
        stacks = "\n".join(failure.detail for failure in hangs)
        return dataclasses.replace(min(hangs, key=lambda failure: failure.time), detail=stacks)
    if deaths or reports:
        return min(deaths or reports, key=lambda failure: failure.time)
    # Interruptions precede "peer" failures, because a signal to one rank makes the other ranks fail.
    first = min(failures, key=lambda failure: (failure.kind == "peer", failure.time))
    if first.kind == "peer" and silent and TIMEOUT.search(first.reason):
        names = ", ".join(map(str, silent))
        reason = f"does not respond (silent ranks: {names}). Rank {first.rank} waited for this rank and {first.reason}"
        return dataclasses.replace(first, rank=silent[0], reason=reason, detail="")
    return first
