"""Fixture that builds the parts of a run from a command line without training."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

import exp
from exp.build import Parts, build
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.strategies.rank import ALONE

# Only training, with few steps of few samples, because half precision is slow on a CPU.
SHORT = (
    "hooks=[]", "metrics=[]", "logger=[]", "launch.accelerator=cpu", "strategy=single", "test=false",
    "trainer.enable_progress_bar=false", "trainer.num_sanity_val_steps=0", "trainer.limit_val_batches=1",
    "data.batch_size=8", "trainer.max_epochs=-1",
)  # fmt: skip


@pytest.fixture
def parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Parts]:
    """A function that checks a command line, and returns the built parts of its run."""
    monkeypatch.chdir(tmp_path)
    runs: list[Path] = []

    def made(*overrides: str) -> Parts:
        runs.append(tmp_path / f"run{len(runs)}")
        config = exp.compose([f"hydra.run.dir={runs[-1]}", *SHORT, "trainer.max_steps=3", *overrides])
        decided = plan(resolve(config))
        freeze(decided.resolved.config)
        return build(decided, runs[-1], rank=ALONE)

    return made
