"""A task of a cluster job, which starts one rank in a new interpreter.

A scheduler starts one task per rank. The task forwards signals to its rank. If the rank is killed, the task reports the
end of the rank.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType

from exp.launch.failure import death, read_failure, read_hang, write_failure
from exp.launch.spawn import BOOTSTRAP, EXCHANGE, FOREIGN, IMPORT_PATH, PARENT, rank_environment
from exp.signals import SUPERVISED, install_handler
from exp.strategies.rank import Rank, rank_of


def run_task(
    *,
    directory: str,
    exchange: str,
    outputs: Sequence[str],
    folders: Sequence[str],
    arguments: Sequence[str],
    cpus: int | None,
) -> None:
    """Start the rank of this task, and wait until it has ended.

    The environment variables of the scheduler determine the number of the rank.

    Args:
        directory: Run directory with the frozen config.
        exchange: Folder through which ranks report to the sweep.
        outputs: Paths of the output files, indexed by rank. Each rank appends to its file.
        folders: Import path (sys.path) of the sweep. The rank uses the same import path.
        arguments: Command-line arguments of exp.worker that follow the directory.
        cpus: Number of CPUs of each task. The rank uses the same number of threads. None: the number of threads is not
            set.

    Raises:
        SystemExit: The exit status of the rank is not 0.
    """
    rank = rank_here()
    place = Path(exchange)
    for name in ("json", "hang"):  # files of an earlier task, if the job was queued again
        (place / f"rank{rank.global_rank}.{name}").unlink(missing_ok=True)
    environment = _environment(rank, place, cpus=cpus) | {IMPORT_PATH: "\n".join(folders)}
    command = [sys.executable, "-P", "-u", "-c", BOOTSTRAP, "exp.worker", directory, *arguments]
    with open(outputs[rank.global_rank], "ab") as file:
        process = subprocess.Popen(
            command, env=environment, stdin=subprocess.DEVNULL, stdout=file, stderr=subprocess.STDOUT
        )

    def pass_on(signum: int, frame: FrameType | None) -> None:
        process.send_signal(signum)

    install_handler(pass_on)
    returncode = process.wait()
    if returncode == 0 and (rank.global_rank or (Path(directory) / "report.json").is_file()):
        return
    said = read_failure(place, rank=rank.global_rank) or read_hang(place, rank=rank.global_rank)
    if said is None:
        # The run directory may have been removed.
        with suppress(OSError):
            write_failure(death(rank=rank.global_rank, returncode=returncode, detail=""), place)
    raise SystemExit(returncode if returncode > 0 else 128 - returncode)


def rank_here(environment: Mapping[str, str] = os.environ) -> Rank:
    """Return the rank of this task, which the variables of SLURM or of submitit's local executor determine."""
    if "SUBMITIT_EXECUTOR" not in environment or environment["SUBMITIT_EXECUTOR"] != "local":
        return rank_of({name: value for name, value in environment.items() if name not in FOREIGN})
    ranks = int(environment["SUBMITIT_LOCAL_NTASKS"])
    place = int(environment["SUBMITIT_LOCAL_GLOBALID"])
    return Rank(global_rank=place, local_rank=place, world_size=ranks, local_world_size=ranks)


def _environment(rank: Rank, exchange: Path, *, cpus: int | None) -> dict[str, str]:
    """Return the environment variables of a rank.

    On SLURM, ranks find each other through SLURM's variables. Under submitit's local executor, they find each other
    through a file in `exchange`.

    Args:
        rank: The rank.
        exchange: Folder through which ranks report to the sweep.
        cpus: Number of threads of the rank. None: the number is not set.
    """
    if os.environ["SUBMITIT_EXECUTOR"] == "local":
        environment = rank_environment(
            rank=rank.global_rank, world_size=rank.world_size, exchange=exchange, threads=cpus
        )
    else:
        environment = {name: value for name, value in os.environ.items() if name not in FOREIGN}
        if cpus is not None:
            environment["OMP_NUM_THREADS"] = str(cpus)
    # SUPERVISED makes the rank ignore repeated signals, because a scheduler may send several signals before SIGKILL.
    return environment | {SUPERVISED: "1", PARENT: str(os.getpid()), EXCHANGE: str(exchange)}
