"""The same worker under torchrun, which brings its own rendezvous."""

import json
import os
import subprocess
import sys
from pathlib import Path


def torchrun(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2"]
    return subprocess.run(
        [*line, "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0", *arguments],
        env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=90,
        check=False,
    )


def test_ranks_meet_at_the_address_of_torchrun(write_program, tmp_path, run_directory):
    write_program(
        """
        torch = joined(rank)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        note(rank, [rank.global_rank, rank.world_size, total.item()])
        """
    )
    done = torchrun(tmp_path, "-m", "rank_program", str(run_directory))
    assert done.returncode == 0, done.stderr
    assert [json.loads((run_directory / f"note{rank}").read_text()) for rank in range(2)] == [[0, 2, 2], [1, 2, 2]]


def test_torchrun_is_told_the_reason_of_a_failing_rank(write_program, tmp_path, run_directory):
    write_program(
        """
        if rank.global_rank == 1:
            raise ValueError("no such colour")
        time.sleep(30)
        """
    )
    done = torchrun(tmp_path, "--redirects=3", f"--log-dir={tmp_path}/logs", "-m", "rank_program", str(run_directory))
    assert done.returncode == 1
    assert "ValueError: no such colour" in done.stderr
