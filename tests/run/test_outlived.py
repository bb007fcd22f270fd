"""A run goes on without what it says and draws, and tells once of each place that could not be written."""

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
from lightning.pytorch.loggers.logger import Logger

import exp
from exp import report_pictures
from exp.engine.console import Lines
from exp.errors import Interrupted
from exp.hooks import landscape, operators
from exp.hooks.panels import Histogram
from exp.loggers.step_table import StepTable
from exp.output import Outlived, lost_streams, outliving_output
from exp.run_report import as_markdown, read_report
from exp.tensorboard.event_file import EventFile

SMALL = ("debug=one_batch", "test=false")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def once(word: int = errno.ENOSPC) -> Any:
    """A function that fails as a full disk would."""

    def fail(*_: Any, **__: Any) -> None:
        raise OSError(word, os.strerror(word))

    return fail


# --- standard output ---


def test_a_stream_that_cannot_be_written_falls_silent(caplog: pytest.LogCaptureFixture) -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        stream = Outlived(full, "standard output")
        print("a", file=stream, flush=True)
        assert stream.lost is not None
        assert stream.lost.errno == errno.ENOSPC
        print("b", file=stream, flush=True)
        os.write(full.fileno(), b"what C prints falls away, too")
    assert caplog.messages == ["standard output: No space left on device. The run goes on without it"]


def test_a_letter_that_a_stream_has_not_is_written_otherwise() -> None:
    raw = io.BytesIO()
    stream = Outlived(io.TextIOWrapper(raw, encoding="ascii"), "standard output")
    print("précis", file=stream, flush=True)
    assert raw.getvalue() == b"pr\\xe9cis\n"


def test_streams_that_are_closed_are_as_those_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdout", None)
    with outliving_output():
        print("nobody reads this", flush=True)
        assert [stream.name for stream in lost_streams()] == ["standard output"]
    assert sys.stdout is None


PACKAGE = Path(exp.__file__).parent
COMMANDS = sorted(
    ".".join(path.relative_to(PACKAGE.parent).with_suffix("").parts).removesuffix(".__main__")
    for path in [*PACKAGE.glob("*.py"), *PACKAGE.glob("*/__main__.py")]
    # exp.worker is started by exp alone, and takes no words.
    if path.name != "worker.py" and 'if __name__ == "__main__":' in path.read_text()
)


def into_a_full_place(command: str, *words: str) -> int:
    """Run a command in this process, with its standard output on /dev/full."""
    module = importlib.import_module(command)
    main = getattr(module, "main", None) or importlib.import_module(f"{command}.__main__").main
    with open("/dev/full", "w", encoding="utf-8") as full, redirect_stdout(full):
        return main(list(words))


@pytest.mark.parametrize("command", COMMANDS)
def test_the_help_of_every_command_tells_of_a_full_place(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert into_a_full_place(command, "--help") == 1
    assert "standard output: No space left on device" in capsys.readouterr().err


def test_what_prints_alone_tells_of_a_full_place(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for name in ("a", "b"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.yaml").write_text("seed: 0\n")
    printing = {
        "exp.gallery": [],
        "exp.why": ["model"],
        "exp.diff": ["a", "b"],
        "exp.doctor": ["--quick"],
        "exp.audit": ["a"],
        "exp.check": ["debug=one_batch"],
        "exp.schema": [],
    }
    for command, words in printing.items():
        assert into_a_full_place(command, *words) == 1, command
        assert "standard output: No space left on device" in capsys.readouterr().err, command


def test_nothing_is_left_for_python_to_fail_with_at_its_end() -> None:
    with open("/dev/full", "w", encoding="utf-8") as full:
        command = [sys.executable, "-m", "exp.gallery"]
        done = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True, check=False)
    assert (done.returncode, done.stderr.splitlines()) == (
        1,
        ["standard output: No space left on device. Send it where there is room"],
    )


# Of these, Python itself must start so, or end so.
REDIRECTIONS = {"pipe": "| head -1 > first", "closed": ">&-"}
FULL_STREAMS = {"full": {"output": Path("/dev/full")}, "both": dict.fromkeys(("output", "error"), Path("/dev/full"))}
SHORT = ("trainer.max_epochs=2", "trainer.limit_train_batches=3")


def test_a_run_outlives_its_reader(tmp_path: Path, commands: Any) -> None:
    command = f"{sys.executable} -m exp.train {' '.join(SHORT)} name={{}}"
    started = {
        name: subprocess.Popen(
            ["bash", "-o", "pipefail", "-c", f"{command.format(name)} {redirection}"], stderr=subprocess.PIPE, text=True
        )
        for name, redirection in REDIRECTIONS.items()
    }
    ends = {}
    for name, streams in FULL_STREAMS.items():
        done = commands.start(*SHORT, f"name={name}", cwd=tmp_path, **streams).end()
        ends[name] = done.returncode, done.stderr
    for name, process in started.items():
        said = process.communicate(timeout=300)[1]
        ends[name] = process.returncode, said
    for name, (status, said) in ends.items():
        assert status == 0, said
        assert "Traceback" not in said
        (directory,) = tmp_path.glob(f"outputs/{name}/*/*")
        report = read_report(directory)
        assert report.status == "completed"
        assert (directory / "checkpoints" / "last.ckpt").is_file()
        log = (directory / "train.log").read_text()
        expected = {
            "full": "No space left on device",
            "both": "No space left on device",
            "closed": "Bad file descriptor",
        }
        if name in expected:
            assert {"what": "standard output", "error": expected[name]} in report.not_written
            assert log.count("standard output: ") == 1


# --- loggers, pictures, lines ---


class Unreachable(Logger):
    """A store whose network is gone."""

    name, version, calls = "store", "", 0

    def log_metrics(self, metrics: Any, step: int | None = None) -> None:
        Unreachable.calls += 1
        raise ConnectionError(errno.ENETUNREACH, "Network is unreachable")

    def log_hyperparams(self, *_: Any, **__: Any) -> None:
        pass


def in_a_run(monkeypatch: pytest.MonkeyPatch, *overrides: str) -> tuple[exp.Report, str]:
    report = exp.fit(exp.compose([*SMALL, *overrides]))
    assert report.status == "completed"
    directory = Path(report.directory)
    assert json.loads((directory / "report.json").read_text())["not_written"] == list(report.not_written)
    return report, (directory / "train.log").read_text()


FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG)
OTHERS = (errno.EIO, errno.EPIPE, errno.EACCES, errno.EROFS, errno.ESTALE, errno.ENOENT)


@pytest.mark.parametrize("word", [*FULL, *OTHERS], ids=errno.errorcode.get)
def test_a_file_of_values_that_cannot_be_written_is_told_once_in_the_systems_words(
    monkeypatch: pytest.MonkeyPatch, word: int
) -> None:
    monkeypatch.setattr(EventFile, "_append", once(word))
    monkeypatch.setattr(StepTable, "_append", once(word))
    monkeypatch.setattr(Lines, "milestone", once(word))
    report, log = in_a_run(monkeypatch, "trainer.log_every_n_steps=1", "+logger=csv")
    told = {entry["what"]: entry["error"] for entry in report.not_written}
    assert told.keys() == {"logger.tensorboard", "logger.csv", "table.csv", "the progress display"}
    assert log.count("The run goes on without it") == 4
    for what, said in told.items():
        assert os.strerror(word) in said
        assert f"- {what}: {said}" in as_markdown(report)
        assert ("Make room" in said) == (word in FULL and what != "the progress display")
    assert report.metrics["loss/train"] > 0


@pytest.mark.parametrize("word", [errno.EDQUOT, errno.ESTALE], ids=errno.errorcode.get)
def test_a_figure_in_a_file_is_no_reason_either(monkeypatch: pytest.MonkeyPatch, word: int) -> None:
    monkeypatch.setattr(operators, "write_whole", once(word))
    monkeypatch.setattr(landscape, "write_whole", once(word))
    report, _ = in_a_run(monkeypatch, "+hooks=[operators,landscape]", "hooks.landscape.every_n_steps=1")
    told = {Path(entry["what"]).parent.name: entry["error"] for entry in report.not_written}
    assert told == {"operators": os.strerror(word), "landscape": os.strerror(word)}


def test_a_table_and_a_store_fail_each_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(StepTable, "_append", once())
    monkeypatch.setitem(sys.modules, "unreachable", sys.modules[__name__])
    monkeypatch.setattr(Unreachable, "__module__", "unreachable")
    Unreachable.calls = 0
    report, log = in_a_run(
        monkeypatch, "+logger=csv", "+logger.store={_target_: unreachable.Unreachable}", "security.allow=[unreachable]"
    )
    told = {entry["what"]: entry["error"] for entry in report.not_written}
    assert told.keys() == {"logger.csv", "table.csv", "logger.store"}
    assert "No space left on device" in told["logger.csv"]
    assert told["logger.store"] == "Network is unreachable"
    assert Unreachable.calls == 1
    assert log.count("The run goes on without it") == 3
    assert list(Path(report.directory).glob("tensorboard/events*"))


class Closed(Unreachable):
    """A store that is gone when it is made, or when it is opened."""

    def __init__(self, *, at: str = "made", error: str = "ConnectionError", days: int = 1) -> None:
        super().__init__()
        self.at = at
        self.error = {"ConnectionError": ConnectionError(errno.ESTALE, os.strerror(errno.ESTALE)),
                      "RuntimeError": RuntimeError("no key was given"), "Own": StoreError("gone")}[error]  # fmt: skip
        if days < 1:
            raise ValueError(f"days is {days}; expected 1 or more")
        if at == "made":
            raise self.error

    @property
    def experiment(self) -> object:
        if self.at == "opened":
            raise self.error
        return None


class StoreError(Exception):
    pass


@pytest.fixture
def closed(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    monkeypatch.setitem(sys.modules, "closed", sys.modules[__name__])
    monkeypatch.setattr(Closed, "__module__", "closed")
    return ["+logger.store={_target_: closed.Closed}", "security.allow=[closed]"]


@pytest.mark.parametrize("at", ["made", "opened"])
@pytest.mark.parametrize(
    ("error", "words"),
    [("ConnectionError", os.strerror(errno.ESTALE)), ("RuntimeError", "no key was given"), ("Own", "gone")],
)
def test_a_store_that_is_gone_when_the_run_begins_is_left_out(
    monkeypatch: pytest.MonkeyPatch, closed: list[str], at: str, error: str, words: str
) -> None:
    report, log = in_a_run(monkeypatch, *closed, f"+logger.store.at={at}", f"+logger.store.error={error}")
    assert list(report.not_written) == [{"what": "logger.store", "error": words}]
    assert log.count("The run goes on without it") == 1
    assert list(Path(report.directory).glob("tensorboard/events*"))


@pytest.mark.parametrize(("setting", "told"), [("days=0", "days: 0; expected 1 or more"), ("dayz=1", "store.dayz")])
def test_a_wrong_parameter_of_a_store_is_a_fault(closed: list[str], setting: str, told: str) -> None:
    with pytest.raises(exp.ConfigError, match=told):
        exp.fit(exp.compose([*SMALL, *closed, f"+logger.store.{setting}"]))


def test_a_picture_that_cannot_be_drawn_is_told_once_for_its_tag(monkeypatch: pytest.MonkeyPatch) -> None:
    def drawn(self: Histogram) -> Histogram:
        raise ValueError("no font")

    monkeypatch.setattr(Histogram, "drawn", drawn)
    report, log = in_a_run(
        monkeypatch, "hooks.gradients.histogram_every_n_steps=1", "trainer.max_epochs=2", "trainer.log_every_n_steps=1"
    )
    told = [entry["what"] for entry in report.not_written]
    assert told
    assert len(told) == len(set(told))
    assert all(what.startswith("the picture gradients/") for what in told)
    assert "ValueError: no font" in log  # where it came from is in the log


# --- what a run does end for ---


def test_a_checkpoint_that_cannot_be_written_ends_the_run_with_its_path(monkeypatch: pytest.MonkeyPatch) -> None:
    from exp.engine import checkpoint

    own, calls = os.fsync, []

    def fsync(descriptor: int) -> None:
        if "/.last.ckpt." in os.readlink(f"/proc/self/fd/{descriptor}"):
            calls.append(1)
            if len(calls) == 2:
                raise OSError(errno.EDQUOT, os.strerror(errno.EDQUOT))
        own(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(exp.RunError) as caught:
        exp.fit(exp.compose(["trainer.max_epochs=2", "trainer.limit_train_batches=4", "checkpoint.every_n_steps=1"]))
    message = str(caught.value)
    assert "checkpoints/last.ckpt: Disk quota exceeded" in message
    (directory,) = Path.cwd().glob("outputs/train/*/*")
    state = checkpoint.read_checkpoint(directory / "checkpoints" / "last.ckpt")
    assert state["global_step"] == 1
    assert read_report(directory).status == "failed"
    assert not list((directory / "checkpoints").glob(".*"))


def test_a_signal_while_the_pictures_are_drawn_finds_a_run_that_is_over(monkeypatch: pytest.MonkeyPatch) -> None:
    def interrupted(*arguments: object, **named: object) -> dict[str, bytes]:
        raise Interrupted(signum=signal.SIGTERM, checkpoint=None)

    monkeypatch.setattr(report_pictures, "pictures_of", interrupted)
    report, _ = in_a_run(monkeypatch)
    assert report.status == "completed"
