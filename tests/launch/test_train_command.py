"""Interrupts and restarts of `python -m exp.train strategy=ddp` during training."""

import json
import os
import signal
import time
from pathlib import Path
from typing import Any

import psutil
import pytest

ENDLESS = ["strategy=ddp", "launch.accelerator=cpu", "trainer.max_epochs=100000", "test=false", "hooks=[]"]
ENDLESS += ["callbacks=[slow]", "trainer.limit_train_batches=4", "trainer.limit_val_batches=1"]
# A long run with little work. It waits in its third epoch while a file `hold` exists.
SLOW = """
import time
from pathlib import Path
from lightning.pytorch import Callback

class Slow(Callback):
    def on_train_batch_start(self, trainer, *_):
        time.sleep(0.02)
        while trainer.current_epoch == 2 and Path("hold").exists():
            time.sleep(0.02)
"""


@pytest.fixture
def training(tmp_path, commands):
    """A function that starts an endless run with two ranks and waits for its first checkpoint."""
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "slow.yaml").write_text(
        "# Takes its time: callbacks=[slow]\nslow: {_target_: slow.Slow}\n"
    )
    (tmp_path / "slow.py").write_text(SLOW)

    def training(*overrides: str) -> tuple[Any, Path, list[psutil.Process]]:
        command = commands.start(*ENDLESS, *overrides, cwd=tmp_path)
        deadline = time.monotonic() + 200
        while time.monotonic() < deadline and command.process.is_alive():
            saved = list(tmp_path.glob("outputs/*/*/*/checkpoints/last.ckpt"))
            if saved:
                ranks = psutil.Process(command.process.pid).children()
                ranks = sorted(ranks, key=lambda rank: (rank.create_time(), rank.pid))
                return command, saved[0].parent.parent, ranks
            time.sleep(0.1)
        command.process.kill()
        raise AssertionError(f"no checkpoint was written: {command.end()}")

    return training


def test_sigterm_to_every_process_saves_and_exits_143(training):
    """A cluster manager signals every process of a job, and the parent also forwards the signal."""
    command, directory, ranks = training()
    os.kill(command.process.pid, signal.SIGTERM)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    done = command.end(seconds=60)
    output = done.stdout + done.stderr
    assert done.returncode == 143, output
    report = json.loads((directory / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert str(directory / "checkpoints" / "last.ckpt") in output
    assert not psutil.wait_procs(ranks, timeout=60)[1]


def test_a_restart_resumes_a_killed_run(training, tmp_path):
    (tmp_path / "hold").touch()
    command, directory, ranks = training("launch.max_restarts=1", "trainer.max_epochs=20")
    ranks[0].kill()
    (tmp_path / "hold").unlink()
    done = command.end()
    output = done.stdout + done.stderr
    assert done.returncode == 0, output
    assert "restart 1 of 1" in output
    report = json.loads((directory / "report.json").read_text())
    assert (report["status"], report["epochs"], report["steps"]) == ("completed", 20, 20 * 4)
