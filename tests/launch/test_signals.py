"""Signals to the launching process and its ranks are forwarded once, the state is saved, and no process is left."""

import json
import os
import signal
import time
from pathlib import Path

import pytest

from exp.errors import Interrupted

# Like the engine: a signal sets a flag, the state is saved between two steps, and Interrupted ends the rank.
PATIENT = """
flags = []
for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1):
    signal.signal(number, lambda signum, frame: flags.append(signum))
note(rank, os.getpid())
while not flags:
    time.sleep(0.02)
checkpoint = directory / "saved"
checkpoint.write_text("state")
"""
INTERRUPTED = "raise Interrupted(signum=flags[0], checkpoint=str(checkpoint))\n"
STUBBORN = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, signal.SIG_IGN)
note(rank, os.getpid())
time.sleep(300)
"""
STUCK = """
for number in (signal.SIGINT, signal.SIGTERM):
    signal.signal(number, lambda signum, frame: None)
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
# The save takes longer than the grace of one second, and its file grows all the time.
GROWING = """
(directory / "checkpoints").mkdir(exist_ok=True)
for _ in range(20):
    with (directory / "checkpoints" / f".part{rank.global_rank}").open("a") as file:
        file.write("state")
    time.sleep(0.2)
"""


def wait_for_note(path: Path) -> int:
    deadline = time.monotonic() + 200
    while time.monotonic() < deadline:
        if path.is_file() and path.read_text():
            return json.loads(path.read_text())
        time.sleep(0.02)
    raise AssertionError(f"{path} was not written")


def are_gone(pids: list[int]) -> bool:
    """Return True if processes end within a minute; without a signal they run longer."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if not any(Path(f"/proc/{pid}").exists() for pid in pids):
            return True
        time.sleep(0.02)
    return False


@pytest.fixture
def started(launch_command, run_directory):
    """A function that launches a program and waits until both ranks run."""

    def started(body: str, **options):
        command = launch_command(body, **options)
        return command, [wait_for_note(run_directory / f"note{rank}") for rank in range(2)]

    return started


def end(command, signum: int):
    os.kill(command.process.pid, signum)
    return command.end()


@pytest.mark.parametrize(
    "signum",
    [
        signal.SIGTERM,
        *(pytest.param(one, marks=pytest.mark.slow) for one in (signal.SIGINT, signal.SIGHUP, signal.SIGUSR1)),
    ],
)
def test_a_signal_lets_every_rank_save(started, run_directory, signum):
    command, pids = started(PATIENT + INTERRUPTED)
    done = end(command, signum)
    assert done.returncode == 128 + signum
    assert f"interrupted by signal {int(signum)}" in done.stdout
    assert str(run_directory / "saved") in done.stdout
    assert are_gone(pids)


@pytest.mark.parametrize(
    ("last_line", "status", "output"),
    [('raise RunError("disk full")', 1, "disk full"), ("pass", 143, "interrupted by signal 15")],
    ids=["an error while saving", "the end of the work"],
)
def test_the_status_after_a_signal_is_that_of_the_end(started, last_line, status, output):
    command, _ = started(PATIENT + last_line)
    done = end(command, signal.SIGTERM)
    assert done.returncode == status
    assert output in done.stdout


def test_a_second_signal_kills_ranks_that_ignore_the_first(started):
    command, pids = started(STUBBORN)
    os.kill(command.process.pid, signal.SIGINT)
    command.process.join(0.3)
    assert command.process.is_alive()
    # Repeat it: on a busy machine two signals may arrive as one.
    ends = time.monotonic() + 100
    while command.process.is_alive() and time.monotonic() < ends:
        os.kill(command.process.pid, signal.SIGINT)
        command.process.join(0.3)
    assert command.end().returncode == 130
    assert are_gone(pids)


def test_ranks_that_hang_are_killed_and_named(started):
    command, pids = started(STUCK, grace_seconds=1)
    done = end(command, signal.SIGTERM)
    assert done.returncode == 143
    assert "interrupted by signal 15; no state was saved, because a rank hung" in done.stdout
    assert all(f"rank {rank} did not exit within 1 s" in done.stdout for rank in (0, 1))
    assert are_gone(pids)


@pytest.mark.slow
def test_a_growing_checkpoint_extends_the_grace(started, run_directory):
    command, _ = started(PATIENT + GROWING + INTERRUPTED, grace_seconds=1)
    done = end(command, signal.SIGTERM)
    assert done.returncode == 143
    assert "did not exit" not in done.stdout
    assert (run_directory / "checkpoints" / ".part0").read_text() == "state" * 20


def test_a_signal_to_one_rank_interrupts_the_run(launched):
    with pytest.raises(Interrupted) as caught:
        launched(
            """
            if rank.global_rank == 1:
                os.kill(os.getpid(), signal.SIGTERM)  # before the engine installs a handler
            time.sleep(0.5)
            raise Interrupted(signum=signal.SIGTERM, checkpoint=str(directory / "saved"))
            """
        )
    assert caught.value.exit_status == 143


def test_a_killed_parent_takes_its_ranks_along(started):
    command, pids = started(STUBBORN)
    command.process.kill()
    command.process.join()
    assert are_gone(pids)
