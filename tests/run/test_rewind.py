"""runtime.non_finite=rewind resumes from the last checkpoint with lower learning rates."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

import exp
from exp.build import build
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.config.freeze import freeze
from exp.engine.checkpoint import read_checkpoint
from exp.errors import NonFiniteError
from exp.run_report import read_report
from exp.strategies.rank import ALONE

LAYER = '''
import torch
from torch import nn

class TooFast(nn.Module):
    """Returns nan gradients when, from its eighth call on, a step is longer than the limit."""

    def __init__(self, *, limit: float) -> None:
        super().__init__()
        self.limit = limit
        self.moved = nn.Parameter(torch.zeros(()))
        self.register_buffer("before", torch.zeros(()))
        self.register_buffer("calls", torch.zeros(()))

    def forward(self, x):
        x = x * (1.0 + self.moved)
        if self.training and not x.is_meta:
            self.calls += 1
            if self.calls >= 8 and float((self.moved.detach() - self.before).abs()) > self.limit:
                x = x + torch.sqrt((x - x.detach()).abs())
            self.before.copy_(self.moved.detach())
        return x
'''
SHORT = [
    "security.allow=[too_fast]", "data=digits", "data.batch_size=256", "trainer.max_epochs=4",
    "checkpoint.every_n_steps=3", "trainer.enable_progress_bar=false",
    "runtime.non_finite=rewind", "scheduler=cosine", "optimizer.lr=0.05",
    "hooks=[gradients]", "+model.layers.fast={_target_: too_fast.TooFast, limit: 0.008}",
]  # fmt: skip


@pytest.fixture(autouse=True)
def layer(write: Any) -> None:
    write("too_fast.py", LAYER)


def state(directory: Path) -> dict[str, torch.Tensor]:
    return read_checkpoint(directory / "checkpoints" / "last.ckpt")


def log_of(directory: Path) -> str:
    return (directory / "train.log").read_text()


def test_a_rewind_equals_a_resume_with_lower_rates(tmp_path: Path) -> None:
    report = exp.fit(exp.compose([*SHORT, "hydra.run.dir=one"]))
    assert report.status == "completed"
    text = log_of(tmp_path / "one")
    assert "the loss is not a number (nan) at step" in text
    assert text.count("with its learning rates times 0.5: time ") >= 1
    rewinds = text.count("with its learning rates times 0.5: time ")
    with pytest.raises(NonFiniteError, match=r"checkpoints/last\.ckpt is of step (\d+), and good") as caught:
        exp.fit(exp.compose([*SHORT, "runtime.max_rewinds=0", "hydra.run.dir=two"]))
    step = int(str(caught.value).partition("is of step ")[2].partition(",")[0])
    assert read_report("two").status == "failed"
    assert state(tmp_path / "two")["global_step"] == step
    # By hand: resume from the last checkpoint each time, with the rates halved once more.
    resumed = Path("two")
    for rewind in range(1, rewinds + 1):
        decided = plan(
            resolve(exp.compose([*SHORT, f"resume={resumed}/checkpoints/last.ckpt", f"hydra.run.dir=r{rewind}"]))
        )
        directory = freeze(decided.resolved.config)
        parts = build(decided, directory, rank=ALONE, rewinds=rewind)
        try:
            parts.trainer.fit(parts.module, datamodule=parts.data, ckpt_path=decided.plain["resume"], weights_only=True)
        except NonFiniteError:
            assert rewind < rewinds
        if (directory / "checkpoints" / "last.ckpt").is_file():
            resumed = directory
    rewound, by_hand = state(tmp_path / "one"), state(resumed)
    assert rewound["global_step"] == by_hand["global_step"]
    torch.testing.assert_close(rewound["state_dict"], by_hand["state_dict"], rtol=0, atol=0)
    (optimizer,), (expected,) = rewound["optimizer_states"], by_hand["optimizer_states"]
    torch.testing.assert_close(optimizer["state"], expected["state"], rtol=0, atol=0)
    assert optimizer["param_groups"] == expected["param_groups"]
    assert rewound["lr_schedulers"] == by_hand["lr_schedulers"]
    assert rewound["lr_schedulers"][0]["base_lrs"] == [0.05 * 0.5**rewinds]


def test_a_run_ends_when_lower_rates_do_not_help(tmp_path: Path) -> None:
    """Without a checkpoint a rewind starts from the beginning."""
    never = ["model.layers.fast.limit=-1", "runtime.max_rewinds=2"]
    never += ["checkpoint.save_last=false", "checkpoint.save_best=false"]
    with pytest.raises(NonFiniteError, match=r"not finite after step|the loss is not a number"):
        exp.fit(exp.compose([*SHORT, *never, "test=false", "hydra.run.dir=one"]))
    assert log_of(tmp_path / "one").count("It goes back to the start") == 2
    assert read_report("one").status == "failed"


def test_ranks_rewind_together(tmp_path: Path, commands: Any) -> None:
    saving = ["checkpoint.async=true", "checkpoint.every_n_steps=null"]
    words = [*SHORT, *saving, "strategy=ddp", "launch.accelerator=cpu", "hydra.run.dir=one"]
    done = commands.run(*words, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    directory = tmp_path / "one"
    report = read_report(directory)
    assert report.status == "completed"
    assert report.world_size == 2
    assert "with its learning rates times 0.5" in log_of(directory)
    assert all(tensor.isfinite().all() for tensor in state(directory)["state_dict"].values())
