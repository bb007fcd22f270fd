"""Jobs of a sweep on a cluster, with scripts instead of SLURM's commands, and with executors on this machine."""

from __future__ import annotations

import contextlib
import signal
import sys
import time
from dataclasses import asdict
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

import exp
from exp.cli.train import fit, validate
from exp.errors import ConfigError, Interrupted, RunError
from exp.extras.clusters.launcher_settings import RaySettings, SlurmSettings, launcher_errors
from exp.extras.clusters.slurm import SlurmExecutor
from exp.run_report import Report, read_report, write_report
from exp.start import prepare
from exp.sweeps.job import JobProcesses
from exp.sweeps.jobs import Job, with_config
from exp.sweeps.sweep import compose_sweep

pytest.importorskip("submitit", reason="the extra slurm is not installed")
SMALL = ("hooks=[]", "logger=[]", "test=false", "trainer.enable_progress_bar=false", "launch.accelerator=cpu")
RANKS = ("strategy=ddp", "launch.devices=2")
ENDLESS = ("callbacks=[ends]", "callbacks.ends.how=waits", "trainer.max_epochs=100000")
COMMANDS = {
    "srun": "",
    "sbatch": 'cp "$1" submitted.sh; echo >> jobs; echo "Submitted batch job $(wc -l < jobs)"',
    "squeue": "cat states",
    "scancel": 'echo "$@" >> cancelled',
}


def work(number, *overrides):
    job = Job(number=number, overrides=(*SMALL, *overrides), swept={}, packed=None)
    return [with_config(job, exp.compose([*job.overrides]), Path(f"outputs/{number}").absolute())]


@pytest.fixture
def slurm(tmp_path, monkeypatch):
    """A function that returns an executor for simulated SLURM commands, which use files of the working directory."""
    (tmp_path / "bin").mkdir()
    for name, body in COMMANDS.items():
        (tmp_path / "bin" / name).write_text(f"#!/bin/sh\n{body}\n")
        (tmp_path / "bin" / name).chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path / "bin"), prepend=":")
    # Jobs are frozen in this process.
    processes = SimpleNamespace(call=lambda function, *given: function(*given))

    def executor(**settings):
        settings = {**asdict(SlurmSettings()), **settings}
        assert list(launcher_errors(settings)) == []
        return SlurmExecutor(settings=settings, processes=processes, prepare=prepare, jobs=3)

    return executor


def test_jobs_are_submitted_to_slurm_and_followed(slurm, monkeypatch):
    running = slurm(partition="long", mem_gb=1.5, additional_parameters={"reservation": "mine"})
    for job in range(3):
        running.start(work(job, f"seed={job}"))
    script = Path("submitted.sh").read_text()
    options = ("partition=long", "mem=1536MB", "reservation=mine", "signal=USR1@120", "time=60", "ntasks-per-node=1")
    assert all(f"#SBATCH --{option}" in script for option in options), script
    assert "--kill-on-bad-exit=1" in script
    write_report(Report(status="completed", directory=str(Path("outputs/0").absolute()), metrics={"loss/val": 1.0}))
    Path("states").write_text("1|COMPLETED\n2|OUT_OF_MEMORY\n3|RUNNING\n")
    (end,) = running.ends(5.0)
    assert (end.job, end.outcome.status) == (0, "completed")
    # squeue is called every 5 s, and a job has 5 s to write its report.
    clock = time.monotonic
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 10)
    (end,) = running.ends(5.0)
    assert end.job == 1
    assert "ran out of the memory that SLURM gave it (hydra.launcher.mem_gb)" in str(end.outcome)
    assert read_report("outputs/1").status == "failed"
    # A new sweep does not submit the job that is still queued.
    slurm().start(work(2, "seed=2"))
    assert Path("jobs").read_text().count("\n") == 3
    running.end(signal.SIGINT)
    assert Path("cancelled").read_text().splitlines() == ["--state=PENDING 3", "--signal=INT 3"]
    Path("states").write_text("3|CANCELLED\n")
    monkeypatch.setattr(time, "monotonic", lambda: clock() + 30)
    (end,) = running.ends(5.0)
    assert (end.job, type(end.outcome)) == (2, Interrupted)
    assert not list(Path("outputs").glob("*/.launch-cluster"))


def test_a_rejected_job_has_failed(slurm, tmp_path):
    running = slurm(nodes=1)
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\necho no partition >&2\nexit 1\n")
    running.start(work(0))
    running.start(work(1, "launch.nodes=2", "strategy=ddp"))
    first, second = running.ends(1.0)
    assert isinstance(first.outcome, RunError)
    assert "the job was not submitted: " in str(first.outcome)
    assert "hydra.launcher.nodes: 1, with launch.nodes=2; expected equal numbers" in str(second.outcome)


def test_wrong_settings_of_the_launcher_are_refused(monkeypatch):
    def errors(*overrides):
        with pytest.raises(ConfigError) as raised:
            compose_sweep(["seed=0,1", "hydra/launcher=slurm", *overrides])
        return {error.key.removeprefix("hydra.launcher."): str(error) for error in raised.value.errors}

    local = "hydra.launcher.cluster=local"
    assert "Did you mean hydra.launcher.partition?" in errors(local, "hydra.launcher.partitoin=gpu")["partitoin"]
    found = errors(local, "hydra.launcher.timeout_min=soon", "hydra.launcher.mem_gb=0", "hydra.launcher.nodes=2")
    assert "'soon'; expected a number above 0" in found["timeout_min"]
    assert "0; expected a number above 0 or null" in found["mem_gb"]
    assert set(found) == {"timeout_min", "mem_gb", "nodes"}
    found = errors(local, "+hydra.launcher.additional_parameters={signal:USR2,mem-gb:1,reservation:mine}")
    assert set(found) == {"additional_parameters.signal", "additional_parameters.mem-gb"}
    (unknown,) = errors(local, "+hydra.launcher.tasks_per_node=1").values()
    assert "Key 'tasks_per_node' not in 'SlurmSettings'" in unknown
    delay = errors(local, "hydra.launcher.timeout_min=1", "hydra.launcher.signal_delay_s=60")
    assert "less than the time limit of a job, 60 s" in delay["signal_delay_s"]
    with pytest.raises(ConfigError, match="Write -m in front"):
        exp.compose(["hydra/launcher=slurm", local])
    monkeypatch.setitem(sys.modules, "submitit", None)
    monkeypatch.setenv("PATH", "")
    text = " ".join(str(error) for error in launcher_errors(asdict(SlurmSettings())))
    assert "pip install 'exp-framework[slurm]'" in text
    assert "hydra.launcher.cluster=local" in text


@pytest.fixture(scope="module")
def processes():
    return JobProcesses(fit, validate)


@pytest.fixture
def cluster(processes, ends):
    """A function that returns an executor of submitit or Ray that runs jobs on this machine."""

    def executor(name, **settings):
        if name == "ray":
            pytest.importorskip("ray", reason="the extra ray is not installed: it has 240 MB")
            from exp.extras.clusters.ray_jobs import RayExecutor

            settings, kind = asdict(RaySettings()), RayExecutor
        else:
            settings, kind = {**asdict(SlurmSettings()), "cluster": "local", **settings}, SlurmExecutor
        assert list(launcher_errors(settings)) == []
        return contextlib.closing(kind(settings=settings, processes=processes, prepare=prepare, jobs=2))

    return executor


def outcomes(running, jobs, *, on_wait=None):
    """Run jobs like a sweep, and return their outcomes."""
    waiting, started, found = list(enumerate(jobs)), 0, {}
    limit = time.monotonic() + 300
    while len(found) < len(jobs):
        while waiting and started - len(found) < running.slots:
            job, overrides = waiting.pop(0)
            running.start(work(job, *overrides))
            started += 1
        for end in running.ends(1.0):
            assert end.job not in found
            found[end.job] = end.outcome
        if on_wait is not None:
            on_wait()
        assert time.monotonic() < limit, found
    return [found[job] for job in range(len(jobs))]


def interrupt_once(running):
    """Return a function that sends SIGINT when the job is ready for it."""
    signalled = []

    def interrupt():
        if Path("found").exists() and not signalled:
            signalled.append(True)
            running.end(signal.SIGINT)

    return interrupt


def test_an_ended_rank_does_not_stop_the_kill(cluster, monkeypatch):
    killed = []

    def gone():
        raise psutil.NoSuchProcess(1)

    ranks = [SimpleNamespace(kill=gone), SimpleNamespace(kill=lambda: killed.append("rank"))]
    controller = SimpleNamespace(kill=lambda: killed.append("controller"), children=lambda recursive: ranks)
    monkeypatch.setattr(psutil, "Process", lambda number: controller)
    monkeypatch.setattr(psutil, "wait_procs", lambda processes, timeout: None)
    with cluster("slurm") as running:
        running._kill([SimpleNamespace(handle="1")])
    assert killed == ["controller", "rank"]


NAMES = ["slurm", pytest.param("ray", marks=pytest.mark.filterwarnings("default"))]


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_a_cluster_computes_the_same_values(name, cluster, ranks):
    jobs = [("trainer.max_steps=30", f"seed={seed}") for seed in range(2)]
    here = [ranks.train(*SMALL, *overrides).report for overrides in jobs]
    here.append(ranks.train(*SMALL, *jobs[0], *RANKS, ranks=2).report)
    with cluster(name) as running:
        found = outcomes(running, [*jobs, (*jobs[0], *RANKS)])
    assert [report.status for report in found] == ["completed"] * 3
    assert [report.metrics for report in found] == [report["metrics"] for report in here]
    assert [report.world_size for report in found] == [1, 1, 2]
    assert not list(Path("outputs/2").glob(".*")), "the files by which the ranks find each other must be removed"


@pytest.mark.slow
@pytest.mark.parametrize("name", NAMES)
def test_each_end_of_a_job_on_a_cluster_is_reported(name, cluster):
    one = ("callbacks=[ends]", "trainer.max_steps=2")
    jobs = [(*one, f"callbacks.ends.how={how}") for how in ("no_memory", "killed", "exit_0")]
    jobs += [(*jobs[1], *RANKS), ENDLESS]
    with cluster(name) as running:
        found = outcomes(running, jobs, on_wait=interrupt_once(running))
    messages = [str(outcome) for outcome in found]
    assert "MemoryError: raised by the user" in messages[0] or "out of memory" in messages[0]
    assert "was killed by SIGKILL" in messages[1]
    assert "ended with status 0 without a message" in messages[2]
    assert "was killed by SIGKILL" in messages[3]
    assert isinstance(found[4], Interrupted)
    assert Path(found[4].checkpoint).is_file()
    assert [read_report(f"outputs/{job}").status for job in range(5)] == ["failed"] * 4 + ["interrupted"]


@pytest.mark.slow
def test_a_job_saves_before_its_time_limit(cluster):
    # SLURM sends SIGUSR1 after 15 s. A job on a slow machine has not trained by then, and starts again below.
    with cluster("slurm", timeout_min=1, signal_delay_s=45) as running:
        (over,) = outcomes(running, [ENDLESS])
    assert isinstance(over, Interrupted)
    assert over.signum == signal.SIGUSR1
    Path("found").unlink(missing_ok=True)
    with cluster("slurm") as running:
        # The job resumes from its last checkpoint in the same directory.
        (ended,) = outcomes(running, [ENDLESS], on_wait=interrupt_once(running))
    assert isinstance(ended, Interrupted)
    assert ended.signum == signal.SIGINT
    assert read_report("outputs/0").status == "interrupted"
    assert read_report("outputs/0").steps > 0
