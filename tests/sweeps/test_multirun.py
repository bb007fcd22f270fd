"""multirun.sh: the three ways, with further overrides behind them."""

import csv
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("trainer.max_epochs=1", "hooks=[]", "test=false", "launch.accelerator=cpu")


@pytest.fixture
def script(tmp_path):
    """Of this checkout, run in a folder of its own with this Python."""
    (tmp_path / "multirun.sh").write_bytes((ROOT / "multirun.sh").read_bytes())
    (tmp_path / "multirun.sh").chmod(0o755)
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text(f'#!/bin/sh\nexec "{sys.executable}" "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    environment = {**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"}

    def run(*words: str) -> tuple[list[dict[str, str]], str]:
        command = [tmp_path / "multirun.sh", *words, *SHORT]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=300)
        assert done.returncode == 0, done.stdout + done.stderr
        (table,) = tmp_path.glob("outputs/lr_search/sweeps/*/*/table.csv")
        with table.open() as file:
            return list(csv.DictReader(file)), done.stdout

    return run


def test_a_grid_with_other_seeds(script):
    rows, said = script("seed=0,1,2")
    assert sorted((row["optimizer.lr"], row["seed"]) for row in rows) == [
        (lr, seed) for lr in ("0.001", "0.003", "0.01") for seed in "012"
    ]
    assert "best  " in said


def test_a_search_of_fewer_trials(script):
    rows, _ = script("search", "sweep.trials=3")
    assert len(rows) == 3
    assert len({row["optimizer.lr"] for row in rows}) == 3
    assert all(8 <= int(row["model.constants.width"]) <= 64 for row in rows)


def test_repeats_have_means(script):
    rows, said = script("repeats", "seed=0,1")
    assert len(rows) == 4
    assert {row["n"] for row in rows} == {"2"}
    assert "over seed" in said
