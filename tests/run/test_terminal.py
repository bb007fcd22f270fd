"""What a person does at a terminal: closes it, presses Ctrl-C, goes on later, looks a run up by its tags."""

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
from exp.check import __main__ as check
from exp.errors import Interrupted
from exp.run_report import Ongoing, as_markdown, read_report
from exp.signals import heeded
from exp.train import main

SMALL = ("debug=one_batch", "trainer.enable_progress_bar=false")


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def in_a_terminal(*overrides: str) -> tuple[subprocess.Popen, int]:
    """A run as the foreground process of a terminal of its own, and the terminal's other end."""
    here, there = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-m", "exp.train", *overrides],
        stdin=there, stdout=there, stderr=there, start_new_session=True,
        preexec_fn=lambda: fcntl.ioctl(0, termios.TIOCSCTTY, 0),
    )  # fmt: skip
    os.close(there)
    return process, here


def read_until(terminal: int, word: bytes, *, seconds: float = 200) -> None:
    seen, ends = b"", time.monotonic() + seconds
    while word not in seen and time.monotonic() < ends:
        if select.select([terminal], [], [], 1.0)[0]:
            seen += os.read(terminal, 4096)
    assert word in seen, seen


@pytest.mark.filterwarnings("ignore:.*preexec_fn.*")
def test_a_closed_terminal_costs_no_step(tmp_path):
    process, terminal = in_a_terminal("trainer.max_epochs=1000", "tags=[mine]")
    read_until(terminal, b"epoch 3")
    os.close(terminal)
    assert process.wait(timeout=100) == 128 + signal.SIGHUP
    (directory,) = tmp_path.glob("outputs/train/*/*")
    report = read_report(directory)
    assert report.status == "interrupted"
    assert report.steps > 0
    assert (directory / "checkpoints" / "last.ckpt").is_file()
    # The command that the message ends with passes the check, which reads the checkpoint.
    command = shlex.split(report.error["message"].splitlines()[-1])
    assert command[:3] == ["python", "-m", "exp.train"]
    assert "tags=[mine]" in command
    assert command[-1] == f"resume={directory.relative_to(tmp_path)}/checkpoints/last.ckpt"
    exp.validate(exp.compose(command[3:]))


def test_nohup_is_respected():
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        assert heeded() == (signal.SIGINT, signal.SIGTERM, signal.SIGUSR1)
    finally:
        signal.signal(signal.SIGHUP, before)
    assert signal.SIGHUP in heeded()


@pytest.mark.parametrize("module", ["train", "check.__main__"])
def test_ctrl_c_while_hydra_is_being_imported_is_one_line(module):
    program = f"""
        import importlib.abc, os, signal, sys

        class Pressed(importlib.abc.MetaPathFinder):
            def find_spec(self, name, path, target=None):
                if name == "hydra":
                    os.kill(os.getpid(), signal.SIGINT)

        sys.meta_path.insert(0, Pressed())
        from exp.{module} import main
        sys.exit(main(["debug=one_batch"]))
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)], capture_output=True, text=True, timeout=200, check=False
    )
    assert done.returncode == 130
    assert done.stderr.count("\n") == 1
    assert done.stderr.startswith("interrupted")


def test_the_command_that_goes_on_replaces_an_earlier_resume_and_quotes_what_hydra_would_read(tmp_path):
    config = exp.compose([])
    overrides = ["seed=3", "resume=old.ckpt", "name='a b'"]
    ongoing = Ongoing(tmp_path, config, overrides=overrides, world_size=1)
    error = Interrupted(signum=15, checkpoint=str(tmp_path / "last.ckpt"))
    error.command = ongoing.resume_command(error.checkpoint)
    assert str(error).splitlines()[1] == "  python -m exp.train seed=3 'name='\"'\"'a b'\"'\"'' resume=last.ckpt"
    odd = tmp_path / "it's (a), {b}" / "last.ckpt"
    typed = shlex.split(ongoing.resume_command(str(odd)))[3:]
    assert exp.compose(typed).resume == str(odd.relative_to(tmp_path))
    assert ongoing.resume_command("/elsewhere/last.ckpt").endswith(" resume=/elsewhere/last.ckpt")


def test_tags_are_in_the_report_and_among_the_hyperparameters(tmp_path):
    report = exp.fit(exp.compose([*SMALL, "tags=[baseline,second try]", "logger=[]"]))
    assert read_report(report.directory).tags == ("baseline", "second try")
    assert json.loads((Path(report.directory) / "report.json").read_text())["tags"] == ["baseline", "second try"]
    assert "- tags: baseline, second try" in as_markdown(report)


def test_a_validation_that_no_epoch_is_long_enough_for_is_refused_before_the_first_step(capsys, tmp_path):
    assert main(["trainer.val_check_interval=500", "trainer.enable_progress_bar=false"]) == 2
    told = capsys.readouterr().err
    assert "trainer.val_check_interval: 500, more than the 20 batches of an epoch; expected at most 20" in told
    assert "trainer.check_val_every_n_epoch=null" in told
    assert "Traceback" not in told


def test_the_check_compares_what_is_declared_with_the_data_that_is_there(capsys, tmp_path):
    assert check.main(["data.input_shape=[8,8]"]) == 2
    assert "data.input_shape: [8, 8]; expected [1, 8, 8], which is what the data holds" in capsys.readouterr().err
    absent = ["data=tensors", "data.dataset.path=absent.npz", "data.input_shape=[4]", "data.input_dtype=float32",
              "data.num_classes=2", "data.num_outputs=2"]  # fmt: skip
    assert check.main(absent) == 0
    captured = capsys.readouterr()
    assert captured.out.startswith("ok: ")
    assert "the data was not compared" in captured.err
    assert "absent.npz" in captured.err
