"""Start a new interpreter for each rank of one machine, in a clean environment and a separate session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from exp.signals import SUPERVISED
from exp.strategies.rank import STORE

# The process that started a rank, and the folder to which ranks write their failures.
PARENT = "EXP_PARENT"
EXCHANGE = "EXP_EXCHANGE"
# The parent's sys.path, one folder on each line. PYTHONPATH would put its folders before the standard library, and
# Python would run a sitecustomize.py in them.
IMPORT_PATH = "EXP_IMPORT_PATH"
BOOTSTRAP = (
    "import os, runpy, sys; "
    f"sys.path[:] = os.environ['{IMPORT_PATH}'].split(chr(10)); "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)

# Variables of another job, from which a rank would read a wrong rank.
FOREIGN = frozenset(
    {"RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE", "NODE_RANK", "GROUP_RANK", "GROUP_WORLD_SIZE"}
    | {"ROLE_RANK", "ROLE_WORLD_SIZE", "ROLE_NAME", "MASTER_ADDR", "MASTER_PORT"}
    | {"PL_GLOBAL_SEED", "PL_SEED_WORKERS"}
    | {STORE, PARENT, EXCHANGE, SUPERVISED, IMPORT_PATH}
)
FOREIGN_PREFIXES = ("TORCHELASTIC_", "SLURM_", "OMPI_", "PMI_", "PMIX_", "JSM_")
LOOPBACK = "lo0" if sys.platform == "darwin" else "lo"


@dataclass(frozen=True, kw_only=True)
class RankProcess:
    """A started rank. log: File of its output. None for rank 0, which prints on the terminal of its parent."""

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None


def rank_environment(
    *, rank: int, world_size: int, exchange: Path, threads: int | None, outer: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment of a rank: that of this process without variables of other jobs, and torchrun's names.

    threads: Threads of each rank's operators. None keeps OMP_NUM_THREADS, or divides the cores if it is not set.
    """
    environment = {
        name: value for name, value in outer.items() if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    if threads is not None or "OMP_NUM_THREADS" not in outer:
        environment["OMP_NUM_THREADS"] = str(threads if threads is not None else max(1, _cores() // world_size))
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        # No process listens there, because the process group meets in a file. Libraries read these variables.
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": "0",
        "TORCHELASTIC_RUN_ID": exchange.name,
        "GLOO_SOCKET_IFNAME": LOOPBACK,
        "NCCL_SOCKET_IFNAME": LOOPBACK,
        IMPORT_PATH: "\n".join(import_path()),
        STORE: str(exchange / "store"),
        PARENT: str(os.getpid()),
        EXCHANGE: str(exchange),
    }


def start_ranks(
    *, directory: Path, world_size: int, exchange: Path, threads: int | None, command: Sequence[str]
) -> list[RankProcess]:
    """Start the ranks. Rank 0 prints on the output of this process, rank n to train.rank<n>.log."""
    started: list[RankProcess] = []
    try:
        for rank in range(world_size):
            environment = rank_environment(rank=rank, world_size=world_size, exchange=exchange, threads=threads)
            log = directory / f"train.rank{rank}.log" if rank else None
            started.append(RankProcess(rank=rank, process=_start(command, environment, log), log=log))
    except BaseException:
        for one in started:
            one.process.kill()
            one.process.wait()
        raise
    return started


def import_path() -> list[str]:
    """Return the folders from which this process imports, in order, so that ranks find the same modules."""
    folders = dict.fromkeys(os.path.abspath(entry) for entry in sys.path)
    return [folder for folder in folders if os.path.exists(folder) and "\n" not in folder]


def _start(command: Sequence[str], environment: Mapping[str, str], log: Path | None) -> subprocess.Popen[bytes]:
    with nullcontext() if log is None else log.open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-P", "-u", "-c", BOOTSTRAP, *command],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=output,
            stderr=None if output is None else subprocess.STDOUT,
            start_new_session=True,
        )


def _cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1
