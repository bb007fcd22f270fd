"""Each job has a process of its own: whatever it does to it is one row of the table, and the others go on."""

import csv
import os
import shutil
import signal
import subprocess
import time
from pathlib import Path

import psutil
import pytest

ENDS = Path(__file__).with_name("ends.py")
SMALL = ("callbacks=[ends]", "hooks=[]", "logger=[]", "test=false", "trainer.limit_val_batches=1")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    shutil.copy(ENDS, tmp_path)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "ends.yaml").write_text(
        "# Ends: callbacks=[ends]\nends: {_target_: ends.Ends, how: well}\n"
    )


def table() -> list[dict[str, str]]:
    (path,) = Path("outputs").rglob("table.csv")
    return list(csv.DictReader(path.read_text().splitlines()))


def waiting(commands):
    """A sweep whose first job trains until it is ended, once it does."""
    started = commands.start(
        "-m", *SMALL, "trainer.max_epochs=100000", "seed=1,2", "sweep.jobs=1", "callbacks.ends.how=waits"
    )
    while not Path("found").exists():
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    return started


def test_every_end_of_a_process_is_one_row_and_the_next_job_runs_as_ever(commands):
    hows = ["exit_0", "segmentation_fault", "killed", "sys_exit", "no_memory", "changes", "well"]
    done = commands.run("-m", *SMALL, "trainer.max_steps=2", f"callbacks.ends.how={','.join(hows)}")
    assert done.returncode == 1, done.stderr
    rows = table()
    assert [row["status"] for row in rows] == ["failed"] * 5 + ["completed"] * 2
    for row, words in zip(
        rows,
        (
            "ended with status 0 without a word",
            "was killed by SIGSEGV",
            "was killed by SIGKILL (the system does so when the memory is used up)",
            "SystemExit: 0",
            "out of memory",
        ),
        strict=False,
    ):
        assert words in row["error"]
    assert "the last line of its log" in rows[0]["error"]
    assert "ends.py" in rows[1]["error"], "where the segmentation fault was"
    reports = [path.parent.name for path in Path("outputs").rglob("report.json")]
    assert sorted(reports) == [str(number) for number in range(7)]
    assert set(Path("found").read_text().splitlines()) == {"torch.float32 None True"}


def test_ctrl_c_reaches_the_job_which_saves_and_the_rest_is_not_started(commands):
    started = waiting(commands)
    os.kill(started.process.pid, signal.SIGINT)
    done = started.end()
    assert done.returncode == 130, done.stderr
    assert [row["status"] for row in table()] == ["interrupted", "not started"]
    assert "It goes on with" in done.stderr
    assert len(list(Path("outputs").rglob("last.ckpt"))) == 1


def test_a_killed_sweep_leaves_no_job_behind(commands):
    started = waiting(commands)
    jobs = psutil.Process(started.process.pid).children(recursive=True)
    assert jobs
    os.kill(started.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(jobs, timeout=60)[1] == []  # by itself none would end


@pytest.fixture
def ending_model():
    Path("conf/model").mkdir()
    Path("conf/model/ending.yaml").write_text(
        "# Ends: model=ending\n_target_: torch.nn.Sequential\n"
        "_args_: [{_target_: ends.Layer, how: well, at: constructor}, {_target_: torch.nn.Flatten},"
        " {_target_: torch.nn.LazyLinear, out_features: 10}]\n"
    )


@pytest.mark.parametrize(("module", "at"), [("exp.train", "constructor"), ("exp.check.__main__", "forward")])
def test_every_end_of_a_check_is_a_fault_of_its_job_and_nothing_is_started(ending_model, module, at, commands):
    hows = ["exit_0", "segmentation_fault", "well", "killed", "sys_exit", "ctrl_c", "base"]
    swept = f"model._args_.0.how={','.join(hows)}"
    done = commands.run(
        "-m", "model=ending", f"model._args_.0.at={at}", "hooks=[]", "callbacks=[]", swept, module=module
    )
    assert done.returncode == 2, done.stdout + done.stderr
    assert "6 faults in the config; nothing was started" in done.stderr
    for number, words in {
        0: "ended with status 0 without a word",
        1: "was killed by SIGSEGV",
        3: "was killed by SIGKILL",
        4: "SystemExit: 0",
        5: "ended with KeyboardInterrupt",
        6: "ended with BaseException: of the user's own",
    }.items():
        (line,) = [line for line in done.stderr.splitlines() if f"[job {number} (" in line]
        assert words in line
    assert 'ends.py", line' in done.stderr, "where the segmentation fault was"
    assert not Path("outputs").exists()


def test_an_interruption_of_the_check_ends_the_sweep_and_leaves_nothing(ending_model, commands):
    started = commands.start("-m", "model=ending", "model._args_.0.how=hangs", "seed=1,2")
    while not Path("found").exists():
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    os.kill(started.process.pid, signal.SIGINT)
    done = started.end()
    assert done.returncode == 130, done.stderr
    assert "Traceback" not in done.stderr
    assert not Path("outputs").exists()


def test_a_signal_while_a_proposal_of_a_search_is_checked_reaches_the_running_job_which_saves(ending_model, commands):
    started = commands.start(
        "-m", *SMALL, "model=ending", "model._args_.0.how=hangs_beside_a_job", "callbacks.ends.how=waits",
        "optimizer.lr=interval(0.001,0.1)", "sweep.trials=3", "sweep.jobs=2", "trainer.max_epochs=100000",
    )  # fmt: skip
    while not Path("checks").exists():
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    os.kill(started.process.pid, signal.SIGTERM)
    done = started.end()
    assert done.returncode == 143, done.stderr
    assert [row["status"] for row in table()] == ["interrupted"]
    assert len(list(Path("outputs").rglob("last.ckpt"))) == 1
    assert "It goes on with" in done.stderr


def test_a_second_ctrl_c_ends_a_sweep_at_once(commands):
    how = "callbacks.ends.how=waits_in_vain"
    started = commands.start("-m", *SMALL, "trainer.max_epochs=100000", how, "sweep.jobs=2", "seed=1,2,3,4")
    while len(list(Path().glob("waits*"))) < 2:
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    # Nearly together, as an impatient hand has it.
    for _ in range(2):
        os.kill(started.process.pid, signal.SIGINT)
        time.sleep(0.1)
    done = started.end(seconds=60)
    assert done.returncode == 130, done.stderr
    assert [row["status"] for row in table()] == ["interrupted", "interrupted", "not started", "not started"]


@pytest.mark.parametrize("how", ["raises_in_a_stack", "raises_later"])
def test_an_error_in_a_stack_ends_none_that_would_not_end_alone(ending_model, how, commands):
    Path("conf/model/ending.yaml").write_text(
        Path("conf/model/ending.yaml").read_text().replace("constructor", "forward")
    )
    alone = ("hooks=[]", "logger=[]", "test=false", "callbacks=[]", "trainer.max_epochs=6", "sweep.stack=true")
    done = commands.run("-m", *alone, "model=ending", f"model._args_.0.how={how}", "optimizer.lr=1e-3,1e-2", "seed=0,1")
    rows = table()
    assert "together they ended with ValueError: of a layer of the user's own" in done.stdout
    if how == "raises_later":
        assert done.returncode == 1
        assert [row["status"] for row in rows] == ["failed"] * 4
        assert all("ValueError: of a layer of the user's own" in row["error"] for row in rows)
    else:
        assert done.returncode == 0, done.stdout + done.stderr
        assert [row["status"] for row in rows] == ["completed"] * 4


def test_eight_ends_in_one_sweep_are_eight_rows_that_say_what_happened_and_the_others_complete(commands):
    hows = ["raises", "exit_0", "sys_exit", "segmentation_fault", "killed", "limited_memory", "full_disk", "one_rank"]
    done = commands.run(
        "-m", *SMALL, "trainer.max_steps=4", "checkpoint.every_n_steps=2", "launch.accelerator=cpu", "sweep.jobs=2",
        f"callbacks.ends.how={','.join([*hows, 'well'])}", "strategy=auto,ddp",
        "+sweep.when={strategy: {callbacks.ends.how: one_rank}}",
    )  # fmt: skip
    assert done.returncode == 1, done.stderr
    rows = table()
    expected = [
        "ValueError: of the user's own",
        "ended with status 0 without a word",
        "SystemExit: 0",
        "was killed by SIGSEGV; Segmentation fault in",
        "was killed by SIGKILL (the system does so when the memory is used up)",
        "out of memory",
        "File too large",
        None,  # one_rank, where there is one
        "rank 1 ended with status 0 without a word",
        None,
    ]
    assert len(rows) == len(expected)
    for row, words in zip(rows, expected, strict=True):
        assert row["status"] == ("completed" if words is None else "failed"), row
        assert (words or "") in row["error"]
        assert not row["error"].endswith("goes on with")


@pytest.fixture
def small_disk():
    """A directory on a file system of its own, with 400 kB."""
    place = Path("disk")
    place.mkdir()
    made = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(place)], capture_output=True, check=False
    )
    if made.returncode:
        pytest.skip("only root mounts a file system")
    yield place
    subprocess.run(["umount", str(place)], check=True)


@pytest.mark.parametrize("width", [64, 8])
def test_a_full_disk_ends_jobs_or_the_sweep_with_one_line_and_leaves_no_process(small_disk, width, commands):
    """width: so large that a checkpoint finds no room; or that the sweep's own table finds none first."""
    started = commands.start(
        "-m", *SMALL, "model=mlp", f"model.constants.width={width}", "trainer.max_steps=20", "sweep.jobs=2",
        "checkpoint.every_n_steps=2", "seed=range(0,8)", f"hydra.sweep.dir={small_disk}/sweep",
    )  # fmt: skip
    while not list(small_disk.glob("sweep/*/output.log")):
        assert started.process.is_alive(), started.end()
        time.sleep(0.01)
    children = psutil.Process(started.process.pid).children(recursive=True)
    done = started.end()
    assert done.returncode == 1, done.stdout + done.stderr
    assert "Traceback" not in done.stderr
    assert "No space left on device" in done.stdout + done.stderr
    if width == 8:
        (line,) = done.stderr.splitlines()
        assert line.endswith("No space left on device. Make room there, and go on with sweep.resume=disk/sweep")
    assert psutil.wait_procs(children, timeout=30)[1] == []


def test_where_the_process_that_starts_the_jobs_is_killed_their_rows_say_so_and_the_sweep_goes_on(commands):
    started = commands.start(
        "-m", *SMALL, "trainer.max_epochs=100000", "seed=1,2,3", "sweep.jobs=2",
        "callbacks.ends.how=waits", "sweep.max_failures=1",
    )  # fmt: skip
    while len(list(Path().glob("waits*"))) < 2:
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    children = psutil.Process(started.process.pid).children(recursive=True)
    (zygote,) = [child for child in psutil.Process(started.process.pid).children() if len(child.children()) == 2]
    zygote.kill()
    done = started.end(seconds=60)
    assert done.returncode == 1, done.stderr
    rows = table()
    assert [row["status"] for row in rows] == ["failed", "failed", "not started"]
    assert all("ended with the process that starts the jobs, which is gone" in row["error"] for row in rows[:2])
    assert psutil.wait_procs(children, timeout=30)[1] == []
