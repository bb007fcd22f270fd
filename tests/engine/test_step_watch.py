"""runtime.step_timeout: a run that hangs ends as failed, and says where it stood."""

from __future__ import annotations

import json
import threading
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from exp.engine.step_watch import StepWatch

HANGS = """
import ctypes
import time
import torch.distributed as dist
from exp.hooks.hook import Hook


class Hangs(Hook):
    def __init__(self, *, at=3, rank=0, swallows=False, holds_lock=False):
        super().__init__()
        self.at, self.rank, self.swallows, self.holds_lock = at, rank, swallows, holds_lock

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


def test_a_hanging_step_ends_the_run_with_its_place(commands, tmp_path: Path) -> None:
    done = commands.run(*SHORT, hook())
    assert done.returncode == 1
    assert "step 3 takes longer than 2 s (runtime.step_timeout): it stands in stuck" in done.stderr
    report, log = ended(tmp_path)
    assert (report["status"], report["steps"]) == ("failed", 3)
    assert "it stands in stuck" in report["error"]["message"]
    assert 'hangs.py", line 22 in stuck' in log


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hang_that_holds_the_interpreter_is_reported(commands, tmp_path: Path, ranks: int) -> None:
    where = ["strategy=ddp", f"launch.devices={ranks}", "launch.accelerator=cpu"] if ranks > 1 else []
    done = commands.run(*SHORT, hook(holds_lock=True, rank=ranks - 1), *where)
    assert done.returncode == 1
    report, log = ended(tmp_path)
    assert report["status"] == "failed"
    for told in (done.stderr, report["error"]["message"], log):
        assert f"rank {ranks - 1} failed: it hangs where no Python runs any more" in told
        assert 'hangs.py", line 19 in stuck' in told


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hang_that_swallows_exceptions_ends_with_its_process(commands, tmp_path: Path, ranks: int) -> None:
    where = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"] if ranks > 1 else []
    done = commands.run(*SHORT, hook(swallows=ranks == 1, rank=ranks - 1), *where)
    assert done.returncode == 1
    assert "it stands in stuck" in done.stdout + done.stderr
    report, log = ended(tmp_path)
    assert report["status"] == "failed"
    assert "it stands in stuck" in report["error"]["message"] or ranks == 1
    if ranks > 1:
        assert "rank 1 failed: step 3 takes longer than 2 s" in done.stdout + done.stderr
        assert "rank 0: step" in log
        assert "rank 1: step 3 takes longer" in log
        assert log.count("most recent call first") >= 2


class Clock:
    """A watch whose steps this test ends itself."""

    def __init__(self, place: Path, *, seconds: float) -> None:
        self.watch = StepWatch(seconds=seconds, path=place / "train.log", hang_path=place / "hang", rank=0)
        self.trainer = cast("Any", SimpleNamespace(global_step=0))
        self.watch.on_train_start(self.trainer, self.trainer)
        (self.thread,) = [one for one in threading.enumerate() if one.name == "step_timeout"]

    def end(self) -> None:
        self.watch.end()
        self.thread.join(20)
        assert not self.thread.is_alive()


def test_a_run_that_takes_steps_is_not_ended(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    looks, now = threading.Semaphore(0), [0.0]

    def look() -> float:
        if threading.current_thread().name == "step_timeout":
            looks.release()
        return now[0]

    monkeypatch.setattr(time, "monotonic", look)
    clock = Clock(tmp_path, seconds=0.04)
    for _ in range(5):
        now[0] += 0.03  # each step ends in time, and all of them take longer
        clock.watch.on_train_batch_end(clock.trainer)
        assert looks.acquire(timeout=20)
    clock.end()
    assert (tmp_path / "train.log").read_text() == (tmp_path / "hang").read_text() == ""
