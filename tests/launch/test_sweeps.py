"""Sweeps over runs of several ranks: every rank of every job has its own right config."""

import json
import os
import shutil
from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "programs"
RECORDER = """
# Records what each rank trained with: callbacks=[recorder]
recorder: {_target_: recorder.Recorder, lr: "${optimizer.lr}", fail: 0.0}
"""
SMALL = [
    "callbacks=[recorder]",
    "hooks=[]",
    "optimizer=sgd",
    "trainer.max_steps=2",
    "trainer.limit_val_batches=1",
    "test=false",
    "logger=[]",
]


@pytest.fixture
def place(tmp_path, monkeypatch):
    """A working directory with the programs, a ./conf and a sweeper that throws dice."""
    shutil.copytree(PROGRAMS, tmp_path, dirs_exist_ok=True)
    (tmp_path / "conf" / "callbacks").mkdir(parents=True)
    (tmp_path / "conf" / "callbacks" / "recorder.yaml").write_text(RECORDER.lstrip())
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=os.pathsep)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return tmp_path


@pytest.fixture
def exp_sweep(commands, place):
    return lambda *overrides: commands.run("-m", *SMALL, *overrides)


def records(place: Path) -> list[dict]:
    return [json.loads(path.read_text()) for path in sorted((place / "records").iterdir())]


def judge(found: list[dict], sweeps: list[Path], *, jobs: list[tuple[float | None, int]]) -> None:
    """One sweep, and in each of its jobs (lr, ranks) every rank there, once, with the job's own values."""
    assert len(sweeps) == 1, f"{len(sweeps)} sweep directories"
    assert all(record["lr"] == record["lr_used"] for record in found)
    groups: dict[tuple[float, int], list[int]] = {}
    for record in found:
        groups.setdefault((record["lr"], record["world_size"]), []).append(record["rank"])
    for (_, world_size), ranks in groups.items():
        assert sorted(ranks) == list(range(world_size)), f"{world_size} ranks claimed, {ranks} there"
    seen = sorted(groups) if jobs[0][0] is not None else sorted(size for _, size in groups)
    assert seen == (sorted(jobs) if jobs[0][0] is not None else sorted(size for _, size in jobs))


def exp_sweeps(place: Path) -> list[Path]:
    return list(place.glob("outputs/*/sweeps/*/*"))


def test_a_sweep_over_rates_and_numbers_of_ranks_goes_on_where_a_rank_fails_alone(exp_sweep, place):
    done = exp_sweep(
        "optimizer.lr=0.001,0.01", "strategy=auto,ddp", "launch.accelerator=cpu", "callbacks.recorder.fail=0.001"
    )
    assert done.returncode == 1
    assert "rank 1 failed with ValueError: alone" in done.stderr + done.stdout
    judge(records(place), exp_sweeps(place), jobs=[(0.001, 1), (0.01, 1), (0.01, 2)])


def test_a_stochastic_sweep(exp_sweep, place):
    done = exp_sweep("hydra/sweeper=dice", "hydra.sweeper.jobs=1", "strategy=ddp", "launch.accelerator=cpu")
    assert done.returncode == 0, done.stderr
    judge(records(place), exp_sweeps(place), jobs=[(None, 2)])
