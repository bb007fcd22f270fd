"""Files, commands and printed results of docs/tutorial.md and of the first examples of README.md."""

from __future__ import annotations

import csv
import json
import re
import runpy
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from exp.cli.commands import COMMANDS

ROOT = Path(__file__).parents[2]
README = (ROOT / "README.md").read_text("utf-8")
TUTORIAL = (ROOT / "docs" / "tutorial.md").read_text("utf-8")
FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
QUIET = ("trainer.enable_progress_bar=false", "launch.accelerator=cpu")


def write_files(page: str, place: Path) -> None:
    for path, text in FILE.findall(page):
        (place / path).parent.mkdir(parents=True, exist_ok=True)
        (place / path).write_text(text)


def lines(page: str, command: str) -> list[str]:
    return re.findall(rf"^    python -m {command} (.+)$", page, re.MULTILINE)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    place = tmp_path_factory.mktemp("tutorial")
    write_files(TUTORIAL, place)
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        runpy.run_path("flowers.py")
        yield place


def report(folder: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((folder / "report.json").read_text())
    return found


def test_the_data_and_the_config_are_checked(folder: Path, commands: Any) -> None:
    if "data" not in COMMANDS:
        pytest.skip("the folder of exp.data was removed")
    (data,) = lines(TUTORIAL, "exp.data")
    done = commands.run(*shlex.split(data), module="exp.data", cwd=folder)
    (leak,) = re.findall(r"^    (- leak: .+)$", TUTORIAL, re.MULTILINE)
    assert leak in done.stdout, done.stderr
    right, wrong = (
        commands.run(*shlex.split(line), "launch.accelerator=cpu", module="exp.check", cwd=folder)
        for line in lines(TUTORIAL, "exp.check")
    )
    assert re.search(r"^    (ok: .+)$", TUTORIAL, re.MULTILINE)[1] in right.stdout
    assert re.search(r"^    (data\.dataset\.target: .+)$", TUTORIAL, re.MULTILINE)[1] in wrong.stderr
    assert (right.returncode, wrong.returncode) == (0, 2)


def test_a_run_is_resumed_and_predicts(folder: Path, commands: Any) -> None:
    first, search, longer = lines(TUTORIAL, "exp.train")
    assert search.startswith("-m ")
    done = commands.run(*shlex.split(first), *QUIET, cwd=folder)
    assert done.returncode == 0, done.stderr
    found = report(folder / "outputs" / "first")
    rows = re.findall(r"^    │ (best|last), step \d+ │ accuracy │ +│ (\S+) │ (\S*) +│$", TUTORIAL, re.MULTILINE)
    assert [name for name, _, _ in rows] == ["best", "last"]
    told = [float(value) for value in (rows[0][1], rows[0][2], rows[1][1])]
    best, last = found["best_metrics"], found["metrics"]
    # One validation sample changes the accuracy by 0.043.
    assert [best["accuracy/val"], best["accuracy/test"], last["accuracy/val"]] == pytest.approx(told, abs=0.02)
    done = commands.run(*shlex.split(longer), *QUIET, "hydra.run.dir=outputs/longer", cwd=folder)
    assert done.returncode == 0, done.stderr
    found = report(folder / "outputs" / "longer")
    assert (found["epochs"], found["status"]) == (40, "completed")
    (line,) = lines(TUTORIAL, "exp.predict")
    done = commands.run(*shlex.split(line), module="exp.predict", cwd=folder)
    assert done.returncode == 0, done.stderr
    with (folder / "answers.csv").open(newline="") as file:
        answers = [(row["class"], float(row["probability"])) for row in csv.DictReader(file)]
    expected = re.search(r"`(\w+)`, (0\.\d+), and `(\w+)`, (0\.\d+)", TUTORIAL).groups()
    assert [name for name, _ in answers] == [expected[0], expected[2]]
    assert [value for _, value in answers] == pytest.approx([float(expected[1]), float(expected[3])], abs=0.02)


@pytest.mark.slow
def test_the_sweep_writes_the_table(folder: Path, commands: Any) -> None:
    line = lines(TUTORIAL, "exp.train")[1]
    done = commands.run(*shlex.split(line), *QUIET, "hydra.sweep.dir=outputs/sweep", cwd=folder)
    assert done.returncode == 0, done.stderr
    with (folder / "outputs" / "sweep" / "table.csv").open(newline="") as file:
        jobs = list(csv.DictReader(file))
    told = [
        [cell.strip() for cell in row]
        for row in re.findall(r"^\| (\d) \|(.+?)\|(.+?)\|(.+?)\|(.+?)\|$", TUTORIAL, re.M)
    ]
    assert [[job["job"], job["optimizer.lr"], job["model"]] for job in jobs] == [row[:3] for row in told]
    found = [float(value) for job in jobs for value in (job["best loss/val"], job["accuracy/val"])]
    assert found == pytest.approx([float(cell) for row in told for cell in row[3:]], abs=0.02)


def test_the_first_example_of_readme(tmp_path: Path, commands: Any) -> None:
    write_files(README, tmp_path)
    command = lines(README, "exp.train")[0]
    done = commands.run(*shlex.split(command), *QUIET, "hydra.run.dir=outputs/first", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    accuracy = float(re.search(r"│ accuracy │ +│ \S+ │ (\S+) │$", README, re.MULTILINE)[1])
    metrics = report(tmp_path / "outputs" / "first")["best_metrics"]
    assert metrics["accuracy/test"] == pytest.approx(accuracy, abs=0.02)
    for line in re.findall(r"^    (best|results|dashboard)  ", README, re.MULTILINE):
        assert re.search(rf"^{line}  ", done.stdout, re.MULTILINE)


def test_readme_opens_with_a_model_and_its_result() -> None:
    assert len(README.splitlines()) <= 110
    first = README.split("\n\n")
    assert "```yaml" in "\n".join(README.splitlines()[:6])
    screen = README.splitlines()[:25]
    assert any(line.startswith("    python -m exp.train") for line in screen)
    assert any("accuracy" in line for line in screen)
    assert first[0] == "# exp"
