"""The log warns of a schedule whose length does not fit the run."""

from __future__ import annotations

import functools
import logging
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch.optim.lr_scheduler import CosineAnnealingLR, LinearLR, StepLR

from exp.optim.optimizer import Optimization
from exp.optim.schedules import Constant, Cosine


@pytest.mark.parametrize(
    ("schedule", "interval", "message"),
    [
        (
            functools.partial(Constant, warmup_steps=14),
            "step",
            "scheduler.warmup_steps is 14, and the run has 14",
        ),
        (functools.partial(Cosine, total_steps=7), "step", "is 7, and the run has 14 steps: they do not fit"),
        (functools.partial(CosineAnnealingLR, T_max=50), "step", "T_max is 50, and the run has 14 steps: they"),
        (functools.partial(LinearLR, total_iters=20), "step", "total_iters is 20, and the run has 14 steps"),
        (functools.partial(StepLR, step_size=2), "epoch", "step_size is 2, and the run has 2 epochs"),
        (functools.partial(Cosine, warmup_steps=5), "step", None),
        (functools.partial(StepLR, step_size=1), "epoch", None),
        (None, "step", None),
    ],
)
def test_a_schedule_of_another_length_is_noted(
    tmp_path: Path,
    small_run: ModuleType,
    caplog: pytest.LogCaptureFixture,
    schedule: Any,
    interval: Any,
    message: str | None,
) -> None:
    small = small_run.Small(tmp_path, metrics={}, max_epochs=2)
    optimizer = functools.partial(torch.optim.AdamW, lr=1e-2)
    small.module.optimization = Optimization(optimizer_factory=optimizer, schedule_factory=schedule, interval=interval)
    with caplog.at_level(logging.WARNING, logger="exp.engine.before_others"):
        small.fit()
    told = [record.getMessage() for record in caplog.records if record.name == "exp.engine.before_others"]
    assert len(told) == (message is not None)
    assert message is None or message in told[0]
