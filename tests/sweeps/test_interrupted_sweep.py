"""A sweep that a signal ends at any moment: what runs saves and has its row, nothing is left, the status says which."""

import csv
import json
import os
import random
import signal
import time
from pathlib import Path

import psutil
import pytest

# So many moments; more with MOMENTS=20 pytest tests/sweeps/test_interrupted_sweep.py.
MOMENTS = int(os.environ.get("MOMENTS", "3"))
SMALL = ("model=mlp", "model.constants.width=16", "hooks=[]", "logger=[]", "test=false")
KINDS = {
    "grid": ("optimizer.lr=1e-4,1e-3,1e-2", "seed=range(0,6)", "sweep.stack=false", "trainer.max_epochs=12"),
    "stack": ("optimizer.lr=1e-4,1e-3,1e-2", "seed=range(0,6)", "trainer.max_epochs=200"),
    "search": ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "sweep.trials=40", "trainer.max_epochs=12"),
}


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def interrupted(commands, *overrides: str, after: float, signum: int):
    """A sweep that gets a signal so many seconds after it has made its directory, and leaves no process."""
    started = commands.start("-m", *SMALL, *overrides, "sweep.jobs=2", "hydra.sweep.dir=outputs/sweep")
    while not Path("outputs/sweep").exists():
        assert started.process.is_alive(), started.end()
        time.sleep(0.002)
    time.sleep(after)
    children = psutil.Process(started.process.pid).children(recursive=True)
    os.kill(started.process.pid, signum)
    done = started.end(seconds=60)
    assert psutil.wait_procs(children, timeout=30)[1] == []
    return done


@pytest.mark.parametrize("kind", KINDS)
def test_at_any_moment_running_jobs_save_and_have_their_rows_and_the_sweep_goes_on_later(kind, commands, tmp_path):
    moments = random.Random(11)
    for number in range(MOMENTS):
        (tmp_path / str(number)).mkdir()
        os.chdir(tmp_path / str(number))
        after, signum = moments.uniform(0, 3), moments.choice((signal.SIGTERM, signal.SIGINT))
        done = interrupted(commands, *KINDS[kind], after=after, signum=signum)
        said = f"{signum} after {after:.2f} s: {done.stdout}{done.stderr}"
        assert done.returncode == 128 + signum, said
        assert "Traceback" not in done.stderr, said
        begun = {path.parent.name for path in Path("outputs").glob("sweep/*/config.yaml")}
        print(f"{signum} after {after:.2f} s: {len(begun)} jobs had begun")
        if not Path("outputs").exists():
            continue  # before its first job, and nothing is left of it
        rows = list(csv.DictReader(Path("outputs/sweep/table.csv").read_text().splitlines()))
        by_directory = {row["directory"]: row for row in rows if row["directory"]}
        assert begun <= by_directory.keys(), said
        for name in begun:
            report = json.loads(Path(f"outputs/sweep/{name}/report.json").read_text())
            assert report["status"] == by_directory[name]["status"] in ("completed", "interrupted"), said
        assert {row["status"] for row in rows} <= {"completed", "interrupted", "not started"}, said
        assert "It goes on with" in done.stderr, said
