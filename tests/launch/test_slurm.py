"""The same worker as the tasks of a SLURM step: srun's variables are all there is."""

import json
import os
import subprocess
import sys

STEP = {
    "SLURM_JOB_ID": "20731",
    "SLURM_JOB_NAME": "train",
    "SLURM_NTASKS": "2",
    "SLURM_NNODES": "1",
    "SLURM_NODEID": "0",
    "SLURM_NODELIST": "127.0.0.1",
}


def test_tasks_meet_at_the_first_node(write_program, tmp_path, run_directory):
    write_program(
        """
        torch = joined(rank)
        total = torch.ones(1)
        torch.distributed.all_reduce(total)
        note(rank, [rank.global_rank, rank.local_rank, rank.world_size, total.item()])
        """
    )
    step = os.environ | STEP | {"PYTHONPATH": str(tmp_path)}
    tasks = [
        subprocess.Popen(
            [sys.executable, "-m", "rank_program", str(run_directory)],
            env=step | {"SLURM_PROCID": str(task), "SLURM_LOCALID": str(task)},
        )
        for task in range(2)
    ]
    try:
        assert [task.wait(timeout=60) for task in tasks] == [0, 0]
    finally:
        for task in tasks:
            task.kill()
    found = [json.loads((run_directory / f"note{rank}").read_text()) for rank in range(2)]
    assert found == [[0, 0, 2, 2], [1, 1, 2, 2]]
