"""Processes of a sweep's jobs: a job that ends in any way is one row of the table, and the other jobs continue."""

import json
import os
import signal
import time
from pathlib import Path

import psutil
import pytest

pytestmark = pytest.mark.usefixtures("ends")
SMALL = ("callbacks=[ends]", "hooks=[]", "logger=[]", "test=false", "trainer.limit_val_batches=1", "sweep.stack=false")
ENDLESS = (*SMALL, "trainer.max_epochs=100000", "callbacks.ends.how=waits")
# Part of the job's error for each way in which its process ends; empty if the job completes.
ERRORS = {
    "exit_0": "ended with status 0 without a message. Its output is in outputs/",
    "segmentation_fault": "was killed by SIGSEGV. Its output is in outputs/",
    "changes": "",
    "well": "",
    "sys_exit": "SystemExit: 0",
    "killed": "was killed by SIGKILL (the system kills a process when memory runs out)",
    "no_memory": "out of memory",
    "limited_memory": "out of memory",
    "raises": "ValueError: raised by the user",
    "aborts": "was killed by SIGABRT",
    "full_disk": "File too large",
}


@pytest.mark.parametrize("count", [4, pytest.param(len(ERRORS), marks=pytest.mark.slow)])
def test_each_end_of_a_process_is_one_row(count, commands, table):
    hows = [*ERRORS][:count]
    done = commands.run(
        "-m", *SMALL, "trainer.max_steps=2", "checkpoint.every_n_steps=2", f"callbacks.ends.how={','.join(hows)}"
    )
    assert done.returncode == 1, done.stderr
    for row, how in zip(table(), hows, strict=True):
        assert row["status"] == ("failed" if ERRORS[how] else "completed"), row
        assert ERRORS[how] in row["error"], row
        # If the disk is full, the report is also missing.
        assert how == "full_disk" or len(list(Path("outputs").rglob(f"{row['directory']}/report.json"))) == 1
    assert set(Path("found").read_text().splitlines()) == {"torch.float32 None True"}
    if "aborts" in hows:
        (output,) = Path("outputs").rglob(f"{hows.index('aborts')}/output.log")
        assert "last words of a library" in output.read_text()
    assert "last words of a library" not in done.stdout + done.stderr


def test_two_jobs_run_at_the_same_time(commands, table):
    done = commands.run("-m", *SMALL, "trainer.max_steps=1", "callbacks.ends.how=meets", "seed=1,2", "sweep.jobs=2")
    assert done.returncode == 0, done.stderr
    assert [row["status"] for row in table()] == ["completed"] * 2
    assert all("epoch 1/" in path.read_text() for path in Path("outputs").rglob("output.log"))


def test_ctrl_c_saves_running_jobs_and_starts_no_others(started, table):
    command = started("-m", *ENDLESS, "seed=1,2,3", "sweep.jobs=2", pattern="waits*", count=2)
    os.kill(command.process.pid, signal.SIGINT)
    done = command.end()
    assert done.returncode == 130, done.stderr
    assert [row["status"] for row in table()] == ["interrupted", "interrupted", "not started"]
    assert "Resume with" in done.stderr
    assert len(list(Path("outputs").rglob("last.ckpt"))) == 2


def test_further_ctrl_c_kills_jobs_that_ignore_the_first(started, table):
    how = "callbacks.ends.how=ignores_signals"
    command = started("-m", *ENDLESS, how, "seed=1,2", "sweep.jobs=1", pattern="waits*")
    limit = time.monotonic() + 120
    while command.process.is_alive() and time.monotonic() < limit:
        os.kill(command.process.pid, signal.SIGINT)
        command.process.join(0.3)
    done = command.end(seconds=1)
    assert done.returncode == 130, done.stderr
    assert [row["status"] for row in table()] == ["interrupted", "not started"]


def test_a_killed_sweep_leaves_no_job_behind(started):
    command = started("-m", *ENDLESS, "seed=1,2", "sweep.jobs=1", pattern="waits*")
    jobs = [psutil.Process(int(path.name.removeprefix("waits"))) for path in Path().glob("waits*")]
    os.kill(command.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(jobs, timeout=60)[1] == []


ENDS_OF_CHECKS = {
    "segmentation_fault": "was killed by SIGSEGV",
    "well": None,
    "ctrl_c": "ended with KeyboardInterrupt",
    "exit_0": "ended with status 0 without a message",
    "killed": "was killed by SIGKILL",
    "sys_exit": "SystemExit: 0",
    "base": "ended with BaseException: raised by the user",
}


@pytest.mark.parametrize(
    ("module", "at", "count"),
    [
        ("exp.check", "forward", 3),
        pytest.param("exp.check", "forward", 7, marks=pytest.mark.slow),
        pytest.param("exp.train", "constructor", 7, marks=pytest.mark.slow),
    ],
)
def test_each_end_of_a_check_is_an_error(module, at, count, commands):
    hows = [*ENDS_OF_CHECKS][:count]
    layer = ("model=ending", f"model._args_.0.at={at}", f"model._args_.0.how={','.join(hows)}")
    done = commands.run("-m", *layer, "hooks=[]", "callbacks=[]", module=module)
    assert done.returncode == 2, done.stdout + done.stderr
    assert f"{count - 1} errors in the config; nothing was started" in done.stderr
    for number, how in enumerate(hows):
        lines = [line for line in done.stderr.splitlines() if f"[job {number} (" in line]
        assert [ENDS_OF_CHECKS[how] in line for line in lines] == ([] if how == "well" else [True]), lines
    assert 'ends.py", line' in done.stderr, "the place of the segmentation fault"
    assert not Path("outputs").exists()


def test_ctrl_c_during_the_check_leaves_nothing(started):
    command = started("-m", "model=ending", "model._args_.0.how=hangs", "seed=1,2", pattern="found")
    os.kill(command.process.pid, signal.SIGINT)
    done = command.end()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("outputs").exists()


@pytest.mark.slow
@pytest.mark.parametrize(("how", "status"), [("raises_in_a_stack", "completed"), ("raises_later", "failed")])
def test_jobs_of_a_failed_stack_run_alone(how, status, commands, table):
    layer = ("model=ending", "model._args_.0.at=forward", f"model._args_.0.how={how}")
    alone = ("hooks=[]", "logger=[]", "test=false", "callbacks=[]", "trainer.max_epochs=1", "sweep.stack=true")
    done = commands.run("-m", *alone, *layer, "optimizer.lr=1e-3,1e-2", "seed=0,1")
    assert "the stack ended with ValueError: raised by a layer of the user" in done.stdout
    assert done.returncode == (status == "failed"), done.stdout + done.stderr
    assert [row["status"] for row in table()] == [status] * 4


@pytest.mark.slow
def test_a_rank_that_ends_fails_its_job_alone(commands, table):
    swept = ("callbacks.ends.how=one_rank,well", "strategy=auto,ddp", "launch.accelerator=cpu")
    done = commands.run("-m", *SMALL, *swept, "trainer.max_steps=2", "sweep.jobs=2")
    assert done.returncode == 1, done.stderr
    assert [row["status"] for row in table()] == ["completed", "failed", "completed", "completed"]
    assert "rank 0 failed with" in table()[1]["error"]


CORES = len(os.sched_getaffinity(0))


@pytest.mark.slow
@pytest.mark.skipif(CORES < 2, reason="one core cannot be divided")
@pytest.mark.parametrize("count", [1, 2])
def test_jobs_divide_the_threads_of_the_machine(count, commands):
    # The network is large enough to use more than one thread.
    large = ("model=mlp", "model.constants.width=512", "trainer.max_steps=1", "callbacks.ends.how=threads")
    done = commands.run(
        "-m",
        *SMALL,
        *large,
        f"sweep.jobs={count}",
        "seed=1",
        environment={"OMP_NUM_THREADS": str(CORES)},
        fresh_ranks=True,
    )
    assert done.returncode == 0, done.stderr
    assert json.loads(Path("threads.json").read_text())["threads"] == CORES // count
