"""runtime.step_timeout: a run that hangs ends as failed, and reports the stack of each rank."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

HANGS = """
import ctypes
import time
from exp.hooks.hook import Hook


class Hangs(Hook):
    def __init__(self, *, at=3, rank=0, holds_lock=False):
        super().__init__()
        self.at, self.rank, self.holds_lock = at, rank, holds_lock

    def after_step(self, step):
        if step.index == self.at and step.rank == self.rank:
            self.stuck()

    def stuck(self):
        while self.holds_lock:
            ctypes.PyDLL(None).sleep(300)
        while True:
            try:
                time.sleep(300)
            except Exception:
                pass
"""
SHORT = ["trainer.max_steps=5", "test=false", "security.allow=[hangs]", "hooks=[]"]


@pytest.fixture(autouse=True)
def hangs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "hangs.py").write_text(HANGS)
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)


@pytest.mark.parametrize(
    ("ranks", "holds_lock"),
    [
        pytest.param(1, False, id="one process"),
        pytest.param(2, True, id="two ranks, of which one holds the interpreter lock", marks=pytest.mark.slow),
    ],
)
def test_a_hanging_step_ends_the_run(commands, tmp_path: Path, ranks: int, holds_lock: bool) -> None:
    where = ["strategy=ddp", f"launch.devices={ranks}", "launch.accelerator=cpu"] if ranks > 1 else []
    hook = f"+hooks.hangs={{_target_: hangs.Hangs, holds_lock: {holds_lock}, rank: {ranks - 1}}}"
    done = commands.run(*SHORT, "runtime.step_timeout=2", hook, *where)
    assert done.returncode == 1
    (path,) = tmp_path.rglob("report.json")
    report, log = json.loads(path.read_text()), path.with_name("train.log").read_text()
    assert report["status"] == "failed"
    for told in (done.stderr, report["error"]["message"], log):
        assert "failed: a step took longer" in told
        assert f"rank {ranks - 1}:" in told
        assert f'hangs.py", line {18 if holds_lock else 21} in stuck' in told


def test_a_run_that_takes_steps_is_not_ended(commands) -> None:
    assert commands.run(*SHORT, "runtime.step_timeout=60").returncode == 0
