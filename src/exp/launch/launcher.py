"""Starts a frozen run with one new interpreter per rank, and waits for all of them.

If `in_process` is false for a run, `launch` starts `python -m exp.worker DIRECTORY` once per rank. Each rank recreates
the plan from the frozen config.yaml. The caller reads the report afterwards.
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
from exp.launch.supervision import Grace, collected_signals, supervise
from exp.strategies.placement import Placement

LAST_CHECKPOINT = Path("checkpoints") / "last.ckpt"
# Failures that a restart would repeat.
FINAL = ("config", "known", "hang", "interrupted")

log = logging.getLogger(__name__)


def in_process(placement: Placement, *, max_restarts: int = 0, step_timeout: float | None = None) -> bool:
    """Return whether a run can use this process: one rank, no process group, no restarts, no timeout.

    Args:
        step_timeout: `runtime.step_timeout`. If it is set, a launcher has to report a hang of the process.
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
    """Start the ranks of a frozen run on this machine, and return when all of them have finished.

    Each rank runs `python -m <worker> DIRECTORY`, with `--resume CHECKPOINT` after a restart. Ranks do not see
    variables of other jobs, and do not change variables of this process.

    Args:
        max_restarts: How often all ranks restart from checkpoints/last.ckpt after one of them died.
        threads: Threads of each rank's operators. None: the cores divided by the ranks.
        allow: Packages of `security.allow`. Ranks do not trust those in their frozen config.
        grace_seconds: Time to save and exit after a signal, in seconds; see `Grace`.
        resume: Checkpoint to resume from, instead of the config's.

    Raises:
        RankError: A rank failed. The message is that of the first failing rank.
        ConfigError: A rank found an error in the config.
        Interrupted: SIGINT, SIGTERM, SIGHUP or SIGUSR1 reached this process or a rank.
        RunError: The run has several nodes, or its directory cannot be written.
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
        # The report of the failed attempt does not describe the next one.
        (directory / "report.json").unlink(missing_ok=True)
        resume = last_checkpoint(directory) or resume
        log.warning(
            "rank %d %s; restart %d of %d from %s",
            *(failure.rank, failure.reason, restart + 1, max_restarts, resume or "the start"),
        )


def requeue(error: BaseException, *, most: int | None = None) -> None:
    """Let SLURM queue this job again after SIGUSR1, which announces its time limit.

    Lightning's SLURMEnvironment does the same. Without SLURM, or after other errors, nothing happens.

    Args:
        most: Largest number of restarts of a job. None: no limit.
    """
    if not isinstance(error, Interrupted) or error.signum != signal.SIGUSR1 or "SLURM_JOB_ID" not in os.environ:
        return
    job = os.environ["SLURM_JOB_ID"]
    again = int(os.environ["SLURM_RESTART_COUNT"]) if "SLURM_RESTART_COUNT" in os.environ else 0
    if most is not None and again >= most:
        log.warning("SLURM's job %s is not queued again: it was %d times, of %d at most", job, again, most)
        return
    if "SLURM_ARRAY_JOB_ID" in os.environ:
        job = f"{os.environ['SLURM_ARRAY_JOB_ID']}_{os.environ['SLURM_ARRAY_TASK_ID']}"
    try:
        subprocess.run(["scontrol", "requeue", job], capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as failure:
        said = failure.stderr.strip() if isinstance(failure, subprocess.CalledProcessError) else failure
        log.error("SLURM's job %s is not queued again: scontrol requeue %s: %s", job, job, said)
    else:
        log.warning("SLURM's job %s is queued again", job)


def allowing(packages: Sequence[str]) -> list[str]:
    """Return the arguments of exp.worker that trust these packages."""
    return [word for package in packages for word in ("--allow", package)]


def last_checkpoint(directory: Path) -> Path | None:
    """Return checkpoints/last.ckpt of a run directory, or None if it does not exist."""
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
        raise RunError(
            f"no rank was started: a directory for what they tell each other cannot be made in {directory}: "
            f"{error.strerror}"
        ) from error
    command = [worker, str(directory), *([] if resume is None else ["--resume", str(resume)]), *allowing(allow)]
    try:
        with collected_signals() as received:
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
                # The run had finished before the signal reached it, but the signal still ends the command.
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
    worker = " ".join(["-m exp.worker", str(directory), *allowing(allow)])
    return (
        f"launch.nodes={nodes}: exp starts the ranks of one machine. The run is frozen in {directory}; start it with\n"
        f"  torchrun --nnodes={nodes} --nproc-per-node={ranks} --rdzv-backend=c10d --rdzv-endpoint=HOST:29400 "
        f"{worker}      (on every node)\n"
        f"  srun --nodes={nodes} --ntasks-per-node={ranks} python {worker}      (under SLURM)"
    )
