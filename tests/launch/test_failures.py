"""A rank that fails ends the job within seconds, and the reported error is that of this rank."""

import json
import time
from pathlib import Path

import pytest

from exp.errors import ConfigError, RankError, RunError
from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement


@pytest.fixture
def failing(launched):
    """A function that launches a program in which one rank fails while the other sleeps, and returns the error."""

    def failing(body: str, **options) -> RankError:
        with pytest.raises(RankError) as caught:
            launched(body, **options)
        return caught.value

    return failing


@pytest.mark.parametrize(
    ("end", "reason", "detail"),
    [
        ('raise ValueError("mine")', "failed with ValueError: mine", 'raise ValueError("mine")'),
        ('print("odd", flush=True); os._exit(7)', "ended with status 7 without a message", "odd"),
        ('raise RunError("the disk is full. Free 3 GB")', "failed: the disk is full. Free 3 GB", ""),
    ],
    ids=["an exception", "an exit", "an error of exp"],
)
def test_a_rank_that_fails_ends_the_other(failing, end, reason, detail):
    error = failing(
        f"""
        if rank.global_rank == 1:
            {end}
        time.sleep(300)
        """
    )
    assert (error.rank, error.reason, error.exit_status) == (1, reason, 1)
    assert detail in error.detail
    assert ("Traceback" in str(error)) == ("ValueError" in reason)


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        ("os.kill(os.getpid(), signal.SIGKILL)", "was killed by SIGKILL"),
        ('raise ZeroDivisionError("mine")', "failed with ZeroDivisionError: mine"),
    ],
)
def test_the_rank_that_failed_first_is_named(failing, end, reason):
    error = failing(
        f"""
        torch = joined(rank)
        torch.distributed.barrier()
        if rank.global_rank == 1:
            {end}
        torch.distributed.all_reduce(torch.ones(1))
        """,
        warm=True,
    )
    assert error.rank == 1
    assert reason in error.reason


def test_a_rank_that_hangs_is_named(failing):
    error = failing(
        """
        meet(rank)
        torch = joined(rank, timeout_seconds=4)
        torch.distributed.barrier()
        if rank.global_rank == 1:
            time.sleep(300)
        torch.distributed.all_reduce(torch.ones(1))
        """,
        warm=True,
    )
    assert error.rank == 1
    assert "does not respond" in error.reason


@pytest.mark.slow
def test_a_rank_that_never_joins_is_named(failing):
    error = failing(
        """
        if rank.global_rank == 1:
            time.sleep(300)
        joined(rank, timeout_seconds=2)
        """,
        warm=True,
    )
    assert (error.rank, "does not respond" in error.reason) == (1, True)


def test_a_config_error_of_a_rank_is_raised_whole(launched):
    with pytest.raises(ConfigError) as caught:
        launched('raise ConfigError([ErrorDetails(key="data.path", got="a", expected="b", fix="c")])')
    assert [(error.key, error.got, error.fix) for error in caught.value.errors] == [("data.path", "a", "c")]
    assert caught.value.exit_status == 2


def test_a_rank_that_cannot_be_imported_is_an_error(run_directory):
    with pytest.raises(RankError, match="without a message"):
        launch(run_directory, placement=placement("ddp", machine=Machine(gpus=0)), worker="no_such_module")
    assert "no_such_module" in Path(run_directory, "train.rank1.log").read_text()


def test_children_of_a_killed_rank_end_with_it(failing, run_directory):
    error = failing(
        """
        import subprocess
        if rank.global_rank == 1:
            (directory / "child").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
        """,
    )
    assert error.rank == 1
    child = int((run_directory / "child").read_text())
    deadline = time.monotonic() + 60
    while is_running(child):
        assert time.monotonic() < deadline
        time.sleep(0.05)


def is_running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_several_nodes_are_refused_with_the_commands_to_write(run_directory):
    placed = placement("ddp", devices=4, nodes=2, machine=Machine(gpus=4))
    with pytest.raises(RunError) as caught:
        launch(run_directory, placement=placed)
    message = str(caught.value)
    assert "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400" in message
    assert f"srun --nodes=2 --ntasks-per-node=4 python -m exp.worker {run_directory}" in message


def test_a_rank_ends_after_what_libraries_registered(launched, run_directory):
    """Ranks exit with os._exit, which skips exit functions, so exp calls atexit._run_exitfuncs, a private name."""
    launched("import atexit; atexit.register(note, rank, 'left'); note(rank, 'there')")
    assert [json.loads((run_directory / f"note{rank}").read_text()) for rank in (0, 1)] == ["left", "left"]
