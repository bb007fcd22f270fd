"""runtime.step_timeout: a run that hangs ends as failed, and says where it stood."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest

import exp

HANGS = """
import time
import torch.distributed as dist
from exp.hooks.hook import Hook


class Hangs(Hook):
    def __init__(self, *, at=3, rank=0, swallows=False):
        super().__init__()
        self.at, self.rank, self.swallows = at, rank, swallows

    def after_step(self, step):
        if step.index == self.at and step.rank == self.rank:
            self.stuck()

    def stuck(self):
        while True:
            try:
                time.sleep(300)
            except Exception:
                if not self.swallows:
                    raise
"""
SHORT = ["trainer.max_steps=5", "test=false", "security.allow=[hangs]", "hooks=[]", "runtime.step_timeout=2"]


def hook(**settings: object) -> str:
    given = "".join(f", {name}: {value}" for name, value in settings.items())
    return f"+hooks.hangs={{_target_: hangs.Hangs{given}}}"


@pytest.fixture(autouse=True)
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


def ended(tmp_path: Path) -> tuple[dict, str]:
    """The report, and train.log."""
    (path,) = tmp_path.rglob("report.json")
    return json.loads(path.read_text()), path.with_name("train.log").read_text()


def test_a_step_that_hangs_ends_the_run_with_its_place(tmp_path: Path) -> None:
    start = time.monotonic()
    with pytest.raises(exp.RunError, match=r"step 3 takes longer than 2 s .*it stands in stuck, .*hangs\.py, line 19"):
        exp.fit(exp.compose([*SHORT, hook()]))
    assert time.monotonic() - start < 60
    report, log = ended(tmp_path)
    assert (report["status"], report["steps"]) == ("failed", 3)
    assert "it stands in stuck" in report["error"]["message"]
    assert 'hangs.py", line 19 in stuck' in log


def test_what_no_exception_reaches_is_ended_with_its_process(commands, tmp_path: Path) -> None:
    done = commands.run(*SHORT, hook(swallows=True))
    assert done.returncode == 1
    assert "it stands in stuck" in done.stderr
    report, log = ended(tmp_path)
    assert report["status"] == "failed"
    assert "in stuck" in log


def test_of_several_ranks_each_says_where_it_stands_and_the_one_that_hangs_is_named(commands, tmp_path: Path) -> None:
    done = commands.run(*SHORT, hook(rank=1), "strategy=ddp", "launch.devices=2", "launch.accelerator=cpu")
    assert done.returncode == 1
    assert "rank 1 failed: step 3 takes longer than 2 s" in done.stdout + done.stderr
    report, log = ended(tmp_path)
    assert report["status"] == "failed"
    assert "it stands in stuck" in report["error"]["message"]
    assert "rank 0: step" in log
    assert "rank 1: step 3 takes longer" in log
    assert log.count("most recent call first") >= 2


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    report = exp.fit(exp.compose(["trainer.max_steps=5", "hooks=[]", "runtime.step_timeout=60"]))
    assert report.status == "completed"
