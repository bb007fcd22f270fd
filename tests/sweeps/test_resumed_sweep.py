"""A sweep that is killed with kill -9 at any moment, and gone on with, against one that nothing broke off."""

import csv
import json
import os
import random
import shutil
import signal
import time
from pathlib import Path

import optuna
import pytest

from exp.engine.trial_record import STUDY, opened
from exp.files import replacing

# At so many moments each sweep is killed; more with KILLS=20 pytest tests/sweeps/test_resumed_sweep.py.
KILLS = int(os.environ.get("KILLS", "2"))
EPOCHS = 4 + 2 * KILLS
SMALL = ("model=mlp", "model.constants.width=16", "hooks=[]", "logger=[]", "test=false", f"trainer.max_epochs={EPOCHS}")
# What differs by itself: the time it took, what it took, and by which processes.
BESIDE = ("seconds", "peak_mib", "error")


@pytest.fixture(autouse=True)
def _place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def table(directory: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((directory / "table.csv").read_text().splitlines()))
    return [{key: value for key, value in row.items() if key not in BESIDE} for row in rows]


def trials(directory: Path) -> list[tuple[object, ...]]:
    """Of the record of a search: what was proposed, reported, and came of it."""
    study = optuna.load_study(study_name=STUDY, storage=opened(directory, None))
    return [
        (trial.number, trial.params, trial.values, trial.intermediate_values, trial.state) for trial in study.trials
    ]


def killed_sweep(commands, *overrides: str, kills: int) -> Path:
    """Run a sweep to its end, killed so often before; its directory."""
    seconds = random.Random(5)
    directory = Path("outputs/broken").absolute()
    resume = [f"hydra.sweep.dir={directory}"]
    done = 0
    for _ in range(kills):
        started = commands.start("-m", *overrides, *resume)
        end = time.monotonic() + seconds.uniform(0.8, 2.5)
        while time.monotonic() < end and started.process.is_alive():
            time.sleep(0.01)
        if not started.process.is_alive():
            started.end()
            break
        os.kill(started.process.pid, signal.SIGKILL)
        done += 1
        started.end()
        if directory.is_dir() and not (directory / "sweep.json").is_file():
            shutil.rmtree(directory)  # nothing was begun
        if directory.is_dir():
            resume = [f"sweep.resume={directory}"]
    print(done, "kills")
    ended = commands.run("-m", *overrides, *resume)
    assert ended.returncode == 0, ended.stderr
    return directory


@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param(("optimizer.lr=1e-4,1e-3,1e-2", "seed=0,1", "sweep.stack=false"), id="grid"),
        # Said, for `auto` measures, and a layer norm rounds otherwise in a stack.
        pytest.param(("optimizer.lr=1e-4,1e-3,1e-2", "seed=0,1", "sweep.stack=true"), id="stack"),
        pytest.param(
            ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "optimizer.weight_decay=0,0.1", "sweep.trials=9",
             "sweep.pruner=median", "sweep.jobs=1"),
            id="search",
        ),
        pytest.param(
            ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "optimizer.weight_decay=0,0.1", "sweep.trials=10",
             "sweep.jobs=2"),
            id="search of two at a time",
        ),
    ],
)  # fmt: skip
def test_none_is_lost_none_runs_twice_and_every_value_is_the_same(overrides, commands):
    whole = Path("outputs/whole").absolute()
    done = commands.run("-m", *SMALL, *overrides, f"hydra.sweep.dir={whole}")
    assert done.returncode == 0, done.stderr
    broken = killed_sweep(commands, *SMALL, *overrides, kills=KILLS)
    assert table(broken) == table(whole)
    jobs = [json.loads(line) for line in (broken / "jobs.jsonl").read_text().splitlines()]
    assert sorted(job["job"] for job in jobs) == list(range(len(table(whole)))), "each is there once"
    runs = sorted(path.parent.name for path in broken.glob("*/config.yaml"))
    assert runs == sorted(str(job["job"]) for job in jobs)
    assert [path for path in broken.rglob(".*") if path.name != ".gitignore"] == [], "half-written files"
    if (whole / "sweep.journal").is_file():
        assert trials(broken) == trials(whole)


def test_what_a_killed_sweep_left_half_written_is_removed_as_it_goes_on_and_nothing_else(commands):
    directory = Path("outputs/broken").absolute()
    grid = (*SMALL, "seed=0,1", "trainer.max_epochs=1", f"hydra.sweep.dir={directory}")
    done = commands.run("-m", *grid)
    assert done.returncode == 0, done.stderr
    places = (directory, directory / "0", directory / "0" / "checkpoints", directory / "1" / "pictures")
    for place in places:
        place.mkdir(exist_ok=True)
        (place / ".table.csv.10463.139792075647872.partial").write_text("job,")
        (place / ".mine.partial").write_text("of the user")
    (directory / "1" / "report.json").unlink()
    with replacing(directory / "written_now.csv") as file:
        done = commands.run("-m", *grid[:-1], f"sweep.resume={directory}")
        assert done.returncode == 0, done.stderr
        file.write(b"whole")
    left = set(directory.rglob(".*.partial"))
    assert left == {place / ".mine.partial" for place in places}
    assert (directory / "written_now.csv").read_text() == "whole"


@pytest.mark.parametrize(
    ("overrides", "number", "together"),
    [
        pytest.param(("sweep.sampler=random", "sweep.trials=8"), 8, 8, id="all that a random search draws"),
        pytest.param(("seed=0,1,2,3", "sweep.repeat_over=seed", "sweep.trials=2"), 2, 4, id="the repeats of a trial"),
    ],
)
def test_jobs_of_a_search_that_are_known_together_are_trained_together(overrides, number, together, commands):
    drawn = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "sweep.stack=true", "sweep.jobs=1")
    directory = Path("outputs/search").absolute()
    done = commands.run("-m", *SMALL, *drawn, *overrides, f"hydra.sweep.dir={directory}")
    assert done.returncode == 0, done.stderr
    rows = table(directory)
    assert [row["status"] for row in rows] == ["completed"] * 8
    logs = [(directory / row["directory"] / "train.log").read_text() for row in rows]
    assert all(f"trained in a stack of {together} jobs" in log for log in logs)
    study = optuna.load_study(study_name=STUDY, storage=opened(directory, None))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * number


def result(directory: Path) -> tuple[object, ...]:
    report = json.loads((directory / "report.json").read_text())
    return report["status"], report["steps"], report["best"], report["metrics"]["loss/val"]


def test_a_stack_that_was_killed_in_part_goes_on_as_one_whatever_is_left_of_it(commands):
    # A layer norm rounds otherwise in a stack, which is too few here for the next one.
    grid = (
        "model=mlp",
        "model.constants.width=16",
        *SMALL[2:5],
        "trainer.max_epochs=6",
        "optimizer.lr=1e-3,1e-2",
        "seed=0,1",
    )
    whole, broken = Path("outputs/whole").absolute(), Path("outputs/broken").absolute()
    done = commands.run("-m", *grid, f"hydra.sweep.dir={whole}", "sweep.stack=true", "sweep.jobs=1")
    assert done.returncode == 0, done.stderr
    shutil.copytree(whole, broken)
    (broken / "1" / "report.json").unlink()  # killed behind its last checkpoint
    for name in ("report.json", "checkpoints/last.ckpt"):
        (broken / "2" / name).unlink()  # before its first one
    for name in ("report.json", "checkpoints/last.ckpt", "provenance.json", "overrides.yaml"):
        (broken / "3" / name).unlink()  # as its config was frozen
    done = commands.run("-m", *grid, "sweep.stack=auto", "sweep.jobs=1", f"sweep.resume={broken}")
    assert done.returncode == 0, done.stderr
    for job in range(4):
        one, other = result(whole / str(job)), result(broken / str(job))
        other[2]["checkpoint"] = one[2]["checkpoint"]
        assert one == other
