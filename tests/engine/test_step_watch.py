"""runtime.step_timeout: a run that hangs ends as failed, and says where it stood."""

from __future__ import annotations

import faulthandler
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


def test_a_step_that_hangs_ends_the_run_with_its_place(commands, tmp_path: Path) -> None:
    done = commands.run(*SHORT, hook())
    assert done.returncode == 1
    assert "step 3 takes longer than 2 s (runtime.step_timeout): it stands in stuck" in done.stderr
    report, log = ended(tmp_path)
    assert (report["status"], report["steps"]) == ("failed", 3)
    assert "it stands in stuck" in report["error"]["message"]
    assert 'hangs.py", line 22 in stuck' in log


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_hang_that_holds_pythons_lock_is_told_by_who_started_the_run(commands, tmp_path: Path, ranks: int) -> None:
    where = ["strategy=ddp", f"launch.devices={ranks}", "launch.accelerator=cpu"] if ranks > 1 else []
    done = commands.run(*SHORT, hook(holds_lock=True, rank=ranks - 1), *where)
    assert done.returncode == 1
    report, log = ended(tmp_path)
    assert report["status"] == "failed"
    for told in (done.stderr, report["error"]["message"], log):
        assert f"rank {ranks - 1} failed: it hangs where no Python runs any more" in told
        assert 'hangs.py", line 19 in stuck' in told


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


def test_a_run_that_goes_on_is_left_alone(tmp_path: Path) -> None:
    clock = Clock(tmp_path, seconds=0.4)
    for _ in range(24):
        time.sleep(0.05)
        clock.watch.on_train_batch_end(clock.trainer)
    clock.end()
    assert (tmp_path / "train.log").read_text() == (tmp_path / "hang").read_text() == ""


def test_what_ends_while_the_watch_is_set_again_is_not_killed_later(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = []
    armed = threading.Event()

    def arm(*_: object, **__: object) -> None:
        if threading.current_thread().name == "step_timeout":
            clock.watch._ended.set()  # as by `end` in the main thread, which has cancelled already
            armed.set()
        calls.append("armed")

    monkeypatch.setattr(faulthandler, "dump_traceback_later", arm)
    monkeypatch.setattr(faulthandler, "cancel_dump_traceback_later", lambda: calls.append("cancelled"))
    clock = Clock(tmp_path, seconds=0.4)
    assert armed.wait(20)
    clock.thread.join(20)
    assert calls[-1] == "cancelled"
    clock.end()
