"""Tests of the page for users of lightning-hydra-template: a copy of its example, and the commands of its README."""

from __future__ import annotations

import json
import re
import shlex
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from exp.cli.check import main as check

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).with_name("project")
PAGE = (ROOT / "docs" / "from-lightning-hydra-template.md").read_text("utf-8")
TABLE = PAGE[PAGE.index("## Commands of the template's README") : PAGE.index("## Sweeps")]
ROWS = [
    (there, re.search(r"`python -m exp\.(\w+) (.+?)`", here))
    for there, here in re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)[1:]
]
COMMANDS = [(there, found[1], found[2]) for there, found in ROWS if found]
# Errors about devices and packages that may be missing, and about a command that the page describes as refused.
REFUSED = {
    "launch.accelerator=cuda": "launch.accelerator: 'cuda'",
    "launch.accelerator=mps": "launch.accelerator: 'mps'",
    "+logger=wandb": "needs the package wandb",
    "new_param": "expected one of net, optimizer, scheduler, compile",
}
CPU = ("launch.accelerator=cpu", "data.num_workers=1")
EPOCHS = ("trainer.min_epochs=3", "trainer.max_epochs=3")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> Path:
    """A copy of the template's folders, with a run in outputs/first."""
    place = tmp_path_factory.mktemp("template") / "project"
    shutil.copytree(PROJECT, place, ignore=shutil.ignore_patterns("__pycache__"))
    done = commands.run("experiment=example", *CPU, *EPOCHS, "hydra.run.dir=outputs/first", cwd=place)
    assert done.returncode == 0, done.stderr
    assert "is already saved during checkpointing" not in done.stderr
    return place


@pytest.fixture
def inside(project: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    monkeypatch.chdir(project)
    monkeypatch.syspath_prepend(str(project))
    yield project
    for name in [name for name in sys.modules if name.partition(".")[0] == "src"]:
        del sys.modules[name]


def report(place: Path) -> dict[str, Any]:
    found: dict[str, Any] = json.loads((place / "report.json").read_text())
    return found


def test_the_example_keeps_its_best_checkpoint(project: Path) -> None:
    found = report(project / "outputs" / "first")
    assert (found["status"], found["epochs"], found["steps"]) == ("completed", 3, 60)
    assert found["tags"] == ["mnist", "simple_dense_net"]
    assert found["metrics"]["test/acc"] > 0.9
    assert found["best"]["value"] == found["metrics"]["val/acc_best"] > 0.95
    # The template's ModelCheckpoint writes to the directory in its config.
    assert (project / "outputs" / "checkpoints" / "last.ckpt").exists()
    state = torch.load(project / "outputs" / "first" / "checkpoints" / "best.ckpt", weights_only=True)
    assert state["state_dict"]["net.model.0.weight"].shape == (128, 784)
    assert state["hyper_parameters"] == {"compile": False}
    assert state["lr_schedulers"][0]["patience"] == 10


# The command of a search is slow, because it checks several jobs.
@pytest.mark.parametrize(
    ("there", "module", "line"),
    [
        pytest.param(
            *command, id=command[0].strip("`"), marks=[pytest.mark.slow] if "hparams_search" in command[0] else []
        )
        for command in COMMANDS
    ],
)
def test_each_command_of_the_readme_passes_the_check(
    there: str, module: str, line: str, inside: Path, capfd: Any, commands: Any
) -> None:
    words = shlex.split(line)
    if module == "evaluate":
        done = commands.run(*words, module="exp.evaluate", cwd=inside)
        assert done.returncode == 0, done.stderr
        assert "acc" in done.stdout
        return
    on = [] if any("launch.accelerator=" in word for word in words) else ["launch.accelerator=cpu"]
    if "-m" in words:  # a sweep forks its jobs, which this process cannot because it has threads
        done = commands.run(*words, *on, module="exp.check", cwd=inside)
        status, told = done.returncode, done.stderr
    else:
        status, told = check([*words, *on]), capfd.readouterr().err
    reasons = [reason for part, reason in REFUSED.items() if part in line]
    assert status == 0 or any(reason in told for reason in reasons), told
    if "new_param" in line:
        assert status == 2


def test_the_example_resumes_for_more_epochs(project: Path, commands: Any) -> None:
    (line,) = [line for there, _, line in COMMANDS if "ckpt_path" in there and "resume" in line]
    more = ("trainer.min_epochs=1", "trainer.max_epochs=4", "hydra.run.dir=outputs/longer")
    done = commands.run(*shlex.split(line), *CPU, *more, cwd=project)
    assert done.returncode == 0, done.stderr
    found = report(project / "outputs" / "longer")
    assert (found["epochs"], found["steps"]) == (4, 80)
