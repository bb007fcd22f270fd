"""The three kinds of sweeps in multirun.sh, with further overrides."""

import csv
import os
import shutil
import subprocess
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
SHORT = ("trainer.max_epochs=1", "hooks=[]", "test=false", "launch.accelerator=cpu")


@pytest.fixture
def script(tmp_path, scripts):
    """A function that runs the script of this checkout in an empty folder."""
    shutil.copy(ROOT / "multirun.sh", tmp_path)
    environment = {**os.environ, "PATH": f"{scripts}:{os.environ['PATH']}"}

    def run(*words: str) -> tuple[list[dict[str, str]], str]:
        command = [tmp_path / "multirun.sh", *words, *SHORT]
        done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600)
        assert done.returncode == 0, done.stdout + done.stderr
        tables = [*tmp_path.glob("outputs/lr_search/sweeps/*/*/table.csv")]
        return list(csv.DictReader(tables[0].read_text().splitlines())) if tables else [], done.stdout

    return run


def test_the_script_passes_its_words_on(tmp_path):
    """The test replaces Python by a script that prints its arguments."""
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "python").write_text('#!/bin/sh\necho "$@"\n')
    (tmp_path / "bin" / "python").chmod(0o755)
    done = subprocess.run(
        [shutil.copy(ROOT / "multirun.sh", tmp_path), "repeats", "seed=0,1"],
        env={**os.environ, "PATH": f"{tmp_path / 'bin'}:{os.environ['PATH']}"},
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    assert done.stdout.startswith("-m exp.train -m name=lr_search ")
    assert done.stdout.endswith("sweep.repeat_over=seed seed=0,1\n")


@pytest.mark.slow
def test_the_script_runs_a_search(script):
    rows, shown = script("search", "sweep.trials=3")
    assert len({row["optimizer.lr"] for row in rows}) == len(rows) == 3
    assert "best  " in shown
