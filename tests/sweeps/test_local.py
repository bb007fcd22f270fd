"""Jobs side by side: they overlap, each ends in its own way and in its own files, and nothing of them is left."""

import json
import os
import shutil
import signal
import time
from pathlib import Path

import psutil
import pytest

HERE = Path(__file__).parent
SMALL = ("callbacks=[ends]", "hooks=[]", "logger=[]", "test=false", "trainer.limit_val_batches=1")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("ends.py", "side_by_side.py"):
        shutil.copy(HERE / name, tmp_path)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "ends.yaml").write_text(
        "# Ends: callbacks=[ends]\nends: {_target_: ends.Ends, how: well}\n"
    )


def start(commands, *jobs: str, overrides: tuple[str, ...] = ("trainer.max_steps=2",), at_once: int | str = 2):
    """Jobs that end in these ways, or `how key=value ...` each."""
    listed = [[f"callbacks.ends.how={how}", *others] for how, *others in map(str.split, jobs)]
    Path("jobs.json").write_text(json.dumps(listed))
    return commands.start(*SMALL, *overrides, f"sweep.jobs={at_once}", module="side_by_side")


def end(started) -> dict[int, list[str]]:
    done = started.end()
    assert done.returncode == 0, done.stdout + done.stderr
    return dict(json.loads(Path("ends.json").read_text())["ends"])


def waiting(commands, *hows: str):
    """Jobs that train until they are ended, once they do."""
    started = start(commands, *hows, overrides=("trainer.max_epochs=100000",))
    while len(list(Path().glob("waits*"))) < 2:
        assert started.process.is_alive(), started.end()
        time.sleep(0.05)
    return started


def report(job: int) -> dict:
    return json.loads(Path(f"runs/{job}/report.json").read_text())


def test_two_jobs_at_a_time_overlap_and_the_third_has_the_place_of_the_first_that_ends(commands):
    ends = end(start(commands, "meets", "meets", "well"))
    assert ends == {number: ["completed", ""] for number in range(3)}
    assert Path("found").read_text().startswith("torch.float32 None True")


def test_every_end_of_a_process_is_told_and_the_other_jobs_complete(commands):
    ends = end(
        start(
            commands,
            "raises",
            "exit_0",
            "sys_exit",
            "segmentation_fault",
            "killed",
            "limited_memory",
            "one_rank strategy=ddp launch.accelerator=cpu",
            "full_disk checkpoint.every_n_steps=2",
            "aborts",
            "changes",
            "well",
        )
    )
    words = [
        ("UserCodeError", "ValueError: of the user's own"),
        ("RunError", "ended with status 0 without a word"),
        ("UserCodeError", "SystemExit: 0"),
        ("RunError", "was killed by SIGSEGV; Segmentation fault in"),
        ("RunError", "was killed by SIGKILL (the system does so when the memory is used up)"),
        ("RunError", "out of memory"),
        ("RankError", "rank 1 ended with status 0 without a word"),
        ("RunError", "File too large"),
        ("RunError", "was killed by SIGABRT"),
    ]
    for number, (kind, part) in enumerate(words):
        assert ends[number][0] == kind, ends[number]
        assert part in ends[number][1]
        if part != "File too large":  # nor could the report be written
            assert report(number)["status"] == "failed"
            assert report(number)["error"]["message"].strip()
    assert "ends.py, line" in ends[3][1], "where it crashed, in the user's own code"
    assert [ends[9], ends[10]] == [["completed", ""]] * 2
    assert set(Path("found").read_text().splitlines()) == {"torch.float32 None True"}


def test_what_a_job_prints_is_in_its_own_directory_and_not_on_the_screen(commands):
    started = start(commands, "aborts", "well")
    ends = end(started)
    outputs = [Path(f"runs/{number}/output.log").read_text() for number in range(2)]
    assert "a library's last words" in outputs[0]
    assert "Fatal Python error: Aborted" in outputs[0]
    assert "epoch 1/" in outputs[1]
    assert [stream.read_text() for stream in started.streams] == ["", ""]
    assert sorted(path.name for path in Path("runs").iterdir()) == ["0", "1"]
    assert "Aborted in " in ends[0][1]


def test_ctrl_c_reaches_all_running_jobs_which_save_and_no_other_is_started(commands):
    started = waiting(commands, "waits", "waits", "well")
    os.kill(started.process.pid, signal.SIGINT)
    ends = end(started)
    assert sorted(ends) == [0, 1]
    for number in range(2):
        assert ends[number][0] == "Interrupted"
        assert str(Path(f"runs/{number}/checkpoints/last.ckpt")) in ends[number][1]
        assert Path(f"runs/{number}/checkpoints/last.ckpt").is_file()
        assert report(number)["status"] == "interrupted"


def test_a_second_ctrl_c_kills_jobs_that_do_not_answer_the_first(commands):
    started = waiting(commands, "waits_in_vain", "waits_in_vain")
    for _ in range(2):
        os.kill(started.process.pid, signal.SIGINT)
        time.sleep(0.5)
    ends = end(started)
    assert [ends[number][0] for number in range(2)] == ["Interrupted"] * 2
    assert [report(number)["status"] for number in range(2)] == ["interrupted"] * 2


def test_a_killed_parent_leaves_no_job_behind(commands):
    started = waiting(commands, "waits", "waits")
    children = psutil.Process(started.process.pid).children(recursive=True)
    assert len(children) == 3
    os.kill(started.process.pid, signal.SIGKILL)
    assert psutil.wait_procs(children, timeout=60)[1] == []


CORES = len(os.sched_getaffinity(0))
RANKS = "strategy=ddp launch.accelerator=cpu"


@pytest.mark.skipif(CORES < 2, reason="one core has nothing to share out")
@pytest.mark.parametrize(
    ("at_once", "others", "expected"),
    [
        (1, ["", RANKS], [CORES, CORES // 2]),
        (2, ["", RANKS], [CORES // 2, max(1, CORES // 4)]),
        (2, ["runtime.threads=3"], [3]),
    ],
)
def test_threads_are_shared_out(commands, at_once, others, expected):
    with Path("side_by_side.py").open("a") as file:
        file.write('\n\nimport os\n\nimport torch\n\nos.environ.pop("OMP_NUM_THREADS", None)\n')
        file.write(f"torch.set_num_threads({CORES})\n")
    # A network that is large enough for more than one.
    large = ("model=mlp", "model.constants.width=512", "trainer.max_steps=1")
    ends = end(start(commands, *(f"says {one}" for one in others), overrides=large, at_once=at_once))
    assert ends == {number: ["completed", ""] for number in range(len(others))}
    # A rank is a fresh interpreter, of which torch reads the variable.
    places = [("threads1.json", "variable") if one == RANKS else ("threads.json", "threads") for one in others]
    assert [int(json.loads(Path(file).read_text())[name]) for file, name in places] == expected
