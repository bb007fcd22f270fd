"""A killed or interrupted sweep resumes: no job is lost, no job runs twice, and no value changes."""

import csv
import json
import os
import shutil
import signal
import time
from pathlib import Path

import optuna
import psutil
import pytest
import yaml

import exp
from exp.check.continuation import changed_values
from exp.check.resolution import resolve
from exp.engine.trial_record import STUDY, open_journal
from exp.files import open_atomic
from exp.run_report import read_report
from exp.sweeps.ledger import identity_of

SMALL = ("model=mlp", "model.constants.width=16", "hooks=[]", "logger=[]", "test=false")
GRID = ("optimizer.lr=1e-4,1e-3,1e-2", "seed=0,1")
SEARCH = ("optimizer.lr=tag(log,interval(1e-4,1e-1))", "optimizer.weight_decay=0,0.1")
WHOLE, BROKEN = Path("outputs/whole"), Path("outputs/broken")
# Columns that depend on the process and on the machine.
MEASURED = ("seconds", "peak_mib", "error")


def table(directory: Path) -> list[dict[str, str]]:
    rows = list(csv.DictReader((directory / "table.csv").read_text().splitlines()))
    return [{key: value for key, value in row.items() if key not in MEASURED} for row in rows]


def trials(directory: Path) -> list[tuple[object, ...]]:
    """Return number, proposal, values, intermediate values and state of each trial of a search."""
    study = optuna.load_study(study_name=STUDY, storage=open_journal(directory))
    return [
        (trial.number, trial.params, trial.values, trial.intermediate_values, trial.state) for trial in study.trials
    ]


def run(commands, *overrides: str) -> str:
    done = commands.run("-m", *SMALL, *overrides)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_killed_sweep_resumes_exactly(commands, started):
    grid = ("seed=0,1", "trainer.max_epochs=3", "precision=fp64", "runtime.threads=1", "sweep.jobs=1")
    command = started(
        "-m", *SMALL, *grid, f"hydra.sweep.dir={BROKEN}", pattern=f"{BROKEN}/1/checkpoints/last.ckpt"
    )  # fmt: skip
    os.kill(command.process.pid, signal.SIGKILL)
    command.end()
    partial, mine = BROKEN / "1" / ".table.csv.10463.139792075647872.partial", BROKEN / ".mine.partial"
    for path in (partial, mine):
        path.touch()
    first = (BROKEN / "0" / "report.json").stat().st_mtime_ns
    with open_atomic(BROKEN / "written_now.csv") as file:
        run(commands, *grid, f"sweep.resume={BROKEN}")
        file.write(b"whole")
    assert (BROKEN / "0" / "report.json").stat().st_mtime_ns == first, "a completed job ran again"
    assert [(row["seed"], row["status"]) for row in table(BROKEN)] == [("0", "completed"), ("1", "completed")]
    alone = exp.fit(exp.compose([*SMALL, *grid[1:4], "seed=1", "hydra.run.dir=outputs/alone"]))
    resumed = read_report(BROKEN / "1")
    assert resumed.steps == alone.steps == 60
    assert resumed.metrics["loss/val"] == pytest.approx(alone.metrics["loss/val"], rel=1e-12)
    assert not partial.exists()
    assert mine.exists()
    assert (BROKEN / "written_now.csv").read_text() == "whole"


def kill_at_random(commands, share, *overrides: str) -> None:
    """Run a sweep, kill and resume it several times, and let it complete."""
    random = share.random()
    resume = [f"hydra.sweep.dir={BROKEN.absolute()}"]
    for _ in range(share.count(20)):
        command = commands.start("-m", *SMALL, *overrides, *resume)
        end = time.monotonic() + random.uniform(0.5, 2.5)
        while time.monotonic() < end and command.process.is_alive():
            time.sleep(0.01)
        if not command.process.is_alive():
            break
        os.kill(command.process.pid, signal.SIGKILL)
        command.end()
        if BROKEN.is_dir() and not (BROKEN / "sweep.json").is_file():
            shutil.rmtree(BROKEN)  # killed before it wrote sweep.json, so it cannot be resumed
        if BROKEN.is_dir():
            resume = [f"sweep.resume={BROKEN.absolute()}"]
    run(commands, *overrides, *resume)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*GRID, "sweep.stack=false"), id="grid"),
        pytest.param((*GRID, "sweep.stack=true"), id="stack"),
        pytest.param((*SEARCH, "sweep.trials=9", "sweep.pruner=median", "sweep.jobs=1"), id="search"),
        pytest.param((*SEARCH, "sweep.trials=10", "sweep.jobs=2"), id="search of two at a time"),
    ],
)
def test_kills_at_any_moment_change_no_value(overrides, commands, share):
    epochs = f"trainer.max_epochs={4 + 2 * share.count(20)}"
    run(commands, *overrides, epochs, f"hydra.sweep.dir={WHOLE}")
    kill_at_random(commands, share, *overrides, epochs)
    assert table(BROKEN) == table(WHOLE)
    jobs = [json.loads(line) for line in (BROKEN / "jobs.jsonl").read_text().splitlines()]
    assert sorted(job["job"] for job in jobs) == list(range(len(table(WHOLE)))), "each job must be listed once"
    runs = sorted(path.parent.name for path in BROKEN.glob("*/config.yaml"))
    assert runs == sorted(str(job["job"]) for job in jobs)
    assert [path for path in BROKEN.rglob(".*") if path.name != ".gitignore"] == [], "half-written files"
    if (WHOLE / "sweep.journal").is_file():
        assert trials(BROKEN) == trials(WHOLE)


@pytest.mark.slow
@pytest.mark.parametrize(
    "overrides",
    [
        pytest.param((*GRID, "sweep.stack=false", "trainer.max_epochs=200"), id="grid"),
        pytest.param((*GRID, "trainer.max_epochs=200"), id="stack"),
        pytest.param((SEARCH[0], "sweep.trials=40", "trainer.max_epochs=60"), id="search"),
    ],
)
def test_a_signal_at_any_moment_saves_the_running_jobs(overrides, commands, share, tmp_path):
    random = share.random()
    for number in range(share.count(20)):
        (tmp_path / str(number)).mkdir()
        os.chdir(tmp_path / str(number))
        after, signum = random.uniform(0, 3), random.choice((signal.SIGTERM, signal.SIGINT))
        command = commands.start(
            "-m", *SMALL, *overrides, "sweep.jobs=2", f"hydra.sweep.dir={BROKEN}", fresh_ranks=True
        )
        while not BROKEN.exists():
            assert command.process.is_alive(), command.end()
            time.sleep(0.002)
        time.sleep(after)
        children = psutil.Process(command.process.pid).children(recursive=True)
        os.kill(command.process.pid, signum)
        done = command.end(seconds=120)
        said = f"{signum} after {after:.2f} s: {done.stdout}{done.stderr}"
        assert psutil.wait_procs(children, timeout=30)[1] == [], said
        assert done.returncode == 128 + signum, said
        assert "Traceback" not in done.stderr, said
        if not BROKEN.exists():
            continue  # the signal came before the first job
        rows = table(BROKEN)
        by_directory = {row["directory"]: row for row in rows if row["directory"]}
        for directory in (path.parent for path in BROKEN.glob("*/config.yaml")):
            status = json.loads((directory / "report.json").read_text())["status"]
            assert status == by_directory[directory.name]["status"], said
            assert status in ("completed", "interrupted"), said
        assert {row["status"] for row in rows} <= {"completed", "interrupted", "not started"}, said
        assert "Resume with" in done.stderr, said


def test_trials_that_are_known_together_are_stacked(commands):
    stacked = (SEARCH[0], "sweep.stack=true", "sweep.jobs=1", "trainer.max_epochs=2")
    run(commands, *stacked, "sweep.sampler=random", "sweep.trials=8", f"hydra.sweep.dir={WHOLE}")
    rows = table(WHOLE)
    assert [row["status"] for row in rows] == ["completed"] * 8
    logs = [(WHOLE / row["directory"] / "train.log").read_text() for row in rows]
    assert all("trained in a stack of 8 jobs" in log for log in logs)
    configs = [yaml.safe_load((WHOLE / row["directory"] / "config.yaml").read_text()) for row in rows]
    assert [config["sweep"]["trial"] for config in configs] == [{"number": n, "sweep": ".."} for n in range(8)]
    study = optuna.load_study(study_name=STUDY, storage=open_journal(WHOLE))
    assert [trial.state.name for trial in study.trials] == ["COMPLETE"] * 8


@pytest.mark.parametrize("stack", ["auto", pytest.param("true", marks=pytest.mark.slow)])
def test_a_search_prunes_trials_that_fall_behind(stack, commands):
    """A pruner compares a job with earlier jobs, so jobs with a pruner are not stacked."""
    searched = ("optimizer.lr=tag(log,interval(1e-7,1e-1))", "sweep.sampler=random", "sweep.trials=4")
    pruned = ("sweep.pruner=asha", "sweep.jobs=1", f"sweep.stack={stack}", "trainer.max_epochs=2", "data=wine")
    run(commands, *searched, *pruned, f"hydra.sweep.dir={WHOLE}")
    states = {"COMPLETE": "completed", "PRUNED": "pruned"}
    assert [row["status"] for row in table(WHOLE)] == [states[trial[4].name] for trial in trials(WHOLE)]
    completed, fallen = ([trial for trial in trials(WHOLE) if trial[4].name == name] for name in states)
    assert min(trial[3][1] for trial in completed) < min(trial[3][1] for trial in fallen)
    assert all(len(trial[3]) == 1 for trial in fallen), "trained after they were pruned"
    assert len(completed[-1][3]) == 2


def test_a_job_has_the_identity_that_an_earlier_version_gave_it():
    # Identity of the default config in the version of earlier_config.yaml.
    identity, earlier = "24cd1e09c3bbece1", yaml.safe_load(Path(__file__).with_name("earlier_config.yaml").read_text())
    now = resolve(exp.compose([])).plain
    assert identity_of(earlier) == identity_of(now) == identity
    assert changed_values(earlier, {**now, "seed": 1}).keys() == {"seed"}
    assert identity_of({**now, "seed": 1}) != identity
    assert identity_of({**now, "data": {**now["data"], "split": {**now["data"]["split"], "folds": 3}}}) != identity
