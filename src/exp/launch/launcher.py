"""Start a frozen run with a new interpreter for each rank, and watch the ranks until all have ended.

Each rank is `python -m exp.worker DIRECTORY`, which reads the frozen config. `in_process` decides whether a run needs
such processes.
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
# Kinds of failures that a restart would repeat.
FINAL = ("config", "known", "hang", "interrupted")

log = logging.getLogger(__name__)


def in_process(placement: Placement, *, max_restarts: int = 0, step_timeout: float | None = None) -> bool:
    """Return whether a run needs no other process: it has one rank, no process group, no restarts and no time limit.

    step_timeout: Value of runtime.step_timeout. The launcher reports a process that hangs.
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
    """Start the ranks of a frozen run on this machine, and return when all of them have ended well.

    Args:
        directory: Run directory.
        placement: Its ranks.
        max_restarts: How often all ranks are started again from checkpoints/last.ckpt after one of them died.
        threads: Threads of each rank's operators. None divides the cores.
        grace_seconds: Time that ranks have to save and leave after a signal; see `Grace`.
        worker: Module that a rank runs.
        resume: Checkpoint to resume from, instead of the config's.
        allow: Packages of `security.allow`, which a rank does not read in its frozen config.

    Raises:
        RankError: A rank failed. The error has the message of the first failing rank.
        ConfigError: A rank found an error in the config.
        Interrupted: This process or a rank received SIGINT, SIGTERM, SIGHUP or SIGUSR1.
        RunError: The run has several nodes, or the run directory cannot be written.
    """
    directory = Path(directory).absolute()
    if placement.nodes > 1:
        raise RunError(_several_nodes(directory, placement, allow=allow))
    for restart in itertools.count():
        failure = _once(
            directory,
            placement,
            threads=threads,
            grace_seconds=grace_seconds,
            worker=worker,
            resume=resume,
            allow=allow,
        )
        if failure is None:
            return
        if failure.kind in FINAL or restart >= max_restarts:
            raise failure.error()
        # The report of this attempt does not describe the next one.
        (directory / "report.json").unlink(missing_ok=True)
        resume = last_checkpoint(directory) or resume
        log.warning(
            "rank %d %s; restart %d of %d from %s",
            *(failure.rank, failure.reason, restart + 1, max_restarts, resume or "the start"),
        )


def requeue(error: BaseException, *, most: int | None = None) -> None:
    """Let SLURM start this job again if SIGUSR1 announced the end of its time, as Lightning's SLURMEnvironment does.

    Args:
        error: Error that ended the run.
        most: How often a job may be started again. None is no limit.
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
    """Return the arguments of exp.worker that allow packages."""
    return [word for package in packages for word in ("--allow", package)]


def last_checkpoint(directory: Path) -> Path | None:
    """Return checkpoints/last.ckpt of a run directory. Return None if it does not exist."""
    last = directory / LAST_CHECKPOINT
    return last if last.is_file() else None


def _once(
    directory: Path,
    placement: Placement,
    *,
    threads: int | None,
    grace_seconds: float,
    worker: str,
    resume: Path | None,
    allow: Sequence[str],
) -> Failure | None:
    try:
        exchange = Path(tempfile.mkdtemp(prefix=".launch-", dir=directory))
    except OSError as error:
        raise RunError(f"no rank was started: no directory can be made in {directory}: {error.strerror}") from error
    command = [worker, str(directory), *([] if resume is None else ["--resume", str(resume)]), *allow_flags(allow)]
    try:
        with collect_signals() as received:
            ranks = start_ranks(
                directory=directory,
                world_size=placement.world_size,
                exchange=exchange,
                threads=threads,
                command=command,
            )
            grace = Grace(seconds=grace_seconds, checkpoints=(directory / LAST_CHECKPOINT).parent)
            failure = supervise(ranks, exchange=exchange, received=received, grace=grace)
            last = last_checkpoint(directory)
            saved = None if last is None else str(last)
            if failure is None and received:
                # The run completed before the signal arrived. The caller has to end as well.
                raise Interrupted(signum=received[0], checkpoint=saved)
            if failure is not None and failure.kind == "hang" and directory.is_dir():
                with (directory / "train.log").open("a", encoding="utf-8") as file:
                    file.write(f"rank {failure.rank} {failure.reason}\n{failure.detail}\n")
            if failure is not None and failure.kind == "interrupted" and failure.checkpoint is None:
                return dataclasses.replace(failure, checkpoint=saved)
            return failure
    finally:
        # The run directory may have been removed.
        shutil.rmtree(exchange, ignore_errors=True)


def _several_nodes(directory: Path, placement: Placement, *, allow: Sequence[str]) -> str:
    nodes, ranks = placement.nodes, placement.ranks_per_node
    worker = " ".join(["-m exp.worker", str(directory), *allow_flags(allow)])
    return (
        f"launch.nodes={nodes}: exp starts the ranks of one machine. The run is frozen in {directory}. Start it with\n"
        f"  torchrun --nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
        f"{worker}      (on every node)\n"
        f"  srun --nodes={nodes} --ntasks-per-node={ranks} python {worker}      (under SLURM)"
    )
