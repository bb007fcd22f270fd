"""The reason why a rank ended: the rank writes it as a JSON file, and the process that started the rank reads it.

A rank that dies ends its peers, which report "connection closed". The first cause is found among all reports.
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

# Messages of gloo, NCCL and torch's stores if a peer has ended or does not come (seen in torch 2.13).
PEER = re.compile(
    r"connection (closed|reset|refused)|broken pipe|timed out waiting|gloo/transport|socket ?timeout|"
    r"ncclRemoteError|ncclSystemError|remote process exited|wait timeout|watchdog caught|"
    r"collective operation timeout|store.*(timeout|timed out)",
    re.IGNORECASE,
)
# The exit status of a rank that could not write its failure: EX_IOERR of sysexits.h.
UNWRITABLE = 74
Kind = Literal["config", "known", "bug", "peer", "death", "hang", "interrupted"]
TIMEOUT = re.compile(r"timed? ?out|timeout", re.IGNORECASE)


@dataclass(frozen=True, kw_only=True)
class Failure:
    """The reason why one rank failed.

    Attributes:
        rank: The rank.
        time: Time of the failure in seconds since the epoch, on the clock of its machine.
        kind: config (an error in the config), known (an ExpError), bug (any other exception), peer (a collective that
            failed because of another rank), death (a signal, or an exit without a message), hang (a step took longer
            than runtime.step_timeout), interrupted.
        reason: The reason in one line, as the rest of a sentence about the rank.
        detail: A traceback, a stack or the end of a log. Empty for known errors.
        exit_status: Exit status of the rank.
        errors: Errors in the config, as mappings.
        signum: Signal that interrupted the rank.
        checkpoint: Checkpoint that an interrupted rank saved.
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
        """Return the exception that the parent raises for the failure."""
        if self.kind == "interrupted" and self.signum is not None:
            return Interrupted(signum=self.signum, checkpoint=self.checkpoint, detail=self.detail)
        if self.kind == "config" and self.errors:
            return ConfigError([ErrorDetails(**error) for error in self.errors])
        error = RankError(rank=self.rank, reason=self.reason, detail=self.detail)
        error.exit_status = self.exit_status
        return error


def failure_of(error: BaseException, *, rank: int) -> Failure:
    """Return the failure of a rank that an exception ends."""
    failure = partial(Failure, rank=rank, time=time.time())
    if isinstance(error, Interrupted):
        status, saved = error.exit_status, error.checkpoint
        return failure(kind="interrupted", reason=str(error), exit_status=status, signum=error.signum, checkpoint=saved)
    if isinstance(error, KeyboardInterrupt):
        return failure_of(Interrupted(signum=signal.SIGINT, checkpoint=None), rank=rank)
    if isinstance(error, UserCodeError):
        # Its cause decides the kind: another attempt may succeed, and a peer may have failed first.
        kind: Kind = "bug" if error.__cause__ is None else failure_of(error.__cause__, rank=rank).kind
        detail = redact(f"{error.what}\n{error.frames}".rstrip())
        return failure(kind=kind, reason=redact(f"failed with {error.cause}"), detail=detail)
    if isinstance(error, ExpError):
        errors = [dataclasses.asdict(error) for error in error.errors] if isinstance(error, ConfigError) else []
        kind = "config" if errors else "known"
        return failure(kind=kind, reason=f"failed: {error}", exit_status=error.exit_status, errors=errors)
    kind = "peer" if isinstance(error, RuntimeError) and PEER.search(str(error)) else "bug"
    message = redact(traceback.format_exception_only(error)[-1].strip()).splitlines()[0]
    detail = redact("".join(traceback.format_exception(error)).rstrip())
    return failure(kind=kind, reason=f"failed with {message}", detail=detail)


def death(*, rank: int, returncode: int, detail: str) -> Failure:
    """Return the failure of a rank that wrote none. returncode: As of subprocess, -9 after SIGKILL."""
    kind: Kind = "death"
    if returncode < 0:
        names = {int(one): one.name for one in signal.Signals}
        reason = f"was killed by {names.get(-returncode, f'signal {-returncode}')}"
        if returncode == -signal.SIGKILL:
            reason += " (the system kills a process when memory runs out)"
    elif returncode == UNWRITABLE:
        kind, reason = "known", "could not write why it failed, as on a full disk: see its output or its log"
    else:
        reason = f"ended with status {returncode} without a message"
    return Failure(rank=rank, time=time.time(), kind=kind, reason=reason, detail=detail)


def write_failure(failure: Failure, directory: Path) -> None:
    """Write a failure whole or not at all."""
    write_atomic(directory / f"rank{failure.rank}.json", json.dumps(dataclasses.asdict(failure)))


def read_failure(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure that a rank wrote. Return None if it wrote none."""
    path = directory / f"rank{rank}.json"
    if not path.is_file():
        return None
    return Failure(**json.loads(path.read_text(encoding="utf-8")))


def hang_file(directory: Path, *, rank: int) -> Path:
    """Return the file to which faulthandler writes the stacks of a rank that hangs."""
    return directory / f"rank{rank}.hang"


def read_hang(directory: Path, *, rank: int) -> Failure | None:
    """Return the failure of a rank that was ended because it hung. Return None for any other rank."""
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

    A death or a hang comes before a report, because peers report it before the parent sees it. Among reports the
    earliest counts. A failure because of a peer counts if there is no other. If a peer did not come, one of the silent
    ranks is named.

    Args:
        failures: At least one failure.
        silent: Ranks that had neither ended nor reported when the first failure was seen.
    """
    hangs = [failure for failure in failures if failure.kind == "hang"]
    deaths = [failure for failure in failures if failure.kind == "death"]
    reports = [failure for failure in failures if failure.kind in ("config", "known", "bug")]
    if hangs and not deaths:
        # A rank that waits for the others in a collective hangs, too. The stacks distinguish them.
        stacks = "\n".join(failure.detail for failure in hangs)
        return dataclasses.replace(min(hangs, key=lambda failure: failure.time), detail=stacks)
    if deaths or reports:
        return min(deaths or reports, key=lambda failure: failure.time)
    # After a signal to one rank its peers fail.
    first = min(failures, key=lambda failure: (failure.kind == "peer", failure.time))
    if first.kind == "peer" and silent and TIMEOUT.search(first.reason):
        names = ", ".join(map(str, silent))
        reason = f"does not answer (silent: {names}); rank {first.rank}, which waited for it, {first.reason}"
        return dataclasses.replace(first, rank=silent[0], reason=reason, detail="")
    return first
