"""The worker of a failing rank under torchrun; test_equality and test_nodes train in it."""

import os
import subprocess
import sys


def test_torchrun_is_told_the_reason_of_a_failing_rank(write_program, tmp_path, run_directory):
    write_program(
        """
        if rank.global_rank == 1:
            raise ValueError("no such colour")
        time.sleep(200)
        """
    )
    line = [sys.executable, "-m", "torch.distributed.run", "--nnodes=1", "--nproc-per-node=2", "--redirects=3"]
    line += [f"--log-dir={tmp_path}/logs", "--rdzv-backend=c10d", "--rdzv-endpoint=127.0.0.1:0"]
    done = subprocess.run(
        [*line, "-m", "rank_program", str(run_directory)],
        env=os.environ | {"PYTHONPATH": str(tmp_path), "OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=150,
        check=False,
    )
    assert done.returncode == 1
    assert "ValueError: no such colour" in done.stderr
