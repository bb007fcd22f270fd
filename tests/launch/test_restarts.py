"""All ranks start again from the last checkpoint after a failure, at most launch.max_restarts times."""

import json
import logging

import pytest

from exp.errors import Interrupted, RankError

COUNTED = """
count = directory / f"starts{rank.global_rank}"
starts = (json.loads(count.read_text()) if count.exists() else []) + [sys.argv[2:]]
count.write_text(json.dumps(starts))
"""
DIES_ONCE = (
    COUNTED
    + """
if rank.global_rank == 0:
    (directory / "checkpoints").mkdir(exist_ok=True)
    (directory / "checkpoints" / "last.ckpt").write_text("state")
if rank.global_rank == 1 and len(starts) == 1:
    time.sleep(0.3)
    os.kill(os.getpid(), signal.SIGKILL)
if len(starts) == 1:
    time.sleep(60)
"""
)


def starts(run_directory, rank):
    return json.loads((run_directory / f"starts{rank}").read_text())


def test_a_killed_rank_restarts_all_from_the_checkpoint(launched, run_directory, caplog):
    with caplog.at_level(logging.WARNING):
        launched(DIES_ONCE, max_restarts=2)
    resumed = ["--resume", str(run_directory / "checkpoints" / "last.ckpt")]
    assert starts(run_directory, 0) == starts(run_directory, 1) == [[], resumed]
    assert "rank 1 was killed by SIGKILL" in caplog.text
    assert "restart 1 of 2" in caplog.text


def test_a_restart_without_a_checkpoint_starts_over(launched, run_directory):
    with pytest.raises(RankError):
        launched(COUNTED + 'raise ValueError("always")', max_restarts=2)
    assert starts(run_directory, 0) == [[], [], []]


@pytest.mark.parametrize(
    ("raised", "error"),
    [('RunError("the disk is full")', RankError), ("Interrupted(signum=15, checkpoint=None)", Interrupted)],
)
def test_an_error_of_exp_and_a_signal_are_not_restarted(launched, run_directory, raised, error):
    with pytest.raises(error):
        launched(COUNTED + f"raise {raised}", max_restarts=2)
    assert len(starts(run_directory, 0)) == 1
