"""Neither an outer job's variables into the ranks, nor anything of a launch into the next one."""

import json
import os
import signal
import threading
from pathlib import Path

import psutil
import pytest

from exp.errors import RankError
from exp.launch.spawn import rank_environment

OUTER = {
    "RANK": "7",
    "LOCAL_RANK": "7",
    "WORLD_SIZE": "8",
    "LOCAL_WORLD_SIZE": "8",
    "GROUP_RANK": "3",
    "NODE_RANK": "3",
    "MASTER_ADDR": "10.0.0.1",
    "MASTER_PORT": "29400",
    "TORCHELASTIC_ERROR_FILE": "/nowhere",
    "TORCHELASTIC_RESTART_COUNT": "4",
    "SLURM_PROCID": "7",
    "SLURM_NTASKS": "8",
    "OMPI_COMM_WORLD_RANK": "7",
    "PL_GLOBAL_SEED": "13",
    "GLOO_SOCKET_IFNAME": "eth0",
    "NCCL_SOCKET_IFNAME": "eth0",
}


def state() -> dict:
    """All that a launch could leave behind in this process."""
    return {
        "environment": dict(os.environ),
        "handlers": [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGCHLD)],
        "files": sorted(os.listdir("/proc/self/fd")),
        "children": psutil.Process().children(recursive=True),
        "threads": threading.active_count(),
    }


def test_a_rank_sees_its_own_numbers_and_nothing_of_another_job(launched, run_directory, monkeypatch):
    for name, value in OUTER.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setenv("MY_SETTING", "kept")
    launched("note(rank, dict(os.environ))")
    for rank in range(2):
        seen = json.loads((run_directory / f"note{rank}").read_text())
        assert (seen["RANK"], seen["LOCAL_RANK"], seen["WORLD_SIZE"]) == (str(rank), str(rank), "2")
        assert seen["LOCAL_WORLD_SIZE"] == "2"
        assert seen["GROUP_RANK"] == "0"
        assert seen["MASTER_ADDR"] == "127.0.0.1"
        assert seen["GLOO_SOCKET_IFNAME"] == seen["NCCL_SOCKET_IFNAME"] == "lo"
        assert seen["MY_SETTING"] == "kept"
        theirs = {"NODE_RANK", "TORCHELASTIC_ERROR_FILE", "TORCHELASTIC_RESTART_COUNT", "SLURM_PROCID"}
        assert not (theirs | {"SLURM_NTASKS", "OMPI_COMM_WORLD_RANK", "PL_GLOBAL_SEED"}) & set(seen)


def test_launches_in_a_row_leave_the_parent_as_it_was(launched, run_directory):
    before = state()
    launched("note(rank, rank.world_size)", ranks=2)
    launched("note(rank, rank.world_size)", ranks=1)
    with pytest.raises(RankError):
        launched('raise ValueError("x")', ranks=3)
    assert state() == before
    assert not [entry for entry in os.listdir(run_directory) if entry.startswith(".")]


def test_each_launch_has_its_own_number_of_ranks(launched, run_directory):
    for ranks in (2, 1, 3):
        launched("note(rank, rank.world_size)", ranks=ranks)
        assert [json.loads((run_directory / f"note{rank}").read_text()) for rank in range(ranks)] == [ranks] * ranks


def test_launching_from_another_thread_needs_no_signal_handler(launched, run_directory):
    thread = threading.Thread(target=launched, args=("note(rank, 1)",))
    thread.start()
    thread.join(timeout=120)
    assert (run_directory / "note1").is_file()


def test_ranks_import_what_the_parent_imports(launched, run_directory, monkeypatch, tmp_path):
    beside = tmp_path / "beside"
    beside.mkdir()
    (beside / "my_layers.py").write_text("WIDTH = 7\n")
    monkeypatch.syspath_prepend(str(beside))
    launched("import my_layers; note(rank, my_layers.WIDTH)")
    assert (run_directory / "note1").read_text() == "7"


@pytest.mark.parametrize(
    ("outer", "threads", "expected"),
    [({}, None, None), ({"OMP_NUM_THREADS": "5"}, None, "5"), ({"OMP_NUM_THREADS": "5"}, 3, "3"), ({}, 3, "3")],
)
def test_ranks_share_the_cores_unless_told_otherwise(outer, threads, expected):
    environment = rank_environment(rank=0, world_size=2, exchange=Path("x"), threads=threads, outer=outer)
    cores = len(os.sched_getaffinity(0))
    assert environment["OMP_NUM_THREADS"] == (expected or str(max(1, cores // 2)))
