"""A run continues if an output cannot be written, and reports each such output once."""

from __future__ import annotations

import errno
import importlib
import io
import json
import os
import signal
import subprocess
import sys
from contextlib import redirect_stdout
from pathlib import Path
from typing import Any

import pytest

import exp
from exp.cli.commands import COMMANDS
from exp.engine.checkpoint import read_checkpoint
from exp.errors import Interrupted
from exp.output import SafeStream, describe_write_error, survive_output_errors
from exp.run_report import Report, as_markdown, draw_pictures, read_report

SMALL = ("debug=one_batch", "test=false")
FULL = Path("/dev/full")
NO_SPACE = "No space left on device"


# --- standard output ---


def test_a_full_stream_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    with FULL.open("w", encoding="utf-8") as full:
        stream = SafeStream(full, "standard output")
        print("a", file=stream, flush=True)
        assert stream.lost is not None
        assert stream.lost.errno == errno.ENOSPC
        print("b", file=stream, flush=True)
        os.write(full.fileno(), b"the descriptor now leads to /dev/null")
    assert caplog.messages == [f"standard output: {NO_SPACE}. The run continues without this output"]


def test_an_unencodable_letter_is_escaped() -> None:
    raw = io.BytesIO()
    stream = SafeStream(io.TextIOWrapper(raw, encoding="ascii"), "standard output")
    print("précis", file=stream, flush=True)
    assert raw.getvalue() == b"pr\\xe9cis\n"


def test_a_closed_standard_output_takes_what_is_printed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with survive_output_errors():
        print("nobody reads this", flush=True)
        sys.stdout.flush()
    assert sys.stdout is None


def test_only_a_full_place_is_told_to_make_room() -> None:
    for code in (errno.ENOSPC, errno.EDQUOT, errno.EFBIG):
        assert describe_write_error("a", OSError(code, os.strerror(code))).endswith(". Free disk space there")
    for code in (errno.EIO, errno.EROFS, errno.ESTALE):
        assert describe_write_error("a", OSError(code, os.strerror(code))) == f"a: {os.strerror(code)}. Fix this error"


def assert_reports_a_full_output(capsys: pytest.CaptureFixture[str], name: str, *words: str) -> None:
    module = importlib.import_module(f"exp.{COMMANDS[name].module}")
    with FULL.open("w", encoding="utf-8") as full, redirect_stdout(full):
        assert module.main(list(words)) == 1, name
    assert f"standard output: {NO_SPACE}" in capsys.readouterr().err, name


def test_the_help_of_every_command_reports_a_full_output(capsys: pytest.CaptureFixture[str]) -> None:
    for name in sorted(COMMANDS):
        # exp.worker is no command of users.
        if name != "worker":
            assert_reports_a_full_output(capsys, name, "--help")


LINES = ("gallery", "why model", "diff a b", "doctor --quick", "audit a", "check debug=one_batch", "schema")


@pytest.mark.parametrize("line", [line for line in LINES if line.split()[0] in COMMANDS])
def test_a_command_that_prints_reports_a_full_output(write: Any, capsys: pytest.CaptureFixture[str], line: str) -> None:
    for name in ("a", "b"):
        write(f"{name}/config.yaml", "seed: 0\n")
    assert_reports_a_full_output(capsys, *line.split())


@pytest.mark.parametrize("command", ["exp.gallery", pytest.param("exp.check", marks=pytest.mark.slow)])
def test_a_full_output_leaves_one_line_at_exit(command: str) -> None:
    with FULL.open("w", encoding="utf-8") as full:
        done = subprocess.run(
            [sys.executable, "-m", command], stdout=full, stderr=subprocess.PIPE, text=True, check=False
        )
    assert done.returncode == 1
    assert done.stderr.splitlines() == [f"standard output: {NO_SPACE}. Free space, or redirect it"]


SHORT = ("trainer.max_epochs=2", "trainer.limit_train_batches=3")


def assert_completed(place: Path, *, status: int, error: str, lost: str | None) -> None:
    assert status == 0, error
    assert "Traceback" not in error
    (directory,) = place.glob("outputs/train/*/*")
    report = read_report(directory)
    assert report.status == "completed"
    assert (directory / "checkpoints" / "last.ckpt").is_file()
    if lost is not None:
        assert {"what": "standard output", "error": lost} in report.not_written
        assert (directory / "train.log").read_text().count("standard output: ") == 1


@pytest.mark.parametrize("full", [("output",), ("output", "error")], ids=" and ".join)
def test_a_run_completes_with_full_streams(place: Path, commands: Any, full: tuple[str, ...]) -> None:
    done = commands.start(*SHORT, cwd=place, **dict.fromkeys(full, FULL)).end()
    assert_completed(place, status=done.returncode, error=done.stderr, lost=NO_SPACE)


@pytest.mark.slow  # only a shell can close a stream before Python starts
@pytest.mark.parametrize("redirection", ["| head -1 > first", ">&-"])
def test_a_run_completes_without_its_reader(place: Path, redirection: str) -> None:
    line = f"{sys.executable} -m exp.train {' '.join(SHORT)} {redirection}"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], stderr=subprocess.PIPE, text=True, check=False)
    assert_completed(place, status=done.returncode, error=done.stderr, lost=None)


# --- loggers, files, pictures, lines ---

STORES = '''
import errno, os
from lightning.pytorch.loggers.logger import Logger

class StoreError(Exception):
    pass

GONE = ConnectionError(errno.ESTALE, os.strerror(errno.ESTALE))

class Store(Logger):
    """Raises an error at one moment: made, opened or logged."""

    name, version, calls = "store", "", 0

    def __init__(self, *, fails: str = "logged", days: int = 1) -> None:
        super().__init__()
        self.fails = fails
        if days < 1:
            raise ValueError(f"days is {days}; expected 1 or more")
        self.fail_when("made")

    def fail_when(self, moment):
        if self.fails == moment:
            Store.calls += 1
            raise StoreError("gone") if moment == "opened" else GONE

    @property
    def experiment(self):
        self.fail_when("opened")

    def log_metrics(self, metrics, step=None):
        self.fail_when("logged")

    def log_hyperparams(self, *arguments, **named):
        pass
'''
STORE = ["+logger.store={_target_: stores.Store}", "security.allow=[stores]"]
# Callback that replaces a directory by a file and files by directories, fills the device and closes the screen.
SPOILS = """
import os, sys
from pathlib import Path
from lightning.pytorch import Callback

class Spoils(Callback):
    def on_train_batch_end(self, trainer, *_):
        trainer.logger.experiment.add_text("mine", "note", trainer.global_step)

    def on_train_start(self, trainer, module):
        run = Path(trainer.default_root_dir)
        (run / "table.csv").mkdir()
        (run / "metrics.csv").mkdir()
        sys.stdout.close()
        for descriptor in os.listdir("/proc/self/fd"):
            if "events.out" in os.path.realpath(f"/proc/self/fd/{descriptor}"):
                os.dup2(os.open("/dev/full", os.O_WRONLY), int(descriptor))
"""
DRAWS = """
import torch
from exp.hooks.hook import Hook
from exp.hooks.panels import Panel

class Undrawable(Panel):
    def draw(self):
        raise ValueError("no font")

class Draws(Hook):
    def after_step(self, step):
        return {"mine/one": Undrawable(), "mine/two": Undrawable()}
"""


def fit(*overrides: str) -> tuple[exp.Report, dict[str, str], str]:
    """Run to completion, and return the report, the errors by output, and the log."""
    report = exp.fit(exp.compose([*SMALL, *overrides]))
    assert report.status == "completed"
    directory = Path(report.directory)
    assert json.loads((directory / "report.json").read_text())["not_written"] == list(report.not_written)
    errors = {entry["what"]: entry["error"] for entry in report.not_written}
    assert len(errors) == len(report.not_written)
    log = (directory / "train.log").read_text()
    assert log.count("The run continues without this output") == len(errors)
    return report, errors, log


def test_each_unwritable_output_is_reported_once(write: Any) -> None:
    write("stores.py", STORES)
    write("spoils.py", SPOILS)
    words = [
        "trainer.log_every_n_steps=1",
        "trainer.max_epochs=3",
        "hooks=[gradients]",
    ]
    with redirect_stdout(io.StringIO()):
        report, errors, _ = fit(
            *words,
            "+logger=csv",
            *STORE,
            "security.allow=[stores,spoils]",
            "+callbacks.spoils={_target_: spoils.Spoils}",
        )
    assert errors.keys() == {"logger.tensorboard", "logger.csv", "logger.store", "table.csv", "the progress display"}
    assert errors["logger.tensorboard"] == NO_SPACE
    assert errors["logger.csv"].startswith("Is a directory")
    assert errors["logger.store"] == os.strerror(errno.ESTALE)
    assert sys.modules["stores"].Store.calls == 1
    assert all(f"- {what}: {error}" in as_markdown(report) for what, error in errors.items())
    assert report.metrics["loss/train"] > 0


@pytest.mark.parametrize(("fails", "error"), [("made", os.strerror(errno.ESTALE)), ("opened", "gone")])
def test_an_unreachable_store_is_left_out(write: Any, fails: str, error: str) -> None:
    write("stores.py", STORES)
    report, errors, _ = fit(*STORE, f"+logger.store.fails={fails}")
    assert errors == {"logger.store": error}
    assert list(Path(report.directory).glob("tensorboard/events*"))


@pytest.mark.parametrize(("setting", "message"), [("days=0", "days: 0; expected 1 or more"), ("dayz=1", "store.dayz")])
def test_a_wrong_parameter_of_a_store_is_an_error(write: Any, setting: str, message: str) -> None:
    write("stores.py", STORES)
    with pytest.raises(exp.ConfigError, match=message):
        exp.fit(exp.compose([*SMALL, *STORE, f"+logger.store.{setting}"]))


def test_a_picture_that_fails_is_reported_once_per_tag(write: Any) -> None:
    write("draws.py", DRAWS)
    hook = ["+hooks.mine={_target_: draws.Draws, every_n_steps: 1}", "security.allow=[draws]"]
    _, errors, log = fit(*hook, "trainer.max_epochs=2", "trainer.log_every_n_steps=1")
    assert set(errors) == {"the picture mine/one", "the picture mine/two"}
    assert "ValueError: no font" in log
    assert "in draw" in log  # the traceback


# --- errors that end a run ---


def test_a_full_checkpoint_ends_the_run_with_its_path(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    fsync, calls = os.fsync, []

    def full_at_the_second(descriptor: int) -> None:
        if "/.last.ckpt." in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        fsync(descriptor)

    monkeypatch.setattr(os, "fsync", full_at_the_second)
    with pytest.raises(exp.RunError, match=r"checkpoints/last\.ckpt: Disk quota exceeded"):
        exp.fit(exp.compose(["trainer.max_epochs=2", "trainer.limit_train_batches=4", "checkpoint.every_n_steps=1"]))
    (directory,) = place.glob("outputs/train/*/*")
    assert read_checkpoint(directory / "checkpoints" / "last.ckpt")["global_step"] == 1
    assert read_report(directory).status == "failed"
    assert not list((directory / "checkpoints").glob(".*"))


def test_a_signal_during_the_pictures_finds_a_completed_run(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    class Interrupting(dict[str, float]):
        def __iter__(self) -> Any:
            raise Interrupted(signum=signal.SIGTERM, checkpoint=None)

    assert not draw_pictures(Report(status="completed", directory=str(place), metrics=Interrupting()))
    assert "pictures/: interrupted by signal 15" in caplog.text
