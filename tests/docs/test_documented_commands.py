"""Every command of README.md and docs/ passes the check, or is refused for the one reason that its page gives."""

from __future__ import annotations

import re
import runpy
import shlex
import shutil
import sys
from pathlib import Path

import pytest

from exp.check.__main__ import main as check
from exp.find_lr import main as find_lr
from exp.plan.__main__ import main as plan
from exp.report import parser

ROOT = Path(__file__).parents[2]


def called(*names: str) -> re.Pattern[str]:
    """A command on a line of its own in a page: `exp NAME ...`, or `python -m exp.NAME ...`."""
    program = r"^ {4,}(?:\$ )?(?:exp |python -m exp[. ])"
    return re.compile(rf"{program}(?:{'|'.join(names)})\b(?P<arguments>(?:.*\\\n)*.*)$", re.MULTILINE)


COMMAND = called("train", "check", "data")
RATE, SIZE, PLAN, REPORT = called("find_lr"), called("find_batch"), called("plan"), called("report")
FILE = re.compile(r"^```\w+ (\S+)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
# What is said of a command that this machine cannot run, or that is shown because it is refused; by what it holds.
REFUSED = {
    "module=litnet optimizer.lr=0.1": "set beside module",
    "strategy=deepspeed": "needs the package deepspeed",
    "hydra.launcher.partition=gpu": "on a machine without sbatch and srun",
    "hydra/launcher=ray": "without the package ray",
    "+logger=mlflow": "needs the package mlflow",
    "+logger=wandb": "needs the package wandb",
    "'launch.devices=[1]'": "launch.devices: [1]",
    "/checkpoints/": "resume: ",
    "torchvision.models": "no module torchvision",
    "weights.from=outputs/": "weights.from: ",
    "from_run=outputs/": "from_run: ",
    "optimizer.lr=abc": "; expected ",
    "data.dataset.target=kind": "expected a column of flowers.csv",
    "optimzer=sgd": "; expected ",
    "ckpt_path=last.ckpt": "Write resume=last.ckpt",
    "trainer=ddp": "Write strategy=ddp",
    "model=mine": "model: there is no option 'mine'",
}


def documented(command: re.Pattern[str] = COMMAND) -> list[tuple[str, str]]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    found = [
        (page.name, re.sub(r"\\\n\s*", "", match["arguments"]))
        for page in pages
        for match in command.finditer(page.read_text("utf-8"))
    ]
    lines: dict[str, str] = {}
    for page, line in found:
        lines.setdefault(line.split("  ")[0].strip(), page)
    return [(page, line) for line, page in lines.items()]


def test_the_commands_are_found() -> None:
    assert len(documented()) > 60


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in documented()])
def test_a_documented_command_passes_the_check(page, line, tmp_path, monkeypatch, capfd, commands) -> None:
    # The files that docs/extending.md has its reader write, and those of the README and the first tutorial.
    shutil.copytree(ROOT / ".ci" / "newcomer", tmp_path, dirs_exist_ok=True)
    monkeypatch.chdir(tmp_path)
    if page in ("README.md", "tutorial.md"):
        for path, text in FILE.findall(
            (ROOT / page if page == "README.md" else ROOT / "docs" / page).read_text("utf-8")
        ):
            (tmp_path / path).parent.mkdir(parents=True, exist_ok=True)
            (tmp_path / path).write_text(text)
        if page == "tutorial.md":
            runpy.run_path("flowers.py")
    monkeypatch.syspath_prepend(str(tmp_path))
    for module in ("spirals", "lit"):
        monkeypatch.delitem(sys.modules, module, raising=False)
    # The same on every machine; what it says of devices is of machines with GPUs.
    on = [] if "launch.accelerator=" in line or "launch.devices=[" in line else ["launch.accelerator=cpu"]
    words = [*shlex.split(re.sub(r"--samples \w+", "", line), comments=True), *on]  # that flag is exp.data's alone
    if "-m" in words:  # this process has threads: what a sweep forks its jobs from would be started from nothing
        done = commands.run(*words, module="exp.check.__main__", cwd=tmp_path)
        status, told = done.returncode, done.stderr
    else:
        status, told = check(words), capfd.readouterr().err
    reasons = [reason for part, reason in REFUSED.items() if part in line]
    if status == 0:
        others = (
            "needs the package",
            "without the package",
            "machine without",
            "no module",
            "launch.devices",
        )  # of another machine
        missing = [reason for reason in reasons if not any(one in reason for one in others)]
        assert not missing, f"{page}: the command is not refused any more"
        return
    assert status == 2, told
    assert reasons, f"{page}: {told}"
    faults = [fault for fault in told.splitlines() if re.match(r" {2}\S", fault)]
    assert faults
    others = [fault for fault in faults if not any(reason in fault for reason in reasons)]
    assert not others, f"{page}: {others}"


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in documented(RATE)])
def test_a_documented_finder_finds_a_rate_that_the_run_takes(page, line, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    words = [*shlex.split(line, comments=True), "launch.accelerator=cpu"]
    assert find_lr(words) == 0
    command = capsys.readouterr().out.splitlines()[-1]
    assert command.startswith("python -m exp.train ")
    assert check(shlex.split(command)[3:]) == 0


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in documented(SIZE)])
def test_a_documented_finder_finds_a_size_that_the_run_takes(page, line, tmp_path, commands) -> None:
    words = [*shlex.split(line, comments=True), "launch.accelerator=cpu", "--max=100"]
    words = ["2GiB" if word == "380MiB" else word for word in words]  # of another machine
    done = commands.run(*words, module="exp.find_batch", cwd=tmp_path)
    if "--memory" not in words:
        assert "--memory: no limit, on cpu" in done.stderr
        return
    assert done.returncode == 0, done.stderr
    assert check(shlex.split(done.stdout.splitlines()[-1])[3:]) == 0


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in documented(PLAN)])
def test_a_documented_plan_is_printed(page, line, tmp_path, monkeypatch, capsys) -> None:
    monkeypatch.chdir(tmp_path)
    on = [] if "device=" in line else ["launch.accelerator=cpu"]
    assert plan([*shlex.split(line, comments=True), *on, "savings=false"]) == 0
    assert "at most" in capsys.readouterr().out


@pytest.mark.parametrize(("page", "line"), [pytest.param(*one, id=f"{one[0]}: {one[1]}") for one in documented(REPORT)])
def test_a_documented_report_has_words_that_it_takes(page, line) -> None:
    assert parser().parse_args(shlex.split(line, comments=True)).directories
