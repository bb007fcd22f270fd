"""The rank of a process is read from the variables of its launcher."""

import pytest

from exp.errors import RunError
from exp.strategies.rank import ALONE, Rank, rank_of

TORCHRUN = {
    "RANK": "3",
    "LOCAL_RANK": "1",
    "WORLD_SIZE": "4",
    "LOCAL_WORLD_SIZE": "2",
    "GROUP_RANK": "1",
    "MASTER_ADDR": "host",
    "MASTER_PORT": "29400",
}
SLURM = {
    "SLURM_PROCID": "3",
    "SLURM_LOCALID": "1",
    "SLURM_NTASKS": "4",
    "SLURM_NNODES": "2",
    "SLURM_NODEID": "1",
    "SLURM_JOB_NAME": "train",
}
FOURTH = Rank(global_rank=3, local_rank=1, world_size=4, local_world_size=2, node_rank=1)


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        (TORCHRUN, FOURTH),
        (SLURM, FOURTH),
        (TORCHRUN | SLURM | {"SLURM_PROCID": "0"}, FOURTH),
        ({}, ALONE),
        # An interactive shell in an allocation is not a task.
        (SLURM | {"SLURM_JOB_NAME": "interactive"}, ALONE),
    ],
    ids=["torchrun", "slurm", "torchrun in slurm", "no launcher", "shell of slurm"],
)
def test_the_launchers_variables_name_the_rank(environment, expected):
    assert rank_of(environment) == expected


@pytest.mark.parametrize(
    ("broken", "message"),
    [
        ({"RANK": "four"}, "RANK is 'four'"),
        ({"RANK": "4"}, "rank 4 of 4"),
        ({"LOCAL_WORLD_SIZE": "3"}, "same number of ranks on every node"),
    ],
)
def test_contradicting_variables_are_refused(broken, message):
    with pytest.raises(RunError, match=message):
        rank_of(TORCHRUN | broken)


@pytest.mark.parametrize(("visible", "confined"), [("0", True), ("0,1,2,3", False), ("", False)])
def test_a_slurm_task_may_see_one_gpu(visible, confined):
    step = {"SLURM_JOB_NAME": "train", "SLURM_NTASKS": "8", "SLURM_NNODES": "2", "SLURM_NODEID": "1"}
    rank = rank_of(step | {"SLURM_PROCID": "6", "SLURM_LOCALID": "2", "CUDA_VISIBLE_DEVICES": visible})
    assert (rank.global_rank, rank.world_size, rank.is_confined) == (6, 8, confined)
    assert (rank.local_rank, rank.local_world_size, rank.nodes) == ((0, 1, 8) if confined else (2, 4, 2))
