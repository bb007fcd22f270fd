"""Runs of 60 steps with a nan or infinite gradient at a random step, with each checkpoint setting.

At one step the loss stays finite and the gradient of the first layer is nan or infinite. No checkpoint may hold a
number that is not finite, and the error of a failed run says so.
"""

from __future__ import annotations

import itertools
import json
from pathlib import Path

import pytest
import torch

import exp
from exp.errors import NonFiniteError

STEPS = 60
COMMON = (
    *("security.allow=[non_finite]", "data=digits", "data.batch_size=16", "model=sequential", "scheduler=cosine"),
    *("model.layers.hidden.out_features=8", "~model.layers.hidden2", "~model.layers.activation2"),
    *("+model.layers.spoils={_target_: non_finite.Spoils}", "+callbacks.spoiler={_target_: non_finite.Spoiler}"),
    *("hooks=[]", "logger=[]", "metrics=[]", "test=false", "trainer.enable_progress_bar=false"),
    *("trainer.max_epochs=6", "trainer.limit_train_batches=10", "trainer.limit_val_batches=1"),
)
SETTINGS: dict[str, tuple[str, ...]] = {
    "each epoch": (),
    "every step": ("checkpoint.every_n_steps=1",),
    "every 7 steps": ("checkpoint.every_n_steps=7",),
    "by the clock": ("checkpoint.every_n_minutes=0.0002",),
    "best of a step's loss": ("monitor=loss/train", "trainer.limit_val_batches=0"),
    "best of the training loss": ("monitor=loss/train_epoch", "trainer.limit_val_batches=0"),
    "best only": ("checkpoint.save_last=false",),
    "last only": ("checkpoint.save_best=false", "checkpoint.every_n_steps=3"),
    "none": ("checkpoint.save_last=false", "checkpoint.save_best=false"),
    "by a thread, every step": ("checkpoint.async=true", "checkpoint.every_n_steps=1"),
    "by a thread, every 4 steps": ("checkpoint.async=true", "checkpoint.every_n_steps=4"),
    "validation within an epoch": ("trainer.val_check_interval=3", "checkpoint.every_n_steps=4"),
    "averaged weights": ("+callbacks=ema", "checkpoint.every_n_steps=2"),
    "accumulation": (
        *("trainer.accumulate_grad_batches=2", "trainer.limit_train_batches=20", "checkpoint.every_n_steps=1"),
    ),
    "Lightning's loop": ("runtime.steps_per_execution=1", "checkpoint.every_n_steps=5"),
    "phases": ("phases=[body_and_head]", "checkpoint.every_n_steps=2"),
    "ends within an epoch": ("trainer.max_epochs=null", "trainer.max_steps=60", "trainer.limit_train_batches=25"),
}
KINDS = ("stop", "skip")


@pytest.fixture
def run(tmp_path, monkeypatch):
    """A function that runs a case and checks its checkpoints."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    import non_finite

    def run(setting: str, kind: str, step: int, value: float) -> None:
        non_finite.Spoils.active, non_finite.Spoils.value = False, value
        directory = tmp_path / f"run{len([*tmp_path.iterdir()])}"
        spoiler = non_finite.Spoiler
        spoiler.at, spoiler.times, spoiler.directory = step, 1, directory / "checkpoints"
        words = [*COMMON, *SETTINGS[setting], f"runtime.non_finite={kind}", f"hydra.run.dir={directory}"]
        error = None
        try:
            exp.fit(exp.compose(words))
        except NonFiniteError as raised:
            error = str(raised)
        completes = kind == "skip"
        report = json.loads((directory / "report.json").read_text())
        assert (report["status"], error is None) == ("completed" if completes else "failed", completes)
        steps = {}
        for path in (directory / "checkpoints").glob("*.ckpt"):
            checkpoint = torch.load(path, weights_only=True)
            assert non_finite.is_finite(checkpoint), path
            steps[path.name] = checkpoint["global_step"]
        if completes:
            assert (steps.get("last.ckpt", STEPS), report["steps"]) == (STEPS, STEPS)
            return
        newest = max(steps.values(), default=0)
        assert newest < step
        assert "all numbers in the saved checkpoints are finite" in error

    return run


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize(("setting", "kind"), [("every step", "stop"), ("by a thread, every 4 steps", "skip")])
def test_a_non_finite_step_is_never_saved(run, setting, kind):
    run(setting, kind, 13, float("nan"))


@pytest.mark.slow
@pytest.mark.filterwarnings("ignore")
def test_no_settings_save_a_non_finite_step(run, share):
    draws = share.random()
    cases = [*itertools.product(SETTINGS, KINDS)] * 5
    for case in draws.sample(cases, share.count(len(cases))):
        run(*case, draws.randint(1, STEPS), draws.choice([float("nan"), float("inf")]))
