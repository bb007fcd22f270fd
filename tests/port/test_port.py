"""A stand-in of lightning-hydra-template's MNIST example runs, and so does each command of its README, translated."""

from __future__ import annotations

import csv
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

from exp.check.__main__ import main as check

ROOT = Path(__file__).parents[2]
PROJECT = Path(__file__).with_name("project")
PAGE = (ROOT / "docs" / "from-lightning-hydra-template.md").read_text("utf-8")
TABLE = PAGE[PAGE.index("## The commands of its README") : PAGE.index("## Your sweeps")]
ROWS = [
    (there, re.search(r"`python -m exp\.(\w+) (.+?)`", here))
    for there, here in re.findall(r"^\| (.+?) \| (.+) \|$", TABLE, re.MULTILINE)[1:]
]
COMMANDS = [(there, found[1], found[2]) for there, found in ROWS if found]
# What this machine may not have, and the one command whose refusal the page tells.
REFUSED = {
    "launch.accelerator=cuda": "launch.accelerator: cuda",
    "launch.accelerator=mps": "launch.accelerator: mps",
    "+logger=wandb": "needs the package wandb",
    "new_param": "expected one of net, optimizer, scheduler, compile",
}
CPU = ("launch.accelerator=cpu", "data.num_workers=1")
EPOCHS = ("trainer.min_epochs=3", "trainer.max_epochs=3")  # of ten
QUIET = ("trainer.enable_progress_bar=false", "callbacks=[early_stopping]", "callbacks.early_stopping.monitor=val/acc")


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory, commands: Any) -> Path:
    """The template's tree, with `conf` for `configs`, and a run of it in outputs/first."""
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


def test_its_example_trains_and_keeps_the_best_by_its_own_metric(project: Path) -> None:
    found = report(project / "outputs" / "first")
    assert (found["status"], found["epochs"], found["steps"], found["tags"]) == (
        "completed",
        3,
        60,
        ["mnist", "simple_dense_net"],
    )
    assert found["metrics"]["test/acc"] > 0.9
    assert found["best"]["value"] == found["metrics"]["val/acc_best"] > 0.95
    # Its own ModelCheckpoint writes where its config says, beside exp's two.
    assert (project / "outputs" / "checkpoints" / "last.ckpt").exists()
    state = torch.load(project / "outputs" / "first" / "checkpoints" / "best.ckpt", weights_only=True)
    assert state["state_dict"]["net.model.0.weight"].shape == (128, 784)
    assert state["hyper_parameters"] == {"compile": False}
    assert state["lr_schedulers"][0]["patience"] == 10


@pytest.mark.parametrize(("there", "module", "line"), COMMANDS, ids=[there.strip("`") for there, _, _ in COMMANDS])
def test_each_command_of_its_readme_passes_the_check(
    there: str, module: str, line: str, inside: Path, capfd: Any, commands: Any
) -> None:
    words = shlex.split(line)
    if module == "evaluate":
        done = commands.run(*words, module="exp.evaluate", cwd=inside)
        assert done.returncode == 0, done.stderr
        assert "acc" in done.stdout
        return
    on = [] if any("launch.accelerator=" in word for word in words) else ["launch.accelerator=cpu"]
    if "-m" in words:  # this process has threads: what a sweep forks its jobs from would be started from nothing
        done = commands.run(*words, *on, module="exp.check.__main__", cwd=inside)
        status, told = done.returncode, done.stderr
    else:
        status, told = check([*words, *on]), capfd.readouterr().err
    reasons = [reason for part, reason in REFUSED.items() if part in line]
    assert status == 0 or any(reason in told for reason in reasons), told
    if "new_param" in line:
        assert status == 2


def test_the_table_holds_every_command_that_the_template_s_readme_has() -> None:
    told = " ".join(there for there, _ in ROWS)
    words = [
        *(
            "trainer=cpu",
            "trainer=gpu",
            "trainer=mps",
            "trainer=ddp ",
            "trainer=ddp_sim",
            "tpu_cores",
            "trainer.num_nodes",
        ),
        *(
            "trainer.precision",
            "logger=wandb",
            "logger=csv",
            "experiment=example",
            "callbacks=default",
            "gradient_clip_val",
        ),
        *("val_check_interval", "accumulate_grad_batches", "max_time", "debug=default", "debug=fdr", "debug=profiler"),
        *(
            "debug=overfit",
            "detect_anomaly",
            "limit_train_batches",
            "ckpt_path",
            "eval.py",
            "data.batch_size=32,64,128",
        ),
        *("hparams_search=mnist_optuna", "experiment=glob(*)", "trainer.deterministic", "tags=[", "new_param"),
    ]
    assert [word for word in words if word not in told] == []


def test_two_simulated_ranks_share_its_batch(project: Path, commands: Any) -> None:
    (line,) = [line for there, _, line in COMMANDS if "ddp_sim" in there]
    few = ("trainer.max_epochs=1", "trainer.min_epochs=1", "hydra.run.dir=outputs/ranks", "data.num_workers=0")
    done = commands.run(*shlex.split(line), *QUIET, *few, cwd=project)
    assert done.returncode == 0, done.stderr
    found = report(project / "outputs" / "ranks")
    assert (found["world_size"], found["strategy"], found["steps"]) == (2, "ddp", 20)
    done = commands.run(
        *shlex.split(line), *QUIET, *few, "data.batch_size=63", "hydra.run.dir=outputs/odd", cwd=project
    )
    assert done.returncode == 1
    assert "Batch size (63) is not divisible by the number of devices (2)" in done.stderr


def test_it_goes_on_from_its_checkpoint_for_longer(project: Path, commands: Any) -> None:
    (line,) = [line for there, _, line in COMMANDS if "ckpt_path" in there and "resume" in line]
    more = ("trainer.min_epochs=1", "trainer.max_epochs=4", "hydra.run.dir=outputs/longer")
    done = commands.run(*shlex.split(line), *CPU, *more, cwd=project)
    assert done.returncode == 0, done.stderr
    assert (report(project / "outputs" / "longer")["epochs"], report(project / "outputs" / "longer")["steps"]) == (
        4,
        80,
    )


def test_its_search_proposes_the_values_of_its_file(project: Path, commands: Any) -> None:
    few = ("sweep.trials=2", "trainer.max_epochs=1", "trainer.min_epochs=1", "hydra.sweep.dir=outputs/search")
    done = commands.run("-m", "experiment=mnist_search", *QUIET, *few, "launch.accelerator=cpu", cwd=project)
    assert done.returncode == 0, done.stderr
    with (project / "outputs" / "search" / "table.csv").open(newline="") as file:
        jobs = list(csv.DictReader(file))
    assert len(jobs) == 2
    assert all(1e-4 <= float(job["module.optimizer.lr"]) <= 0.1 for job in jobs)
    for number in range(2):
        typed = (project / "outputs" / "search" / str(number) / "overrides.yaml").read_text()
        assert re.search(r"module\.net\.lin1_size=(64|128|256)\b", typed)
    assert all(float(job["best val/acc"]) > 0.2 for job in jobs)
