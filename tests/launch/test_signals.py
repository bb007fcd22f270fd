"""Signals to the launching process and to the ranks: passed on once, saved, and nothing left behind."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from exp.errors import Interrupted

# The ranks behave as the engine's do: a signal sets a flag, the state is saved at a clean point, Interrupted leaves.
PATIENT = """
flags = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda signum, frame: flags.append(signum))
note(rank, os.getpid())
while not flags:
    time.sleep(0.02)
time.sleep(0.3)
checkpoint = directory / "saved"
checkpoint.write_text("state")
raise Interrupted(signum=flags[0], checkpoint=str(checkpoint))
"""
STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
note(rank, os.getpid())
time.sleep(300)
"""
PARENT = """
import sys
from exp.launch.launcher import launch
from exp.errors import ExpError
from exp.strategies.placement import Machine, placement
try:
    placed = placement("ddp", machine=Machine(gpus=0))
    launch(sys.argv[1], placement=placed, grace_seconds=float(sys.argv[2]), worker="rank_program")
except ExpError as error:
    print(error)
    sys.exit(error.exit_status)
"""


@pytest.fixture
def parent(tmp_path, run_directory, write_program):
    """A function that starts a launching process over a rank program, and waits until both ranks run."""
    started = []

    def parent(body: str, *, grace: float = 200) -> tuple[subprocess.Popen, list[int]]:
        write_program(body)
        process = subprocess.Popen(
            [sys.executable, "-c", PARENT, str(run_directory), str(grace)],
            env=os.environ | {"PYTHONPATH": str(tmp_path)},
            stdout=subprocess.PIPE,
            text=True,
        )
        started.append(process)
        return process, [wait_for_note(run_directory / f"note{rank}") for rank in range(2)]

    yield parent
    for process in started:
        process.kill()
        process.communicate()


def wait_for_note(path: Path) -> int:
    deadline = time.monotonic() + 100
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text():
            return json.loads(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def gone(pids: list[int]) -> bool:
    """Whether they are soon; none of them would end by itself in that time."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1])
def test_a_signal_to_the_parent_lets_every_rank_save_and_sets_the_exit_status(parent, run_directory, signum):
    process, pids = parent(PATIENT)
    process.send_signal(signum)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 128 + signum
    assert f"interrupted by signal {int(signum)}" in output
    assert str(run_directory / "saved") in output
    assert gone(pids)


def test_a_second_signal_ends_ranks_that_do_not_listen(parent):
    process, pids = parent(STUBBORN)
    process.send_signal(signal.SIGINT)
    time.sleep(0.5)
    assert process.poll() is None
    # Again until it ends: on a busy machine two that follow each other may come as one.
    ends = time.monotonic() + 100
    while process.poll() is None and time.monotonic() < ends:
        process.send_signal(signal.SIGINT)
        time.sleep(0.5)
    process.communicate(timeout=1)
    assert process.returncode == 130
    assert gone(pids)


STUCK = """
flags = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
    signal.signal(number, lambda signum, frame: flags.append(signum))
torch = joined(rank)
torch.distributed.barrier()
note(rank, os.getpid())
def blocked():
    while True:
        time.sleep(0.05)
def waits_in_a_collective():
    torch.distributed.all_reduce(torch.ones(1))
blocked() if rank.global_rank == 1 else waits_in_a_collective()
"""


@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_ranks_that_hang_are_killed_when_their_grace_is_over_and_named_with_where_they_stood(
    launch_command, run_directory, signum
):
    command = launch_command(STUCK, grace_seconds=1)
    pids = [wait_for_note(run_directory / f"note{rank}") for rank in range(2)]
    began = time.monotonic()
    os.kill(command.process.pid, signum)
    done = command.end(seconds=100)
    output = done.stdout
    assert 1 < time.monotonic() - began < 60
    assert done.returncode == 128 + signum
    assert f"interrupted by signal {int(signum)}; no state was saved: a rank hung" in output
    first, second = (output.index(f"rank {rank} did not leave within 1 s") for rank in (0, 1))
    assert first < output.index("in waits_in_a_collective") < second < output.index("in blocked")
    assert gone(pids)


def test_a_rank_that_hangs_while_the_other_has_left_is_named_alone(parent, run_directory):
    body = PATIENT.replace("time.sleep(0.3)", "time.sleep(300 if rank.global_rank else 0)")
    process, pids = parent(body, grace=1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 143
    assert str(run_directory / "saved") in output
    assert "rank 1 did not leave" in output
    assert "rank 0 did" not in output
    assert gone(pids)


def test_a_checkpoint_that_is_being_written_is_written_to_its_end(parent, run_directory):
    grow = """(directory / "checkpoints").mkdir(exist_ok=True)
for _ in range(8):
    with (directory / "checkpoints" / f".part{rank.global_rank}").open("a") as file:
        file.write("state")
    time.sleep(0.4)"""
    process, _ = parent(PATIENT.replace("time.sleep(0.3)", grow), grace=1)
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 143
    assert "did not leave" not in output
    assert (run_directory / "checkpoints" / ".part0").read_text() == "state" * 8


def test_a_signal_to_one_rank_alone_counts_as_an_interruption_of_the_run(launched, run_directory):
    with pytest.raises(Interrupted) as caught:
        launched(
            """
            if rank.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # before any handler of the engine's
            time.sleep(0.5)
            checkpoint = directory / "saved"
            raise Interrupted(signum=signal.SIGTERM, checkpoint=str(checkpoint))
            """
        )
    assert caught.value.signum == signal.SIGTERM
    assert caught.value.exit_status == 143


def test_a_parent_that_is_killed_takes_its_ranks_along(parent):
    process, pids = parent(STUBBORN)
    process.kill()
    process.communicate(timeout=100)
    assert gone(pids)


def test_an_error_while_saving_is_told_rather_than_the_signal(parent):
    process, _ = parent(
        PATIENT.replace("raise Interrupted(signum=flags[0], checkpoint=str(checkpoint))", 'raise RunError("disk full")')
    )
    process.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=100)
    assert process.returncode == 1
    assert "disk full" in output


def test_a_signal_after_the_work_was_done_still_ends_the_job(parent):
    process, _ = parent(PATIENT.replace("raise Interrupted(signum=flags[0], checkpoint=str(checkpoint))", "pass"))
    process.send_signal(signal.SIGINT)
    process.communicate(timeout=100)
    assert process.returncode == 130
