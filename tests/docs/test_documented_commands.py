"""Every command of README.md and docs/ passes the check, or is refused for an expected reason.

The fast suite tests the commands of README.md and of the tutorial, and the first command of each other page.
"""

from __future__ import annotations

import collections
import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from exp.cli.check import main as check
from exp.cli.plan import main as plan
from exp.extras.report.report import parser

ROOT = Path(__file__).parents[2]


def called(*names: str) -> re.Pattern[str]:
    """Return the pattern of a line with `exp NAME ...` or `python -m exp.NAME ...`."""
    program = r"^ {4,}(?:\$ )?(?:exp |python -m exp[. ])"
    return re.compile(rf"{program}(?:{'|'.join(names)})\b(?P<arguments>(?:.*\\\n)*.*)$", re.MULTILINE)


FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# Words of commands that are refused on some or all machines, and a part of the error message.
REFUSED = {
    "module=litnet optimizer.lr=0.1": "set with module",
    "strategy=deepspeed": "needs the package deepspeed",
    "hydra.launcher.partition=gpu": "slurm, on a machine without sbatch and srun",
    "hydra/launcher=ray": "without the package ray",
    "+logger=mlflow": "needs the package mlflow",
    "+logger=wandb": "needs the package wandb",
    "'launch.devices=[1]'": "launch.devices: [1]",
    "/checkpoints/": "resume: ",
    "torchvision.models": "no module torchvision",
    "weights.from=outputs/": "weights.from: ",
    "from_run=outputs/": "from_run: ",
    "optimizer.lr=abc": "; expected ",
    "runtime.compile_mode=": "with inductor on cpu",
    "data.dataset.target=kind": "expected a column of flowers.csv",
    "optimzer=sgd": "; expected ",
    "ckpt_path=last.ckpt": "Write resume=last.ckpt",
    "trainer=ddp": "Write strategy=ddp",
    "model=mine": "model: there is no option 'mine'",
}


# Parts of error messages that depend on the machine.
OF_MACHINE = ("needs the package", "without the package", "machine without", "no module", "launch.devices", "on cpu")


def documented(*names: str, fast: int = 1) -> list[object]:
    """Return page and line of each command as parameters; all except the first `fast` of each page are slow."""
    found: dict[str, str] = {}
    for page in [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]:
        for match in called(*names).finditer(page.read_text("utf-8")):
            line = re.sub(r"\\\n\s*", "", match["arguments"]).split("  ")[0].strip()
            found.setdefault(line, page.name)
    counts: collections.Counter[str] = collections.Counter()
    parameters = []
    for line, page in found.items():
        counts[page] += 1
        is_fast = page in ("README.md", "tutorial.md") or counts[page] <= fast
        marks = [] if is_fast else [pytest.mark.slow]
        parameters.append(pytest.param(page, line, id=f"{page}: {line}", marks=marks))
    return parameters


CHECKED = documented("train", "check", "data")


def test_the_commands_are_found() -> None:
    assert len(CHECKED) > 60


@pytest.mark.parametrize(("page", "line"), CHECKED)
def test_a_documented_command_passes_the_check(page, line, tmp_path, monkeypatch, capfd, commands) -> None:
    # The files of docs/extending.md, README.md and the tutorial.
    shutil.copytree(ROOT / ".ci" / "newcomer", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if page in ("README.md", "tutorial.md"):
        place = ROOT if page == "README.md" else ROOT / "docs"
        for path, text in FILE.findall((place / page).read_text("utf-8")):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        if page == "tutorial.md":
            runpy.run_path("flowers.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("spirals", "lit"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    # Commands that select no device are checked for a CPU.
    on = [] if "launch.accelerator=" in line or "launch.devices=[" in line else ["launch.accelerator=cpu"]
    words = [*shlex.split(re.sub(r"--samples \w+", "", line), comments=True), *on]  # --samples is a flag of exp.data
    if "-m" in words:  # a sweep forks, which this process cannot because it has threads
        done = commands.run(*words, module="exp.check", cwd=tmp_path)
        status, printed = done.returncode, done.stderr
    else:
        status, printed = check(words), capfd.readouterr().err
    reasons = [reason for part, reason in REFUSED.items() if part in line]
    if status == 0:
        missing = [reason for reason in reasons if not any(one in reason for one in OF_MACHINE)]
        assert not missing, f"{page}: the command is not refused any more"
        return
    assert status == 2, printed
    assert reasons, f"{page}: {printed}"
    errors = [error for error in printed.splitlines() if re.match(r" {2}\S", error)]
    assert errors
    others = [error for error in errors if not any(reason in error for reason in reasons)]
    assert not others, f"{page}: {others}"


@pytest.mark.slow
def test_documented_finders_print_a_valid_command(tmp_path, commands) -> None:
    for parameter in documented("find_lr"):
        _, line = parameter.values
        words = [*shlex.split(line, comments=True), "launch.accelerator=cpu"]
        done = commands.run(*words, module="exp.find_lr", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        command = done.stdout.splitlines()[-1]
        assert command.startswith("python -m exp.train ")
        assert check(shlex.split(command)[3:]) == 0


@pytest.mark.parametrize(("page", "line"), documented("plan", fast=0))
def test_a_documented_plan_is_printed(page, line, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    on = [] if "device=" in line else ["launch.accelerator=cpu"]
    assert plan([*shlex.split(line, comments=True), *on]) == 0
    assert "at most" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "line"), documented("report"))
def test_a_documented_report_has_valid_arguments(page, line) -> None:
    assert parser().parse_args(shlex.split(line, comments=True)).directories
