"""A rank that fails ends its job within seconds, and the error is its own."""

import json
import time
from pathlib import Path

import pytest

from exp.errors import ConfigError, RankError, RunError
from exp.launch.launcher import launch
from exp.strategies.placement import Machine, placement


@pytest.fixture
def failing(launched, run_directory):
    """A function that launches a program that must fail soon after rank 1 notes its end: its ranks sleep for longer."""

    def failing(body: str, **options) -> RankError:
        with pytest.raises(RankError) as caught:
            launched(body, **options)
        note = run_directory / "note1"
        if note.is_file():
            assert time.time() - json.loads(note.read_text()) < 60
        return caught.value

    return failing


def test_an_exception_in_one_rank_ends_the_one_that_would_go_on(failing):
    error = failing(
        """
        if rank.global_rank == 1:
            note(rank, time.time())
            raise ValueError("no such colour")
        time.sleep(300)
        """,
    )
    assert error.rank == 1
    assert error.reason == "failed with ValueError: no such colour"
    assert 'raise ValueError("no such colour")' in error.detail
    assert error.exit_status == 1


def test_a_killed_rank_is_named_and_not_the_neighbour_that_lost_its_connection(failing):
    error = failing(
        """
        torch = joined(rank)
        torch.distributed.barrier()
        if rank.global_rank == 1:
            note(rank, time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        torch.distributed.all_reduce(torch.ones(1))
        """,
        warm=True,
    )
    assert error.rank == 1
    assert "was killed by SIGKILL" in error.reason


def test_the_first_exception_is_told_and_not_what_it_did_to_the_neighbour(failing):
    error = failing(
        """
        torch = joined(rank)
        torch.distributed.barrier()
        if rank.global_rank == 1:
            note(rank, time.time())
            raise ZeroDivisionError("mine")
        torch.distributed.all_reduce(torch.ones(1))
        """,
        warm=True,
    )
    assert (error.rank, error.reason) == (1, "failed with ZeroDivisionError: mine")


def test_a_rank_that_hangs_is_named_with_the_place_where_it_hangs(failing):
    error = failing(
        """
        meet(rank)
        torch = joined(rank, timeout_seconds=4)
        torch.distributed.barrier()
        def stuck():
            time.sleep(300)
        if rank.global_rank == 1:
            note(rank, time.time())
            stuck()
        torch.distributed.all_reduce(torch.ones(1))
        """,
        warm=True,
    )
    assert error.rank == 1
    assert "does not answer" in error.reason
    assert "in stuck" in error.detail


def test_a_rank_that_does_not_come_is_named(failing):
    error = failing(
        """
        if rank.global_rank == 1:
            time.sleep(300)
        joined(rank, timeout_seconds=2)
        """,
        warm=True,
    )
    assert (error.rank, "does not answer" in error.reason) == (1, True)


def test_a_rank_that_leaves_without_a_word_shows_the_end_of_its_log(failing):
    error = failing(
        """
        if rank.global_rank == 1:
            note(rank, time.time())
            print("something odd", flush=True)
            os._exit(7)
        time.sleep(300)
        """,
    )
    assert error.reason == "ended with status 7 without a word"
    assert "something odd" in error.detail


def test_a_known_error_has_no_traceback(failing):
    error = failing('raise RunError("the disk is full. Free 3 GB")')
    assert "the disk is full. Free 3 GB" in str(error)
    assert "Traceback" not in str(error)


def test_a_fault_in_the_config_that_a_rank_finds_comes_back_whole(launched):
    with pytest.raises(ConfigError) as caught:
        launched('raise ConfigError([Fault(key="data.path", got="a", expected="b", cure="c")])')
    assert [(fault.key, fault.got, fault.cure) for fault in caught.value.faults] == [("data.path", "a", "c")]
    assert caught.value.exit_status == 2


def test_a_rank_that_cannot_be_imported_says_so(launched, run_directory):
    with pytest.raises(RankError, match="without a word"):
        launch(run_directory, placement=placement("ddp", machine=Machine(gpus=0)), worker="no_such_module")
    assert "no_such_module" in Path(run_directory, "train.rank1.log").read_text()


def test_children_of_a_killed_rank_go_with_it(failing, run_directory):
    error = failing(
        """
        import subprocess
        if rank.global_rank == 1:
            (directory / "child").write_text(str(subprocess.Popen(["sleep", "300"]).pid))
            note(rank, time.time())
            os.kill(os.getpid(), signal.SIGKILL)
        time.sleep(300)
        """,
    )
    assert error.rank == 1
    child = int((run_directory / "child").read_text())
    deadline = time.monotonic() + 60
    while running(child) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not running(child)


def running(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except FileNotFoundError:
        return False
    return state != "Z"


def test_several_machines_are_left_to_torchrun_and_slurm_with_the_commands_to_write(run_directory):
    placed = placement("ddp", devices=4, nodes=2, machine=Machine(gpus=4))
    with pytest.raises(RunError) as caught:
        launch(run_directory, placement=placed)
    said = str(caught.value)
    assert "torchrun --nnodes=2 --nproc-per-node=4 --rdzv-backend=c10d --rdzv-endpoint=HOST:29400" in said
    assert f"srun --nodes=2 --ntasks-per-node=4 python -m exp.worker {run_directory}" in said


def test_what_libraries_do_at_exit_happens_in_a_rank_that_is_done(launched, run_directory):
    """Relies on atexit._run_exitfuncs, private to Python 3.11: a rank leaves by os._exit, which runs none of them."""
    launched("import atexit; atexit.register(note, rank, 'left'); note(rank, 'there')")
    assert [json.loads((run_directory / f"note{rank}").read_text()) for rank in (0, 1)] == ["left", "left"]


def test_a_rank_that_cannot_write_why_it_failed_is_not_started_again(launched, run_directory, capfd):
    """As on a full disk: no word is taken."""
    with pytest.raises(RankError, match="could not write why it failed") as raised:
        launched(
            """
            if rank.global_rank:
                time.sleep(300)
            (pathlib.Path(os.environ["EXP_EXCHANGE"]) / "rank0.json").mkdir()
            raise RunError("the disk is full")
            """,
            max_restarts=3,
        )
    assert raised.value.rank == 0
    assert "rank 0 failed: the disk is full" in capfd.readouterr().err
