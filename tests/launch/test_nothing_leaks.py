"""Variables of an outer job do not reach the ranks, and a launch does not change the state of its process."""

import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from exp.errors import RankError
from exp.launch.spawn import rank_environment

OUTER = {
    **dict.fromkeys(("RANK", "LOCAL_RANK", "SLURM_PROCID", "OMPI_COMM_WORLD_RANK"), "7"),
    **dict.fromkeys(("WORLD_SIZE", "LOCAL_WORLD_SIZE", "SLURM_NTASKS"), "8"),
    **dict.fromkeys(("GROUP_RANK", "NODE_RANK"), "3"),
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_ERROR_FILE": "/nowhere",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "PL_GLOBAL_SEED": "13",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}
REMOVED = {
    *("NODE_RANK", "TORCHELASTIC_ERROR_FILE", "SLURM_PROCID", "SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PL_GLOBAL_SEED"),
}


def test_a_rank_sees_its_own_numbers_only():
    outer = {**OUTER, "MY_SETTING": "kept"}
    found = rank_environment(rank=1, world_size=2, exchange=Path("x"), threads=None, outer=outer)
    expected = {"RANK": "1", "LOCAL_RANK": "1", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", "GROUP_RANK": "0"}
    expected |= {"MASTER_ADDR": "127.0.0.1", "GLOO_SOCKET_IFNAME": "lo", "NCCL_SOCKET_IFNAME": "lo"}
    assert found.items() >= {**expected, "MY_SETTING": "kept"}.items()
    assert not REMOVED & set(found)


@pytest.mark.parametrize(
    ("outer", "threads", "expected"),
    [({}, None, None), ({"OMP_NUM_THREADS": "5"}, None, "5"), ({"OMP_NUM_THREADS": "5"}, 3, "3"), ({}, 3, "3")],
)
def test_ranks_share_the_cores_unless_told_otherwise(outer, threads, expected):
    environment = rank_environment(rank=0, world_size=2, exchange=Path("x"), threads=threads, outer=outer)
    cores = len(os.sched_getaffinity(0))
    assert environment["OMP_NUM_THREADS"] == (expected or str(max(1, cores // 2)))


def state() -> dict:
    """Return the state of this process that a launch could change."""
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "files": sorted(os.listdir("/proc/self/fd")),
        "children": psutil.Process().children(recursive=True),
        "threads": threading.active_count(),
    }


def test_launches_in_a_row_leave_their_process_unchanged(launched, run_directory):
    before = state()
    for ranks in (2, 1):
        launched("note(rank, rank.world_size)", ranks=ranks)
        assert [(run_directory / f"note{rank}").read_text() for rank in range(ranks)] == [str(ranks)] * ranks
    with pytest.raises(RankError):
        launched('raise ValueError("x")', ranks=3)
    assert state() == before
    assert not [entry for entry in os.listdir(run_directory) if entry.startswith(".")]


def test_a_thread_can_launch_ranks_that_import_as_it_does(launched, run_directory, monkeypatch, tmp_path):
    (tmp_path / "beside").mkdir()
    (tmp_path / "beside" / "my_layers.py").write_text("WIDTH = 7\n")
    monkeypatch.syspath_prepend(str(tmp_path / "beside"))
    thread = threading.Thread(target=launched, args=("import my_layers; note(rank, my_layers.WIDTH)",))
    thread.start()
    thread.join(timeout=200)
    assert (run_directory / "note1").read_text() == "7"
