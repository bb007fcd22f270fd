"""Start a frozen run: one fresh interpreter a rank, watched until all of them have ended.

`in_process` says whether a run needs none of that. Else `launch` starts `python -m exp.worker DIRECTORY` once a rank,
each of which adopts the plan of the frozen config.yaml there; the report is read afterwards.
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
# An error that a second start would meet again.
FINAL = ("config", "known", "hang", "interrupted")

log = logging.getLogger(__name__)


def in_process(placement: Placement, *, max_restarts: int = 0, step_timeout: float | None = None) -> bool:
    """Return whether a run needs no process of its own: one rank, no process group, nobody who would restart it.

    step_timeout: of `runtime`. With a limit, the launcher reports that the process hangs.
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
    """Start the ranks of a frozen run on this machine and return when all of them have ended well.

    Each is `python -m <worker> DIRECTORY`, with `--resume CHECKPOINT` when it is started again. The ranks see nothing
    of another job's variables, and nothing of theirs stays in this process.

    max_restarts: how often all ranks are started again, from checkpoints/last.ckpt, after one of them died.
    threads: of each rank's operators; None shares the cores.
    allow: the packages of `security.allow`, which a rank does not believe by its frozen config alone.
    grace_seconds: how long ranks have to save and leave after a signal, before they are killed; see `Grace`.
    resume: a checkpoint to go on from, instead of the config's.
    Raises: RankError with the first failing rank's own words; ConfigError where a rank found an error in the config;
        Interrupted after SIGINT, SIGTERM, SIGHUP or SIGUSR1, to this process or to a rank; RunError for several nodes,
        and where the run directory cannot be written.
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
        # What an attempt reported is not what the next one will have done.
        (directory / "report.json").unlink(missing_ok=True)
        resume = last_checkpoint(directory) or resume
        log.warning(
            "rank %d %s; restart %d of %d from %s",
            *(failure.rank, failure.reason, restart + 1, max_restarts, resume or "the start"),
        )


def requeue(error: BaseException, *, most: int | None = None) -> None:
    """Have SLURM start this job's command again, where SIGUSR1 has announced the end of its machine.

    It is what Lightning's SLURMEnvironment does. Elsewhere, and after any other end, nothing happens.

    most: how often a job may have been started again; None is without a bound.
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
    """Return checkpoints/last.ckpt of a run directory; None where there is none yet."""
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
                # The run was done before the signal came to it; whoever sent it asked for the end all the same.
                raise Interrupted(signum=received[0], checkpoint=saved)
            if failure is not None and failure.kind == "hang" and directory.is_dir():
                with (directory / "train.log").open("a", encoding="utf-8") as file:
                    file.write(f"rank {failure.rank} {failure.reason}\n{failure.detail}\n")
            if failure is not None and failure.kind == "interrupted" and failure.checkpoint is None:
                return dataclasses.replace(failure, checkpoint=saved)
            return failure
    finally:
        # Somebody may have taken the run directory away.
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
