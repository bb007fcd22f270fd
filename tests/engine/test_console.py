"""Output of a run: a progress bar on a terminal, lines in files and pipes, and details in train.log."""

from __future__ import annotations

import io
import itertools
import logging
import re
import sys
import time
import warnings
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from lightning.pytorch import Callback

from exp.engine.console import Bar, Lines, Progress, progress, run_log
from exp.strategies.rank import ALONE, Rank

SECOND = Rank(global_rank=1, local_rank=1, world_size=2, local_world_size=2)


class Clock:
    """Replacement of time.monotonic, with a fixed number of seconds per epoch."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, small_run: ModuleType, *, epoch: float) -> None:
        self.now = 1000.0
        monkeypatch.setattr(time, "monotonic", lambda: self.now)
        self.callback = Callback()
        self.callback.on_train_epoch_start = lambda *_: setattr(self, "now", self.now + epoch)


def test_a_run_without_a_terminal_prints_lines(
    tmp_path: Path, small_run: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, small_run, epoch=10.0)
    with run_log(tmp_path, rank=ALONE) as path:
        small_run.Small(tmp_path, callbacks=(clock.callback, *progress(True, rank=ALONE))).fit()
    out, err = capsys.readouterr()
    lines = out.splitlines()
    assert len(lines) == 4
    assert re.fullmatch(
        r"epoch 4/4  step 28  loss/val 0\.\d+  accuracy/val [01]\.?\d*  loss/train 0\.\d+.*", _sorted(lines[-1])
    )
    assert "\x1b" not in out
    assert err == ""
    log = path.read_text()
    assert all(line in log for line in lines)
    # The screen and the log have no messages of Lightning.
    assert "GPU available" not in log
    assert "lightning" not in log


def _sorted(line: str) -> str:
    """Return the line with its values in a fixed order."""
    parts = line.split("  ")
    order = ("loss/val", "accuracy/val", "loss/train")
    values = sorted((part for part in parts if part.startswith(order)), key=lambda part: order.index(part.split()[0]))
    return "  ".join([*parts[:2], *values])


def test_many_short_epochs_give_few_lines(
    tmp_path: Path, small_run: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, small_run, epoch=0.5)
    small_run.Small(tmp_path, callbacks=(clock.callback, *progress(True, rank=ALONE)), max_epochs=20).fit()
    lines = capsys.readouterr().out.splitlines()
    assert len(lines) == 3
    assert lines[-1].startswith("epoch 20/20  step 140")


def test_the_speed_is_of_the_steps_alone(
    tmp_path: Path, small_run: ModuleType, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    clock = Clock(monkeypatch, small_run, epoch=0.0)
    clock.callback.on_train_batch_start = lambda *_: setattr(clock, "now", clock.now + 0.5)
    clock.callback.on_validation_batch_start = lambda *_: setattr(clock, "now", clock.now + 10)
    for steps, speed in ((1, "2 steps/s"), (7, "0.286 steps/s")):
        callbacks = (clock.callback, *progress(True, rank=ALONE))
        small_run.Small(tmp_path, callbacks=callbacks, accumulate_grad_batches=steps).fit()
        lines = capsys.readouterr().out.splitlines()
        assert {line.rpartition("  ")[2] for line in lines[1:]} == {speed}


def test_the_screen_stays_empty_without_a_bar(
    tmp_path: Path, small_run: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    assert progress(True, rank=SECOND) == []
    with run_log(tmp_path, rank=ALONE) as path:
        small_run.Small(tmp_path, callbacks=tuple(progress(False, rank=ALONE)), max_epochs=1).fit()
    assert capsys.readouterr() == ("", "")
    assert "epoch 1/1  step 7" in path.read_text()


def test_a_run_goes_on_without_a_log_that_cannot_be_opened(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").mkdir()
    not_written: list[dict[str, str]] = []
    with run_log(tmp_path, rank=ALONE, not_written=not_written):
        logging.getLogger("exp").info("nobody reads this")
    assert not_written == [{"what": "train.log", "error": f"Is a directory: {tmp_path / 'train.log'}"}]
    assert "The run continues without this output" in capsys.readouterr().err


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def test_a_bar_restores_the_terminal_after_a_failure(
    tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch
) -> None:
    terminal = Terminal()
    monkeypatch.setattr(sys, "stdout", terminal)
    monkeypatch.setenv("TERM", "xterm")
    monkeypatch.setenv("COLUMNS", "80")
    callbacks = progress(True, rank=ALONE)
    assert isinstance(callbacks[0].display, Bar)  # type: ignore[attr-defined]
    small_run.Small(tmp_path, callbacks=tuple(callbacks), max_epochs=2).fit()
    text = terminal.getvalue()
    assert all(part in text for part in ("epoch 2/2", "━━━━━━━━", "7/7", "loss/val"))
    assert "…" not in text
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 10.0).__next__)  # the bar is drawn at each step
    failing = small_run.At("on_train_batch_end", 3)
    with pytest.raises(small_run.Killed):
        small_run.Small(tmp_path, callbacks=(*progress(True, rank=ALONE), failing)).fit()
    assert terminal.getvalue().count("\x1b[?25h") == terminal.getvalue().count("\x1b[?25l") == 2


def test_warnings_reach_the_screen_and_all_the_file(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(tmp_path, rank=ALONE) as path, warnings.catch_warnings():
        warnings.simplefilter("always")
        logging.getLogger("exp.engine.x").warning("take care")
        logging.getLogger("exp.engine.x").info("for the file")
        logging.getLogger("lightning.pytorch").warning("chatter")
        warnings.warn("of a library", stacklevel=1)
    assert capsys.readouterr().err == "take care\n"
    text = path.read_text()
    assert all(part in text for part in ("take care", "for the file", "chatter", "of a library"))


def test_other_ranks_have_files_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    with run_log(tmp_path, rank=SECOND) as path:
        logging.getLogger("exp.engine.x").warning("take care")
    assert path == tmp_path / "train.rank1.log"
    assert "take care" in path.read_text()
    assert capsys.readouterr().err == ""


def test_everything_is_put_back(tmp_path: Path) -> None:
    def state() -> list[Any]:
        names = (None, "exp", "lightning.pytorch", "lightning.fabric", "lightning")
        loggers = [logging.getLogger(name) for name in names]
        return [(logger.handlers[:], logger.propagate, logger.level) for logger in loggers] + [warnings.showwarning]

    before = state()
    with pytest.raises(KeyError), run_log(tmp_path, rank=ALONE):
        raise KeyError
    assert state() == before


def test_a_view_of_a_test_stage(tmp_path: Path, small_run: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "monotonic", itertools.count(0.0, 10.0).__next__)
    views: list[Any] = []

    class Keep(Lines):
        def update(self, view: Any) -> None:
            views.append((view.title, view.done, view.total))

    small = small_run.Small(tmp_path, callbacks=(Progress(Keep()),))
    small.trainer.test(small.module, datamodule=small.data, verbose=False)
    assert views == [("test", 1, 1)]


def test_a_log_on_a_full_disk_ends_with_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "train.log").symlink_to("/dev/full")
    with run_log(tmp_path, rank=ALONE):
        for number in range(3):
            logging.getLogger("exp").info("line %d", number)
    assert capsys.readouterr().err == "train.log: No space left on device. The run continues without this output\n"
