"""The arguments of the Trainer depend on the placement of the rank, and not on environment variables."""

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.strategies import DDPStrategy, SingleDeviceStrategy
from lightning.pytorch.utilities.rank_zero import rank_zero_only

from exp.errors import RunError
from exp.strategies.auto import Auto
from exp.strategies.ddp import DDP
from exp.strategies.placement import Machine, adopt_placement, placement
from exp.strategies.rank import ALONE, Rank
from exp.strategies.single import Single
from exp.strategies.strategy import trainer_arguments

LAPTOP = Machine(gpus=0)
SECOND = Rank(global_rank=1, local_rank=1, world_size=2, local_world_size=2)
QUIET = {"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False}


@pytest.fixture(autouse=True)
def _rank_zero_again():
    yield
    rank_zero_only.rank = 0


@pytest.mark.parametrize("strategy", [Auto(name="auto"), Single(name="single"), DDP()])
def test_variables_of_another_job_change_nothing(strategy, monkeypatch):
    ranks = ("RANK", "LOCAL_RANK", "SLURM_PROCID", "SLURM_LOCALID")
    sizes = ("WORLD_SIZE", "SLURM_NTASKS")
    for name, value in {**dict.fromkeys(ranks, "3"), **dict.fromkeys(sizes, "4"), "TORCHELASTIC_RUN_ID": "x"}.items():
        monkeypatch.setenv(name, value)
    rank_zero_only.rank = 3  # Lightning sets this at its import if these variables exist
    placed = placement("ddp", devices=1, machine=LAPTOP)
    trainer = Trainer(**trainer_arguments(strategy, placement=placed, rank=ALONE), **QUIET)
    assert isinstance(trainer.strategy, SingleDeviceStrategy)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank, trainer.node_rank) == (1, 0, 0, 0)
    assert rank_zero_only.rank == 0
    assert trainer.strategy.launcher is None


@pytest.mark.parametrize("strategy", [Auto(name="auto"), DDP(find_unused_parameters=True, bucket_cap_mb=5)])
def test_a_rank_of_several_keeps_its_number(strategy):
    placed = adopt_placement(SECOND, "ddp", machine=LAPTOP)
    trainer = Trainer(**trainer_arguments(strategy, placement=placed, rank=SECOND), **QUIET)
    assert isinstance(trainer.strategy, DDPStrategy)
    assert (trainer.world_size, trainer.global_rank, trainer.local_rank) == (2, 1, 1)
    assert trainer.strategy.process_group_backend == "gloo"
    assert rank_zero_only.rank == 1


def test_the_options_of_ddp_reach_torch():
    strategy = DDP(find_unused_parameters=True, broadcast_buffers=False, bucket_cap_mb=5)
    built = strategy.lightning(placement("ddp", machine=LAPTOP), ALONE)
    assert built._ddp_kwargs == {
        "find_unused_parameters": True,
        "gradient_as_bucket_view": True,
        "broadcast_buffers": False,
        "bucket_cap_mb": 5,
    }


def test_another_count_by_lightning_is_refused():
    one = placement("ddp", devices=1, machine=LAPTOP)
    arguments = trainer_arguments(DDPStrategy(), placement=one, rank=SECOND)
    with pytest.raises(RunError, match="Lightning counts"):
        Trainer(**arguments, **QUIET)
