"""Rare cases in which a run could lose its report, or report values of another run."""

import json
import signal
import sys
from types import SimpleNamespace

import pytest

import exp
from exp.cli.train import main
from exp.config.settings import settings_of
from exp.run_report import Ongoing, forget_peak_memory

HOOK = """
import numpy as np
import torch
from exp.hooks.hook import Hook

class Odd(Hook):
    def after_step(self, step):
        return {"odd/value": VALUE}
"""


def write_hook(write, value):
    write("conf/hooks/odd.yaml", "# A hook: +hooks=odd\nodd: {_target_: own_hook.Odd, every_n_steps: 1}\n")
    write("own_hook.py", HOOK.replace("VALUE", value))


def test_a_numpy_number_of_a_hook_reaches_the_report(write):
    write_hook(write, "np.float32(2.5)")
    assert exp.fit(exp.compose(["+hooks=odd", "debug=one_batch"])).metrics["odd/value"] == 2.5


@pytest.mark.parametrize("value", ["torch.ones(3)", "'much'"])
def test_a_hook_value_that_is_no_number_is_named(place, write, value):
    write_hook(write, value)
    with pytest.raises(exp.RunError, match="odd/value"):
        exp.fit(exp.compose(["+hooks=odd", "debug=one_batch"]))
    (path,) = place.glob("outputs/train/*/*/report.json")
    assert json.loads(path.read_text())["status"] == "failed"


def test_exp_train_under_torchrun_names_the_worker(monkeypatch, capsys, tmp_path):
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "1")
    assert main(["debug=one_batch"]) == 2
    assert "exp.worker" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


MODEL = """
import os, pathlib, torch

class Own(torch.nn.Linear):
    def __init__(self):
        super().__init__(64, 10)
        self.is_run = bool(list(pathlib.Path().glob("outputs/*/*/*/config.yaml")))
        try:
            if self.is_run:
                os.kill(os.getpid(), SIGNUM)
        except Exception:
            ANSWER

    def forward(self, x):
        if self.is_run:
            raise ZeroDivisionError("a bug")
        return super().forward(x.flatten(1))
"""
OTHER = "raise ValueError('made of another') from None"


def write_model(write, signum, answer):
    """Write a model that sends a signal while the run builds it, and runs `answer` if it catches the exception."""
    write("conf/model/own.yaml", "# Sends a signal: model=own\n_target_: own_model.Own\n")
    write("own_model.py", MODEL.replace("SIGNUM", str(int(signum))).replace("ANSWER", answer))


@pytest.mark.parametrize("answer", [OTHER, pytest.param("raise", marks=pytest.mark.slow)])
@pytest.mark.parametrize("signum", [signal.SIGINT, pytest.param(signal.SIGTERM, marks=pytest.mark.slow)])
def test_a_signal_while_the_network_is_built_interrupts_the_run(place, write, capsys, signum, answer):
    write_model(write, signum, answer)
    assert main(["model=own"]) == 128 + signum
    (directory,) = place.glob("outputs/train/*/*")
    assert "Traceback" not in capsys.readouterr().err
    assert json.loads((directory / "report.json").read_text())["status"] == "interrupted"


def test_an_error_after_a_swallowed_signal_is_reported(write, capsys):
    write_model(write, signal.SIGINT, "pass")
    assert main(["model=own"]) == 1
    assert "ZeroDivisionError: a bug" in capsys.readouterr().err


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux can reset the peak of the resident set")
def test_a_job_does_not_report_the_peak_memory_of_another(tmp_path):
    config = exp.compose([])
    large = bytearray(400 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    del large

    parts = SimpleNamespace(
        trainer=SimpleNamespace(global_step=0, current_epoch=0),
        recording=SimpleNamespace(latest={}, stage_steps={}),
        checkpointing=SimpleNamespace(best=None),
        stopping=SimpleNamespace(ended_by=None),
    )
    forget_peak_memory()
    ongoing = Ongoing(tmp_path, settings_of(config), overrides=[], world_size=1)
    before = ongoing.end_report("completed", parts=parts).peak_memory_mib
    large = bytearray(400 * 2**20)
    large[::4096] = b"x" * len(large[::4096])
    forget_peak_memory()
    ongoing = Ongoing(tmp_path, settings_of(config), overrides=[], world_size=1)
    held = ongoing.end_report("completed", parts=parts).peak_memory_mib
    assert held - before > 300


def test_a_plateau_schedule_steps_after_each_validation():
    words = ["model=mlp", "+objective=jacobian", "trainer.max_epochs=4", "trainer.check_val_every_n_epoch=2"]
    schedule = ["scheduler=plateau", "scheduler.monitor=loss/val/cross_entropy", "scheduler.patience=0"]
    # With this threshold no value is an improvement over the first one.
    never = ["+scheduler.threshold=1.0", "+scheduler.factor=0.1", "optimizer.lr=0.01"]
    report = exp.fit(exp.compose([*words, *schedule, *never, "trainer.limit_train_batches=2", "test=false"]))
    # The run has two validations: the first is the best, and the second lowers the rate once.
    assert report.metrics["optimizer/lr/default"] == pytest.approx(0.001)
