"""Functions that start a process for each rank on this machine, with a clean environment and a separate session."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path

from exp.signals import SUPERVISED
from exp.strategies.placement import this_machine
from exp.strategies.rank import STORE

# Environment variables of a rank: the id of the process that started the rank, and the folder for its failures.
PARENT = "EXP_PARENT"
EXCHANGE = "EXP_EXCHANGE"
# Environment variable with sys.path of the parent, one folder per line. PYTHONPATH is not used for two reasons: its
# folders come before the standard library, and Python runs a sitecustomize.py in them.
IMPORT_PATH = "EXP_IMPORT_PATH"
BOOTSTRAP = (
    "import os, runpy, sys; "
    f"sys.path[:] = os.environ['{IMPORT_PATH}'].split(chr(10)); "
    "del sys.argv[0]; runpy.run_module(sys.argv[0], run_name='__main__', alter_sys=True)"
)

# Environment variables that are not passed on. They describe the ranks of another job, and a rank would read them.
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
    """The process of a started rank.

    Args:
        rank: Global rank.
        process: Process of the rank.
        log: File for the output of the rank. None for rank 0, which prints on the terminal.
    """

    rank: int
    process: subprocess.Popen[bytes]
    log: Path | None


def rank_environment(
    *, rank: int, world_size: int, exchange: Path, threads: int | None, outer: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the environment variables for the process of a rank.

    The result contains the variables of this process except those in FOREIGN, and the variables that torchrun would
    set.

    Args:
        rank: Global rank.
        world_size: Number of ranks.
        exchange: Folder to which ranks write their failures.
        threads: Number of intra-op threads of each rank. None: OMP_NUM_THREADS is kept. If that variable is not set,
            the CPU cores are divided equally among the ranks.
        outer: Environment variables of this process. Default: os.environ.
    """
    environment = {
        name: value for name, value in outer.items() if name not in FOREIGN and not name.startswith(FOREIGN_PREFIXES)
    }
    if threads is not None or "OMP_NUM_THREADS" not in outer:
        environment["OMP_NUM_THREADS"] = str(threads or max(1, (this_machine().cores or 1) // world_size))
    return environment | {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "LOCAL_WORLD_SIZE": str(world_size),
        "GROUP_RANK": "0",
        # These addresses are set only for libraries that read them. The process group uses a file instead of a port.
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
    command: Sequence[str], *, directory: Path, world_size: int, exchange: Path, threads: int | None
) -> list[RankProcess]:
    """Start all ranks. If a rank cannot be started, kill the ranks that were started.

    Rank 0 prints to the output of this process. Rank n prints to train.rank<n>.log.

    Args:
        command: Module to run, and its arguments.
        directory: Run directory.
        world_size: Number of ranks.
        exchange: Folder to which ranks write their failures.
        threads: Number of intra-op threads of each rank; see `rank_environment`.
    """
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
    """Return the existing folders of sys.path as absolute paths, so that ranks import the same modules."""
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
