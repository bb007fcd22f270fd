"""Where a run could lose its report, or report another run's figures."""

import json
import signal
import sys
from types import SimpleNamespace
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel, RandomDataset
from torch.utils.data import DataLoader

import exp
from exp.run_report import Ongoing, explain
from exp.train import main

HOOK = """
import numpy as np
import torch
from exp.hooks.hook import Hook

class Odd(Hook):
    def after_step(self, step):
        return {"odd/value": VALUE}
"""


@pytest.fixture(autouse=True)
def _in_an_empty_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


def with_hook(tmp_path, name, value):
    (tmp_path / "conf" / "hooks").mkdir(parents=True)
    (tmp_path / "conf" / "hooks" / "odd.yaml").write_text(
        f"# A hook: +hooks=odd\nodd: {{_target_: {name}.Odd, every_n_steps: 1}}\n"
    )
    (tmp_path / f"{name}.py").write_text(HOOK.replace("VALUE", value))


def test_a_hooks_numpy_number_reaches_the_report(tmp_path):
    with_hook(tmp_path, "numpy_hook", "np.float32(2.5)")
    report = exp.fit(exp.compose(["+hooks=odd", "debug=one_batch"]))
    assert report.metrics["odd/value"] == 2.5


@pytest.mark.parametrize(("name", "value"), [("vector_hook", "torch.ones(3)"), ("word_hook", "'much'")])
def test_a_hook_that_gives_no_number_is_named_by_its_tag(tmp_path, name, value):
    with_hook(tmp_path, name, value)
    with pytest.raises(exp.RunError, match="odd/value"):
        exp.fit(exp.compose(["+hooks=odd", "debug=one_batch"]))
    (path,) = tmp_path.glob("outputs/train/*/*/report.json")
    assert json.loads(path.read_text())["status"] == "failed"


def test_torchrun_is_told_what_to_start(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["debug=one_batch"]) == 2
    assert "exp.worker" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def signalling(tmp_path, signum, *, answer, forward="pass"):
    """A model of the user's own that signals itself as the run builds it: what it answers, and does in its forward."""
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "slow.yaml").write_text("# Signals itself: model=slow\n_target_: slow.Slow\n")
    (tmp_path / "slow.py").write_text(
        "import os, pathlib, torch\n"
        "class Slow(torch.nn.Linear):\n"
        "    def __init__(self):\n"
        "        super().__init__(64, 10)\n"
        "        self.is_run = bool(list(pathlib.Path().glob('outputs/*/*/*/config.yaml')))\n"
        "        try:\n"
        f"            if self.is_run: os.kill(os.getpid(), {int(signum)})\n"
        "        except Exception:\n"
        f"            {answer}\n"
        "    def forward(self, x):\n"
        f"        if self.is_run: {forward}\n"
        "        return super().forward(x.flatten(1))\n"
    )


@pytest.mark.parametrize("answer", ["raise", "raise ValueError('made of another') from None"])
@pytest.mark.parametrize("signum", [signal.SIGINT, signal.SIGTERM])
def test_a_signal_while_the_network_is_built_is_an_interruption(tmp_path, commands, signum, answer):
    signalling(tmp_path, signum, answer=answer)
    done = commands.run("model=slow", cwd=tmp_path)
    (directory,) = tmp_path.glob("outputs/train/*/*")
    assert done.returncode == 128 + signum, done.stderr
    assert "Traceback" not in done.stderr
    assert json.loads((directory / "report.json").read_text())["status"] == "interrupted"


def test_an_error_behind_a_signal_that_the_users_code_swallowed_is_told(tmp_path, commands):
    signalling(tmp_path, signal.SIGINT, answer="pass", forward="raise ZeroDivisionError('a bug')")
    done = commands.run("model=slow", cwd=tmp_path)
    assert done.returncode == 1
    assert "ZeroDivisionError: a bug" in done.stderr


def test_what_ended_a_run_is_told_and_not_what_lightning_raises_in_answer_to_it(tmp_path):
    class Refusing(DataLoader[Any]):
        def __iter__(self) -> Any:
            raise ZeroDivisionError("of the user's own")

    trainer = Trainer(max_epochs=1, logger=False, enable_checkpointing=False, enable_progress_bar=False)
    # Lightning 2.6.6 tears down a loader that it has not made.
    with pytest.raises(RuntimeError, match="combined_loader") as caught:
        trainer.fit(BoringModel(), Refusing(RandomDataset(32, 4)))
    told = explain(caught.value, Ongoing(tmp_path, exp.compose([]), overrides=[], world_size=1), parts=None)
    assert "ZeroDivisionError: of the user's own" in str(told)


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can forget the peak of the resident set")
def test_a_job_does_not_report_the_peak_of_the_job_before_it(tmp_path):
    config = exp.compose([])
    large = bytearray(400 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    del large

    parts = SimpleNamespace(
        trainer=SimpleNamespace(global_step=0, current_epoch=0),
        recording=SimpleNamespace(latest={}),
        checkpointing=SimpleNamespace(best=None),
    )
    before = Ongoing(tmp_path, config, overrides=[], world_size=1).ended("completed", parts=parts).peak_memory_mib
    large = bytearray(400 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    ongoing = Ongoing(tmp_path, config, overrides=[], world_size=1)
    held = ongoing.ended("completed", parts=parts).peak_memory_mib
    assert held - before > 300


def test_a_plateau_on_a_term_of_validation_steps_when_there_is_one():
    words = ["model=mlp", "+objective=jacobian", "trainer.max_epochs=4", "trainer.check_val_every_n_epoch=2"]
    schedule = ["scheduler=plateau", "scheduler.monitor=loss/val/cross_entropy", "scheduler.patience=0"]
    # Nothing counts as an improvement on the first value.
    never = ["+scheduler.threshold=1.0", "+scheduler.factor=0.1", "optimizer.lr=0.01"]
    report = exp.fit(exp.compose([*words, *schedule, *never, "trainer.limit_train_batches=2", "test=false"]))
    # Of two validations the first is the best, and the second lowers the rate once.
    assert report.metrics["optimizer/lr/default"] == pytest.approx(0.001)
