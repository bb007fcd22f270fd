"""Jobs of a sweep through submitit, whose stand-in for SLURM starts processes here: what they give, how they end."""

from __future__ import annotations

import contextlib
import shutil
import signal
import time
from dataclasses import asdict
from pathlib import Path

import psutil
import pytest

import exp
from exp.config.launchers import SLURM, SlurmSettings, launcher_faults
from exp.errors import ConfigError, Interrupted
from exp.run import prepare
from exp.run_report import read_report
from exp.sweeps.executor import Work
from exp.sweeps.job import JobProcesses
from exp.sweeps.slurm import SlurmExecutor
from exp.train import fit, validate

pytest.importorskip("submitit", reason="the extra slurm is not installed")
ENDS = Path(__file__).with_name("ends.py")
SMALL = ("hooks=[]", "logger=[]", "test=false", "trainer.enable_progress_bar=false", "launch.accelerator=cpu")
RANKS = ("strategy=ddp", "launch.devices=2")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ENDS, tmp_path)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "ends.yaml").write_text(
        "# Ends: callbacks=[ends]\nends: {_target_: ends.Ends, how: well}\n"
    )


@pytest.fixture(scope="module")
def processes():
    with contextlib.closing(JobProcesses(fit, validate)) as started:
        yield started


def executor(processes, **settings):
    settings = {**asdict(SlurmSettings()), "cluster": "local", **settings}
    assert list(launcher_faults(settings)) == []
    return contextlib.closing(SlurmExecutor(settings=settings, processes=processes, prepare=prepare, jobs=2))


def config(job, *overrides):
    return exp.compose([f"hydra.run.dir=outputs/{job}", *SMALL, *overrides])


def outcomes(running, jobs, *, on_wait=None):
    """What came of each job, as a sweep drives an executor."""
    waiting, started, found = list(enumerate(jobs)), 0, {}
    limit = time.monotonic() + 300
    while len(found) < len(jobs):
        while waiting and started - len(found) < running.slots:
            job, overrides = waiting.pop(0)
            running.start(Work(jobs=(job,), configs=(config(job, *overrides),)))
            started += 1
        for end in running.ends(1.0):
            assert end.job not in found
            found[end.job] = end.outcome
        if on_wait is not None:
            on_wait()
        assert time.monotonic() < limit, found
    return [found[job] for job in range(len(jobs))]


def test_the_same_jobs_give_the_same_values_as_here_bit_for_bit(processes, ranks):
    jobs = [("trainer.max_steps=30", f"seed={seed}") for seed in range(2)]
    here = [ranks.train(*SMALL, *overrides).report for overrides in jobs]
    here.append(ranks.train(*SMALL, *jobs[0], *RANKS, ranks=2).report)
    with executor(processes) as running:
        found = outcomes(running, [*jobs, (*jobs[0], *RANKS)])
    assert [report.status for report in found] == ["completed"] * 3
    assert [report.metrics for report in found] == [report["metrics"] for report in here]
    assert [report.best["value"] for report in found] == [report["best"]["value"] for report in here]
    assert [report.world_size for report in found] == [1, 1, 2]
    assert len({report.best["value"] for report in found[:2]}) == 2
    folder = Path("outputs/2")
    assert sorted(path.name.split("_", 1)[1] for path in (folder / "submitit").glob("*.err")) == [
        "0_log.err",
        "1_log.err",
    ]
    assert not list(folder.glob(".*")), "nothing that the ranks met by is left"


def test_every_end_of_a_job_is_told_and_the_others_go_on(processes):
    hows = ["no_memory", "killed", "exit_0"]
    jobs = [("callbacks=[ends]", "trainer.max_steps=2", f"callbacks.ends.how={how}") for how in hows]
    jobs.append((*jobs[1], *RANKS))
    with executor(processes) as running:
        found = outcomes(running, jobs)
    assert [type(outcome).__name__ for outcome in found] == [*["RunError"] * 3, "RankError"]
    said = [str(outcome) for outcome in found]
    assert "MemoryError: of the user's own" in said[0] or "out of memory" in said[0]
    assert "was killed by SIGKILL" in said[1]
    assert "ended with status 0 without a word" in said[2]
    assert "was killed by SIGKILL" in said[3]
    for job in range(4):
        report = read_report(f"outputs/{job}")
        assert report.status == "failed"
        assert report.error["message"].splitlines()[0] == said[job].splitlines()[0]


def test_a_signal_lets_jobs_save_and_so_does_the_end_of_their_time(processes):
    endless = ("callbacks=[ends]", "callbacks.ends.how=waits", "trainer.max_epochs=100000")
    # The announcement comes in the second second, which is before the first step: nothing to save yet, or behind it.
    with executor(processes, timeout_min=1, signal_delay_s=45) as running:
        (over,) = outcomes(running, [endless])
    assert isinstance(over, Interrupted)
    assert over.signum == signal.SIGUSR1
    assert Path(over.checkpoint).is_file()
    Path("found").unlink()
    told = []

    def end_once():
        if Path("found").exists() and not told:
            told.append(True)
            running.end(signal.SIGINT)

    with executor(processes) as running:
        # In the directory of the first one, from its last checkpoint.
        (ended,) = outcomes(running, [endless], on_wait=end_once)
    assert isinstance(ended, Interrupted)
    assert ended.signum == signal.SIGINT
    assert read_report("outputs/0").status == "interrupted"
    assert read_report("outputs/0").steps > 0
    assert "goes on from" in Path("outputs/0/train.log").read_text() or Path(ended.checkpoint).is_file()


def test_a_sweep_that_is_gone_leaves_its_job_to_the_next_one(processes):
    endless = ("callbacks=[ends]", "callbacks.ends.how=waits", "trainer.max_epochs=100000")
    first = executor(processes).thing
    first.start(Work(jobs=(0,), configs=(config(0, *endless),)))
    with executor(processes) as running:
        running.start(Work(jobs=(0,), configs=(config(0, *endless),)))
        assert len(list(Path("outputs/0/submitit").glob("*_submitted.pkl"))) == 1, "the job was submitted twice"
        (controller,) = Path("outputs/0/submitit").glob("*_submitted.pkl")
        started = psutil.Process(int(controller.name.partition("_")[0]))
        processes = [started, *started.children(recursive=True)]
        running.end(signal.SIGTERM)
        running.end(signal.SIGTERM)
        (end,) = running.ends(10.0)
    assert isinstance(end.outcome, Interrupted)
    first.close()  # which reaps what it started
    assert [one for one in processes if one.is_running() and one.status() != psutil.STATUS_ZOMBIE] == []


def test_faults_of_the_launcher_come_before_anything_is_submitted():
    def faults(*overrides):
        from exp.sweeps.sweep import compose_sweep

        with pytest.raises(ConfigError) as raised:
            compose_sweep(["seed=0,1", "hydra/launcher=slurm", *overrides])
        return {fault.key: str(fault) for fault in raised.value.faults}

    local = "hydra.launcher.cluster=local"
    assert (
        "Did you mean hydra.launcher.partition?"
        in faults(local, "hydra.launcher.partitoin=gpu")["hydra.launcher.partitoin"]
    )
    found = faults(local, "hydra.launcher.timeout_min=soon", "hydra.launcher.mem_gb=0", "hydra.launcher.nodes=2")
    assert "'soon'; expected a number above 0" in found["hydra.launcher.timeout_min"]
    assert "0; expected a number above 0, or null" in found["hydra.launcher.mem_gb"]
    assert set(found) == {f"hydra.launcher.{name}" for name in ("timeout_min", "mem_gb", "nodes")}
    found = faults(local, "+hydra.launcher.additional_parameters={signal:USR2,mem-gb:1,reservation:mine}")
    assert "Write hydra.launcher.signal_delay_s" in found["hydra.launcher.additional_parameters.signal"]
    assert "Write hydra.launcher.mem_gb=1" in found["hydra.launcher.additional_parameters.mem-gb"]
    assert len(found) == 2
    (unknown,) = faults(local, "+hydra.launcher.tasks_per_node=1").values()
    assert "Did you mean gpus_per_node?" in unknown
    delay = faults(local, "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=60")
    assert "less than the 60 s of a job" in delay["hydra.launcher.signal_delay_s"]
    with pytest.raises(ConfigError, match="Write -m in front"):
        exp.compose(["hydra/launcher=slurm", local])


def test_a_missing_package_or_command_is_told_with_its_cure(monkeypatch):
    monkeypatch.setattr("exp.config.launchers.is_installed", lambda package: False)
    monkeypatch.setattr("exp.config.launchers.shutil.which", lambda name: None)
    found = [str(fault) for fault in launcher_faults(asdict(SlurmSettings()))]
    assert any("pip install 'exp-framework[slurm]'" in fault for fault in found)
    assert any("hydra.launcher.cluster=local" in fault for fault in found)
    assert asdict(SlurmSettings())["_target_"] == SLURM
