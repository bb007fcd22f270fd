"""Resumed and forked runs end with exactly the weights of an uninterrupted run."""

import json
import os
import signal
from pathlib import Path

import pytest
import torch

import exp
from exp.cli import fork, resume
from exp.engine.checkpoint import AtomicCheckpointIO, read_checkpoint
from exp.errors import Interrupted
from exp.files import hold_lock
from exp.run import run as run_again
from exp.run_report import read_report

BASE = [
    "model=lenet", "trainer.limit_train_batches=3", "trainer.limit_val_batches=1", "test=false",
    "hooks=[]", "logger=[]", "trainer.enable_progress_bar=false", "trainer.max_epochs=3",
]  # fmt: skip
# Callback that sends a signal once, at step 5.
SIGNALS = """
import os, signal
from lightning.pytorch import Callback

class Own(Callback):
    def __init__(self, signum: int):
        self.signum = signum

    def on_train_batch_end(self, trainer, *_):
        if trainer.global_step == 5 and not os.path.exists("sent"):
            open("sent", "w").close()
            os.kill(os.getpid(), self.signum)
"""

SPOILS = """
from lightning.pytorch import Callback

class Own(Callback):
    def on_before_optimizer_step(self, trainer, module, optimizer):
        if trainer.global_step == 6:
            for parameter in module.parameters():
                parameter.grad.fill_(float("nan"))
"""


@pytest.fixture
def sends(write):
    """A function that writes callbacks=[own], which sends a signal."""

    def sends(signum):
        write("own.py", SIGNALS)
        write("conf/callbacks/own.yaml", f"own: {{_target_: own.Own, signum: {int(signum)}}}\n")

    return sends


def fit(*overrides):
    report = exp.fit(exp.compose([*BASE, *overrides]))
    return Path(report.directory)


def weights(run, name="last"):
    return read_checkpoint(run / "checkpoints" / f"{name}.ckpt")["state_dict"]


def assert_equal_weights(one, other):
    found, expected = weights(one), weights(other)
    assert found.keys() == expected.keys()
    assert all(torch.equal(found[name], expected[name]) for name in expected)


def test_auto_resumes_the_newest_whole_checkpoint_of_its_name(caplog):
    first = fit("resume=auto", "trainer.max_epochs=1")
    assert "found no checkpoint of train below" in caplog.text
    fit("name=other", "trainer.max_epochs=2")
    second = fit("resume=auto", "trainer.max_epochs=3")
    assert f"resumes from {first}/checkpoints/last.ckpt" in caplog.text
    assert read_report(second).steps == 9
    for path in (second / "checkpoints").iterdir():
        path.write_bytes(path.read_bytes()[:-100])
    third = fit("resume=auto")
    assert f"an older checkpoint is used, because {second}/checkpoints/last.ckpt is damaged" in caplog.text
    assert_equal_weights(third, fit("seed=0"))


def test_a_run_removes_partial_files_of_its_name():
    first = fit("trainer.max_epochs=1")
    left = first / "checkpoints" / ".last.ckpt.1.2.partial"
    left.touch()
    (first / ".launch-abc").mkdir()
    fit("trainer.max_epochs=1", "name=other")
    assert left.exists()
    fit("trainer.max_epochs=1")
    assert not left.exists()
    assert not (first / ".launch-abc").exists()


def test_auto_does_not_resume_a_run_in_progress(caplog):
    first = fit("trainer.max_epochs=1")
    with hold_lock(first / "config.yaml"):
        fit("resume=auto", "trainer.max_epochs=1")
    assert f"skipped {first}, which is still running" in caplog.text
    assert "starts from the beginning" in caplog.text


def test_auto_in_a_sweep_is_refused():
    with pytest.raises(exp.ConfigError, match="auto, in a sweep; expected a single run"):
        exp.validate(exp.compose(["resume=auto", "hydra.run.dir=outputs/train/sweeps/2026-01-01/10-00-00/0"]))


def test_the_same_command_resumes_its_unfinished_run(sends, caplog):
    sends(signal.SIGTERM)
    command = ["runtime.autoresume=true", "callbacks=[own]"]
    fit("trainer.max_epochs=1")  # a run of another command
    with pytest.raises(Interrupted):
        fit(*command)
    assert "found no unfinished run" in caplog.text
    second = fit(*command)
    assert "runtime.autoresume: resumes from" in caplog.text
    third = fit(*command)
    assert caplog.text.count("found no unfinished run") == 2
    assert_equal_weights(second, third)


# Variables that srun sets for the only task of a job, according to its manual.
SRUN = {"SLURM_JOB_ID": "42", "SLURM_JOB_NAME": "train", "SLURM_NTASKS": "1", "SLURM_PROCID": "0"}
SRUN |= {"SLURM_LOCALID": "0", "SLURM_NODEID": "0", "SLURM_NNODES": "1", "SLURM_RESTART_COUNT": "1"}
ARRAY = {"SLURM_ARRAY_JOB_ID": "40", "SLURM_ARRAY_TASK_ID": "2"}


@pytest.mark.parametrize(("more", "job"), [({}, "42"), (ARRAY, "40_2"), ({}, None)])
def test_sigusr1_saves_and_requeues_the_slurm_job(sends, monkeypatch, caplog, more, job):
    sends(signal.SIGUSR1)
    scontrol = Path("bin/scontrol")
    scontrol.parent.mkdir()
    scontrol.write_text('#!/bin/sh\necho "$@" > called\n')
    scontrol.chmod(0o755)
    monkeypatch.setenv("PATH", f"{scontrol.parent.absolute()}:{os.environ['PATH']}")
    for name, value in {**SRUN, **more}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(Interrupted) as caught:
        fit("callbacks=[own]", f"runtime.autoresume={str(job is not None).lower()}")
    assert caught.value.exit_status == 128 + signal.SIGUSR1
    (run,) = Path("outputs/train").glob("*/*")
    assert read_checkpoint(run / "checkpoints" / "last.ckpt")["global_step"] == 5
    assert json.loads((run / "report.json").read_text())["status"] == "interrupted"
    assert Path("called").exists() == (job is not None)
    if job is not None:
        assert Path("called").read_text() == f"requeue {job}\n"
        assert f"SLURM's job {job} is queued again" in caplog.text


def test_a_frozen_run_started_again_resumes_itself(sends):
    sends(signal.SIGTERM)
    with pytest.raises(Interrupted):
        fit("runtime.autoresume=true", "callbacks=[own]")
    (frozen,) = Path("outputs/train").glob("*/*")
    # torchrun and srun start exp.worker RUN_DIR, which calls this function.
    assert run_again(frozen).steps == 9
    assert_equal_weights(frozen, fit("callbacks=[own]"))


def test_exp_resume_repeats_the_command_of_the_run(capsys):
    first = fit("trainer.max_epochs=1")
    assert resume.main([str(first), "trainer.max_epochs=3"]) == 0
    (second,) = [run for run in Path("outputs/train").glob("*/*") if run.absolute() != first]
    assert_equal_weights(second, fit())
    assert resume.main(["outputs"]) == 1
    assert "outputs has no config.yaml; expected a run directory" in capsys.readouterr().err


def test_verify_reports_exact_or_the_first_different_tensor(capsys):
    run = fit("scheduler=cosine", "trainer.max_time=1h", "callbacks=[ema]", "checkpoint.every_n_steps=2")
    last = run / "checkpoints" / "last.ckpt"
    assert resume.main([str(run), "--verify"]) == 0
    assert f"exact: {last}, step 9, trained again from the start" in capsys.readouterr().out
    kept = ["checkpoint.async=true", "checkpoint.every_n_minutes=0.001"]
    longer = fit("scheduler=cosine", "trainer.max_epochs=5", "callbacks=[ema]", f"resume={last}", *kept)
    last = longer / "checkpoints" / "last.ckpt"
    assert resume.main([str(longer), "--verify"]) == 0
    assert f"exact: {last}, step 15, trained again from " in capsys.readouterr().out
    state = read_checkpoint(last)
    state["optimizer_states"][0]["state"][3]["exp_avg"][1] += 1.0
    AtomicCheckpointIO().save_checkpoint(state, last)
    assert resume.main([str(longer), "--verify"]) == 1
    said = capsys.readouterr().out
    assert "differs: " in said
    assert "optimizer_states.0.state.3.exp_avg: 1 of 16 values, by 1 at most" in said


def test_verify_of_a_run_that_failed_is_exact(write, capsys):
    write("own.py", SPOILS)
    write("conf/callbacks/own.yaml", "own: {_target_: own.Own}\n")
    with pytest.raises(exp.RunError, match="nan"):
        fit("callbacks=[own]")
    (run,) = Path("outputs/train").glob("*/*")
    assert resume.main([str(run), "--verify"]) == 0
    assert "last.ckpt, step 6, trained again from" in capsys.readouterr().out


def children():
    """Return the run directories in the order of their creation."""
    return sorted((run for run in Path("outputs/train").glob("*/*")), key=lambda run: run.stat().st_ctime_ns)


def test_a_fork_without_a_change_equals_its_parent(capsys):
    whole = fit("callbacks=[ema]", "scheduler=cosine", "trainer.check_val_every_n_epoch=2")
    assert fork.main([f"{whole}@6"]) == 0
    child = children()[-1]
    assert_equal_weights(child, whole)
    parent = json.loads((child / "provenance.json").read_text())["parent"]
    assert (parent["run"], parent["step"], parent["changed"]) == (str(whole), 6, {})
    assert f"{whole.relative_to(Path.cwd())}@6" in capsys.readouterr().out


@pytest.mark.parametrize("schedule", ["cosine", pytest.param("constant", marks=pytest.mark.slow)])
def test_a_fork_changes_the_optimizer_from_its_step_on(schedule):
    whole = fit("trainer.max_epochs=1", f"scheduler={schedule}", "checkpoint.save_best=false")
    # The fork by hand is a run with the new rate that resumes the same state with this rate in it.
    values = ["optimizer.lr=0.01", "optimizer.weight_decay=0.1"]
    by_hand = read_checkpoint(whole / "checkpoints" / "last.ckpt")
    for group in by_hand["optimizer_states"][0]["param_groups"]:
        group.update(lr=0.01 * (group["lr"] / 0.003), weight_decay=0.1)
        group.update({"initial_lr": 0.01} if "initial_lr" in group else {})
    for held in by_hand["lr_schedulers"]:
        held.update(base_lrs=[0.01], _last_lr=[0.01 * (held["_last_lr"][0] / 0.003)])
    other = fit("trainer.max_epochs=1", f"scheduler={schedule}", "checkpoint.save_best=false", *values)
    by_hand["exp_config"] = (other / "config.yaml").read_text()
    AtomicCheckpointIO().save_checkpoint(by_hand, "by_hand.ckpt")
    expected = fit(f"scheduler={schedule}", *values, "resume=by_hand.ckpt")

    assert fork.main([f"{whole}@3", *values, "trainer.max_epochs=3", "checkpoint.save_best=true"]) == 0
    child = children()[-1]
    assert_equal_weights(child, expected)
    changed = read_report(child).parent["changed"]
    assert changed["optimizer.lr"] == [0.003, 0.01]
    assert changed["trainer.max_epochs"] == [1, 3]
    assert "optimizer.lr 0.003 -> 0.01" in (child / "report.md").read_text()


def test_a_forks_report_omits_values_only_its_parent_logged():
    whole = fit("trainer.max_epochs=1", "hooks=[memory]")
    assert "memory/parameters_mib" in read_report(whole).metrics
    assert fork.main([f"{whole}@3", "trainer.max_epochs=2", "hooks=[]"]) == 0
    metrics = read_report(children()[-1]).metrics
    assert "loss/val" in metrics
    assert not [tag for tag in metrics if tag.startswith("memory/")]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("optimizer=sgd", "another optimizer: optimizer._target_ was"),
        pytest.param("model=mlp", "another model: ", marks=pytest.mark.slow),
        pytest.param("scheduler=cosine", "another scheduler: ", marks=pytest.mark.slow),
    ],
)
def test_a_fork_that_does_not_fit_its_parent_is_refused(change, said, capsys):
    whole = fit("trainer.max_epochs=1")
    assert fork.main([f"{whole}@3", change, "trainer.max_epochs=2"]) == 2
    assert said in capsys.readouterr().err
    assert children() == [whole.relative_to(Path.cwd())]


def test_a_fork_needs_a_step_of_its_parent_and_trust(capsys):
    whole = fit("trainer.max_epochs=1", "security.allow=[somebody]")
    assert fork.main([f"{whole}@3"]) == 2
    assert "If you trust the packages, add 'security.allow=[somebody]' to this command" in capsys.readouterr().err
    assert fork.main([f"{whole}@9", "security.allow=[]"]) == 2
    assert "RUN@STEP: step 9; expected a step that has a checkpoint: 3" in capsys.readouterr().err
    assert fork.main([f"{whole}@x", "security.allow=[]"]) == 2
