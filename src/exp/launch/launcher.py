"""Launcher that starts a process for each rank of a frozen run, and waits until all ranks have ended.

Each rank runs `python -m exp.worker DIRECTORY`, which reads the frozen config of the run directory. A run for which
`in_process` returns True can train in the current process instead.
"""

from __future__ import annotations

import dataclasses
import itertools
import logging
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Sequence
from pathlib import Path

from exp.errors import Interrupted, RunError
from exp.launch.failure import Failure
from exp.launch.spawn import start_ranks
from exp.launch.supervision import Grace, collect_signals, supervise
from exp.strategies.placement import Placement

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
# Kinds of failures after which ranks are not restarted, because a restart would fail again or a user ended the run.
FINAL = ("config", "known", "hang", "interrupted")

log = logging.getLogger(__name__)


def in_process(placement: Placement, *, max_restarts: int = 0, step_timeout: float | None = None) -> bool:
    """Return whether a run can train in this process.

    This is possible if the run has one rank, no process group, no restarts and no time limit of a step.

    Args:
        placement: Ranks of the run.
        max_restarts: Value of launch.max_restarts.
        step_timeout: Value of runtime.step_timeout. If this key is set, a launcher has to report a process that hangs.
    """
    return placement.world_size == 1 and placement.backend is None and max_restarts == 0 and step_timeout is None


def launch(
    directory: Path | str,
    *,
    placement: Placement,
    max_restarts: int = 0,
    threads: int | None = None,
    grace_seconds: float = 30.0,
    worker: str = "exp.worker",
    resume: Path | None = None,
    allow: Sequence[str] = (),
) -> None:
    """Start all ranks of a frozen run on this machine, and wait until all have ended successfully.

    Args:
        directory: Run directory.
        placement: Ranks of the run.
        max_restarts: Largest number of restarts after the death of a rank. In a restart, all ranks start again and
            resume from checkpoints/last.ckpt. Default: 0.
        threads: Number of intra-op threads of each rank. None: the CPU cores are divided equally among the ranks.
        grace_seconds: Time in seconds for the ranks to save and exit after a signal; see `Grace`.
        worker: Module that each rank runs.
        resume: Checkpoint to resume from. None: the checkpoint in the config, if any.
        allow: Packages of `security.allow`. They are passed on the command line, because a rank ignores this key in its
            config.

    Raises:
        RankError: A rank failed. The error describes the rank that failed first.
        ConfigError: A rank found an error in the config.
        Interrupted: This process or a rank received SIGINT, SIGTERM, SIGHUP or SIGUSR1.
        RunError: The run has several nodes, or the run directory cannot be written.
    """
    directory = Path(directory).absolute()
    if placement.nodes > 1:
        raise RunError(_several_nodes(directory, placement, allow=allow))
    for restart in itertools.count():
        command = [worker, str(directory), *([] if resume is None else ["--resume", str(resume)]), *allow_flags(allow)]
        failure = _once(command, directory, placement.world_size, threads=threads, grace_seconds=grace_seconds)
        if failure is None:
            return
        if failure.kind in FINAL or restart >= max_restarts:
            raise failure.error()
        # The report of the failed attempt is removed, because the run continues.
        (directory / "report.json").unlink(missing_ok=True)
        resume = last_checkpoint(directory) or resume
        log.warning(
            "rank %d %s; restart %d of %d from %s",
            *(failure.rank, failure.reason, restart + 1, max_restarts, resume or "the start"),
        )


def requeue(error: BaseException, *, most: int | None = None) -> None:
    """Requeue this SLURM job if the run ended because of SIGUSR1, which SLURM sends before the time limit.

    Lightning's SLURMEnvironment requeues jobs in the same way.

    Args:
        error: Error that ended the run.
        most: Largest number of restarts of the job. None: no limit.
    """
    if not isinstance(error, Interrupted) or error.signum != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
        return
    job = os.environ["SLURM_JOB_ID"]
    again = int(os.environ["SLURM_RESTART_COUNT"]) if "SLURM_RESTART_COUNT" in os.environ else 0
    if most is not None and again >= most:
        log.warning("SLURM's job %s is not queued again: it was restarted %d times, of at most %d", job, again, most)
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as failure:
        why = failure.stderr.strip() if isinstance(failure, subprocess.CalledProcessError) else failure
        log.error("SLURM's job %s is not queued again: scontrol requeue %s: %s", job, job, why)
    else:
        log.warning("SLURM's job %s is queued again", job)


def allow_flags(packages: Sequence[str]) -> list[str]:
    """Return the command-line arguments `--allow PACKAGE` of exp.worker for packages."""
    return [word for package in packages for word in ("--allow", package)]


def last_checkpoint(directory: Path) -> Path | None:
    """Return the path of checkpoints/last.ckpt in a run directory; None if the file does not exist."""
    last = directory / LAST_CHECKPOINT
    return last if last.is_file() else None


def _once(
    command: Sequence[str], directory: Path, world_size: int, *, threads: int | None, grace_seconds: float
) -> Failure | None:
    """Start all ranks once, wait until they have ended, and return the failure of the run. Return None on success.

    Args:
        command: Module that each rank runs, and its arguments.
        directory: Run directory.
        world_size: Number of ranks.
        threads: Number of intra-op threads of each rank; see `launch`.
        grace_seconds: Time in seconds for the ranks to exit after a signal; see `launch`.
    """
    try:
        exchange = Path(tempfile.mkdtemp(prefix=".launch-", dir=directory))
    except OSError as error:
        raise RunError(f"no rank was started: no directory can be created in {directory}: {error.strerror}") from error
    try:
        with collect_signals() as received:
            ranks = start_ranks(command, directory=directory, world_size=world_size, exchange=exchange, threads=threads)
            grace = Grace(seconds=grace_seconds, checkpoints=(directory / LAST_CHECKPOINT).parent)
            failure = supervise(ranks, exchange=exchange, received=received, grace=grace)
            last = last_checkpoint(directory)
            saved = None if last is None else str(last)
            if failure is None and received:
                # The run completed before the signal arrived. Interrupted is raised so that the caller also ends.
                raise Interrupted(signum=received[0], checkpoint=saved)
            if failure is not None and failure.kind == "hang" and directory.is_dir():
                with (directory / "train.log").open("a", encoding="utf-8") as file:
                    file.write(f"rank {failure.rank} {failure.reason}\n{failure.detail}\n")
            if failure is not None and failure.kind == "interrupted" and failure.checkpoint is None:
                return dataclasses.replace(failure, checkpoint=saved)
            return failure
    finally:
        # Errors are ignored, because the run directory may have been removed.
        shutil.rmtree(exchange, ignore_errors=True)


def _several_nodes(directory: Path, placement: Placement, *, allow: Sequence[str]) -> str:
    nodes, ranks = placement.nodes, placement.ranks_per_node
    worker = " ".join(["-m exp.worker", str(directory), *allow_flags(allow)])
    return (
        f"launch.nodes={nodes}: exp starts ranks on one machine. The config is in {directory}. Start the ranks with\n"
        f"  torchrun --nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
        f"{worker}      (on every node)\n"
        f"  srun --nodes={nodes} --ntasks-per-node={ranks} python {worker}      (under SLURM)"
    )
