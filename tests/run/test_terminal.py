"""A run at a terminal: closing the terminal, Ctrl-C, the printed command that resumes, tags, and errors."""

import fcntl
import json
import os
import pty
import select
import shlex
import signal
import subprocess
import sys
import termios
import textwrap
import time
from pathlib import Path

import pytest

import exp
from exp.cli import check
from exp.config.settings import settings_of
from exp.errors import Interrupted
from exp.run_report import Ongoing, as_markdown, read_report
from exp.signals import ending_signals

SMALL = ("debug=one_batch", "trainer.enable_progress_bar=false")


def in_a_terminal(*overrides: str) -> tuple[subprocess.Popen, int]:
    """Start a run in the foreground of a new terminal, and return the process and the other end of the terminal."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "exp.train", *overrides],
        stdin=theirs, stdout=theirs, stderr=theirs, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(theirs)
    return process, ours


def read_until(terminal: int, word: bytes, *, seconds: float = 200) -> None:
    seen, ends = b"", time.monotonic() + seconds
    while word not in seen and time.monotonic() < ends:
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096)
    assert word in seen, seen


@pytest.mark.slow  # a terminal needs a new interpreter
@pytest.mark.filterwarnings("ignore:.*preexec_fn.*")
def test_a_closed_terminal_saves_the_run(tmp_path):
    process, terminal = in_a_terminal("trainer.max_epochs=1000", "tags=[mine]")
    read_until(terminal, b"epoch 3")
    os.close(terminal)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    (directory,) = tmp_path.glob("outputs/train/*/*")
    report = read_report(directory)
    assert report.status == "interrupted"
    assert report.steps > 0
    assert (directory / "checkpoints" / "last.ckpt").is_file()
    # The command at the end of the message passes the check, which reads the checkpoint.
    command = shlex.split(report.error["message"].splitlines()[-1])
    assert command[:3] == ["python", "-m", "exp.train"]
    assert "tags=[mine]" in command
    assert command[-1] == f"resume={directory.relative_to(tmp_path)}/checkpoints/last.ckpt"
    exp.validate(exp.compose(command[3:]))


def test_an_ignored_hangup_stays_ignored():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert ending_signals() == (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in ending_signals()


@pytest.mark.parametrize("command", ["train", pytest.param("check", marks=pytest.mark.slow)])
def test_ctrl_c_during_an_import_prints_one_line(command):
    program = f"""
        import importlib.abc, os, signal, sys

        class Pressed(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "hydra":
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Pressed())
        from exp.cli.{command} import main
        sys.exit(main(["debug=one_batch"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 130
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("interrupted")


def test_the_resume_command_is_quoted_and_replaces_resume(tmp_path):
    config = exp.compose([])
    overrides = ["seed=3", "resume=old.ckpt", "name='a b'"]
    ongoing = Ongoing(tmp_path, settings_of(config), overrides=overrides, world_size=1)
    error = Interrupted(signum=15, checkpoint=str(tmp_path / "last.ckpt"))
    error.command = ongoing.resume_command(error.checkpoint)
    assert str(error).splitlines()[1] == "  python -m exp.train seed=3 'name='\"'\"'a b'\"'\"'' resume=last.ckpt"
    odd = tmp_path / "it's (a), {b}" / "last.ckpt"
    typed = shlex.split(ongoing.resume_command(str(odd)))[3:]
    assert exp.compose(typed).resume == str(odd.relative_to(tmp_path))
    assert ongoing.resume_command("/elsewhere/last.ckpt").endswith(" resume=/elsewhere/last.ckpt")


def test_tags_are_in_the_report(tmp_path):
    report = exp.fit(exp.compose([*SMALL, "tags=[baseline,second try]", "logger=[]"]))
    assert read_report(report.directory).tags == ("baseline", "second try")
    assert json.loads((Path(report.directory) / "report.json").read_text())["tags"] == ["baseline", "second try"]
    assert "- tags: baseline, second try" in as_markdown(report)


def test_the_check_passes_without_the_data_and_says_so(capsys):
    shapes = ["data.input_shape=[4]", "data.input_dtype=float32", "data.num_classes=2", "data.num_outputs=2"]
    assert check.main(["data=tensors", "data.dataset.path=absent.npz", *shapes]) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("ok: ")
    assert "the data was not compared" in captured.err
    assert "absent.npz" in captured.err
