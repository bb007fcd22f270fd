"""Jobs of a sweep on Ray, which is started here; where the extra `ray` is not installed, nothing of it is tested.

Run by hand with Ray 2.60: pip install --target DIR ray, then PYTHONPATH=DIR pytest tests/sweeps/test_ray_jobs.py.
"""

from __future__ import annotations

import contextlib
import shutil
import signal
from dataclasses import asdict
from pathlib import Path

import pytest

import exp
from exp.config.launchers import RaySettings, launcher_faults
from exp.errors import Interrupted
from exp.run import prepare
from exp.run_report import read_report
from exp.sweeps.executor import Work
from exp.sweeps.job import JobProcesses
from exp.sweeps.ray_jobs import RayExecutor
from exp.train import fit, validate

pytest.importorskip("ray", reason="the extra ray is not installed: 240 MB are too much for every run of the tests")
pytestmark = pytest.mark.filterwarnings("default")
SMALL = ("hooks=[]", "logger=[]", "test=false", "trainer.enable_progress_bar=false", "launch.accelerator=cpu")
RANKS = ("strategy=ddp", "launch.devices=2")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(Path(__file__).with_name("ends.py"), tmp_path)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "ends.yaml").write_text(
        "# Ends: callbacks=[ends]\nends: {_target_: ends.Ends, how: well}\n"
    )


@pytest.fixture
def running(_place):
    settings = asdict(RaySettings())
    assert list(launcher_faults(settings)) == []
    with contextlib.closing(JobProcesses(fit, validate)) as processes:
        executor = RayExecutor(settings=settings, processes=processes, prepare=prepare, jobs=2)
        with contextlib.closing(executor):
            yield executor


def outcomes(running, jobs, *, on_wait=None):
    waiting, started, found = list(enumerate(jobs)), 0, {}
    while len(found) < len(jobs):
        while waiting and started - len(found) < running.slots:
            job, overrides = waiting.pop(0)
            config = exp.compose([f"hydra.run.dir=outputs/{job}", *SMALL, *overrides])
            running.start(Work(jobs=(job,), configs=(config,)))
            started += 1
        found |= {end.job: end.outcome for end in running.ends(1.0)}
        if on_wait is not None:
            on_wait()
    return [found[job] for job in range(len(jobs))]


def test_the_same_jobs_give_the_same_values_as_here_bit_for_bit(running, ranks):
    jobs = [("trainer.max_steps=30", f"seed={seed}") for seed in range(3)]
    here = [ranks.train(*SMALL, *overrides).report for overrides in jobs]
    here.append(ranks.train(*SMALL, *jobs[0], *RANKS, ranks=2).report)
    found = outcomes(running, [*jobs, (*jobs[0], *RANKS)])
    assert [report.status for report in found] == ["completed"] * 4
    assert [report.metrics for report in found] == [report["metrics"] for report in here]
    assert [report.world_size for report in found] == [1, 1, 1, 2]


def test_every_end_of_a_job_is_told_and_a_signal_lets_the_others_save(running):
    ends = ("callbacks=[ends]", "trainer.max_epochs=100000")
    jobs = [(*ends, f"callbacks.ends.how={how}") for how in ("no_memory", "killed", "exit_0")]
    jobs += [(*jobs[1], *RANKS), (*ends, "callbacks.ends.how=waits")]
    told = []

    def end_once():
        if Path("found").exists() and not told:
            told.append(True)
            running.end(signal.SIGINT)

    found = outcomes(running, jobs, on_wait=end_once)
    said = [str(outcome) for outcome in found]
    assert "out of memory" in said[0] or "MemoryError" in said[0]
    assert "was killed by SIGKILL" in said[1]
    assert "ended with status 0 without a word" in said[2]
    assert "was killed by SIGKILL" in said[3]
    assert isinstance(found[4], Interrupted)
    assert Path(found[4].checkpoint).is_file()
    statuses = [read_report(f"outputs/{job}").status for job in range(5)]
    assert statuses == ["failed"] * 4 + ["interrupted"]
