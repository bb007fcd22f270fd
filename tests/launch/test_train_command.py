"""`python -m exp.train strategy=ddp` that is killed, interrupted and restarted while it trains."""

import json
import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import psutil
import pytest

ENDLESS = ["strategy=ddp", "launch.accelerator=cpu", "trainer.max_epochs=100000", "test=false", "hooks=[]"]


@pytest.fixture
def training(tmp_path):
    """A function that starts an endless run over two ranks and waits for its first checkpoint."""
    started = []

    def training(*overrides: str) -> tuple[subprocess.Popen, Path, list[psutil.Process]]:
        process = subprocess.Popen(
            [sys.executable, "-m", "exp.train", *ENDLESS, *overrides],
            cwd=tmp_path,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
        )
        started.append(process)
        deadline = time.monotonic() + 60
        while time.monotonic() < deadline and process.poll() is None:
            saved = list(tmp_path.glob("outputs/*/*/*/checkpoints/last.ckpt"))
            if saved:
                ranks = sorted(psutil.Process(process.pid).children(), key=lambda rank: int(rank.environ()["RANK"]))
                return process, saved[0].parent.parent, ranks
            time.sleep(0.1)
        process.kill()
        raise AssertionError(f"no checkpoint was written: {process.communicate()[0]}")

    yield training
    for process in started:
        process.kill()
        process.communicate()


def test_a_killed_rank_ends_the_run_within_ten_seconds_and_the_report_names_it(training):
    process, directory, ranks = training()
    begun = time.monotonic()
    ranks[1].kill()
    output, _ = process.communicate(timeout=30)
    assert time.monotonic() - begun < 10
    assert process.returncode == 1
    assert "rank 1 was killed by SIGKILL" in output
    report = json.loads((directory / "report.json").read_text())
    assert report["status"] == "failed"
    assert "rank 1 was killed" in report["error"]["message"]
    assert not psutil.wait_procs(ranks, timeout=3)[1]


def test_sigterm_to_every_process_saves_and_exits_143(training):
    """A cluster's manager signals every process of a job, and the parent passes its own signal on as well."""
    process, directory, ranks = training()
    process.send_signal(signal.SIGTERM)
    for rank in ranks:
        rank.send_signal(signal.SIGTERM)
    output, _ = process.communicate(timeout=30)
    assert process.returncode == 143, output
    report = json.loads((directory / "report.json").read_text())
    assert report["status"] == "interrupted"
    assert str(directory / "checkpoints" / "last.ckpt") in output
    assert not psutil.wait_procs(ranks, timeout=3)[1]


def test_a_restart_goes_on_where_the_killed_ranks_were(training):
    process, directory, ranks = training("launch.max_restarts=1", "trainer.max_epochs=60")
    ranks[0].kill()
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 0, output
    assert "restart 1 of 1" in output
    report = json.loads((directory / "report.json").read_text())
    assert (report["status"], report["epochs"], report["steps"]) == ("completed", 60, 60 * 20)
