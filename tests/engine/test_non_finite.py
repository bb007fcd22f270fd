"""Checkpoints contain only finite numbers, and a run with nan or inf fails or skips the step."""

from __future__ import annotations

import itertools
import math
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.engine.checkpoint import read_checkpoint
from exp.engine.checkpointing import POSITION
from exp.errors import NonFiniteError
from exp.nested import tensors_in


class Spoils(nn.Module):
    """Layer that returns its input, with a nan gradient at the chosen training calls; the loss stays finite."""

    def __init__(self, *calls: int) -> None:
        super().__init__()
        self.calls, self.count = set(calls), 0

    def forward(self, x: Tensor) -> Tensor:
        if self.training and torch.is_grad_enabled():
            self.count += 1
            if self.count in self.calls:
                x = x + torch.sqrt((x - x.detach()).abs())
        return x


class Masked(nn.Module):
    """Layer with a mask that contains -inf on purpose, and a buffer of statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        self.register_buffer("highest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return x


def network(*calls: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Tanh(), Spoils(*calls), nn.Linear(8, 2), Masked())


def saved(directory: Path) -> dict[str, int]:
    """Return the step of each checkpoint, and assert that all numbers except the mask are finite."""
    found = {}
    for path in (directory / "checkpoints").glob("*.ckpt"):
        state = read_checkpoint(path)
        for part in ("state_dict", "current_model_state"):
            for name, value in state.get(part, {}).items():
                assert name.endswith(".mask") or value.isfinite().all(), (path, name)
        assert all(value.isfinite().all() for value in tensors_in(state["optimizer_states"]))
        found[path.name] = state[POSITION]["step"]
    return found


SETTINGS: dict[str, dict[str, Any]] = {
    "every step": {"every_n_steps": 1},
    "each epoch": {"every_n_steps": None},
    "average": {"every_n_steps": 2, "callbacks": ("ema",)},
    "accumulation": {"every_n_steps": 1, "accumulate_grad_batches": 2},
    "its own loop": {"every_n_steps": 1, "steps_per_execution": 1},
    "by the training's loss": {"every_n_steps": None, "limit_val_batches": 0, "monitor": "loss/train"},
    "nothing is saved": {"every_n_steps": None, "saves": False},
}


@pytest.mark.parametrize("setting", SETTINGS)
@pytest.mark.parametrize("call", [5, 7, 14])
def test_a_gradient_of_nan_fails_the_run_with_good_checkpoints(
    tmp_path: Path, small_run: ModuleType, setting: str, call: int
) -> None:
    """Batch 14 is the last one of the run, and batch 7 the last one of the first epoch."""
    settings = dict(SETTINGS[setting])
    monitor, saves = settings.pop("monitor", "loss/val"), settings.pop("saves", True)
    small = small_run.Small(tmp_path, model=network(call), max_epochs=2, log_every_n_steps=100, **settings)
    small.checkpointing.monitor = monitor
    small.checkpointing.is_saving_last = small.checkpointing.is_saving_best = saves
    with pytest.raises(NonFiniteError) as caught:
        small.fit()
    message, window = str(caught.value), settings.get("accumulate_grad_batches", 1)
    spoilt = -(-((call - 1) % 7 + 1) // window) + (call > 7) * -(-7 // window)
    steps = saved(tmp_path)
    assert all(step < spoilt for step in steps.values())
    assert "all numbers in the saved checkpoints are finite" in message
    if setting == "every step":
        assert f"not finite after step {spoilt}: 0.weight, 0.bias" in message
        assert steps.get("last.ckpt", 0) == spoilt - 1


def test_only_values_by_design_may_be_infinite(tmp_path: Path, small_run: ModuleType) -> None:
    small = small_run.Small(tmp_path / "well", model=network(), max_epochs=1, every_n_steps=1)
    small.fit()
    assert saved(tmp_path / "well")["last.ckpt"] == 7
    assert read_checkpoint(small.last)["state_dict"]["network.5.mask"][1] == -math.inf

    class Breaks(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("mask", torch.zeros(2))

        def forward(self, x: Tensor) -> Tensor:
            self.mask[0] = math.inf
            return x

    broken = nn.Sequential(nn.Linear(6, 2), Breaks())
    with pytest.raises(NonFiniteError, match=r"after step 2: 1\.mask\. This state is not saved"):
        small_run.Small(tmp_path / "ill", model=broken, max_epochs=1, every_n_steps=2).fit()
    assert saved(tmp_path / "ill") == {}


def test_an_infinite_optimizer_state_fails_the_run(tmp_path: Path, small_run: ModuleType) -> None:
    def spoil() -> None:
        next(iter(small.trainer.optimizers[0].state.values()))["exp_avg_sq"].fill_(math.inf)

    small = small_run.Small(
        tmp_path, model=network(), max_epochs=1, callbacks=(small_run.At("on_train_epoch_end", 1, spoil),)
    )
    with pytest.raises(NonFiniteError, match="after step 7: the optimizer's state"):
        small.fit()
    assert saved(tmp_path) == {"last.ckpt": 4}


@pytest.mark.slow
def test_ranks_fail_together(tmp_path: Path, elsewhere: Any) -> None:
    ranks = elsewhere.ranks(tmp_path, 2, plain_network=True, every_n_steps=1, spoilt_rank=1, max_epochs=1)
    assert [elsewhere.end(rank) for rank in ranks] == [1, 1]
    for rank in range(2):
        assert "not finite after step 3" in (tmp_path / f"result.{rank}.json").read_text()
    assert saved(tmp_path) == {"last.ckpt": 2}


# --- skip ---


WORDS = ("fp32", "bf16", "bf16_true", "fp16_true", "fp64", "fp16")
MORE: tuple[dict[str, Any], ...] = ({}, {"accumulate_grad_batches": 2}, {"steps_per_execution": 1})


@pytest.mark.parametrize(("word", "more"), [*itertools.product(WORDS, MORE), ("fp32", {"phases": True})])
def test_a_run_skips_and_counts_such_steps(
    tmp_path: Path, small_run: ModuleType, word: str, more: dict[str, Any]
) -> None:
    """If a sample is nan, the run drops the loss of the step and the batch norm statistics."""
    inputs, targets = small_run.samples()
    inputs[0] = math.nan
    data = Data(
        dataset=Tensors(entries=(inputs, targets), num_classes=2),
        batch_size=16,
        parts={"train": 1.0, "val": 0, "test": 0},
    )
    small = small_run.Small(tmp_path, word=word, non_finite="skip", data=data, max_epochs=2, **more)
    small.fit()
    skipped = small.recording.latest["precision/skipped_steps"]
    # One step per epoch; with phases one per optimizer, and with fp16 also the steps that lower the scale.
    assert skipped == 2 or (2 <= skipped <= 6 and (word == "fp16" or "phases" in more))
    assert saved(tmp_path)["last.ckpt"] == small.trainer.global_step
    assert math.isfinite(small.recording.metrics["loss/train"])
    assert (
        small.recording.latest["precision/skipped_steps"]
        == small.values.seen["precision/skipped_steps", small.trainer.global_step]
    )


def test_a_run_with_skipped_steps_resumes_exactly(tmp_path: Path, small_run: ModuleType) -> None:
    def run(name: str, *calls: int, **settings: Any) -> Any:
        model = network(*calls)
        return small_run.Small(
            tmp_path / name, model=model, non_finite="skip", every_n_steps=1, max_epochs=2, **settings
        )

    whole = run("whole", 3, 11)
    whole.fit()
    first = run("first", 3, 11, callbacks=(small_run.At("on_train_batch_end", 6),))
    with pytest.raises(small_run.Killed):
        first.fit()
    second = run("second", 11 - 5)
    second.fit(resume=first.last)
    torch.testing.assert_close(second.weights(), whole.weights(), rtol=0, atol=0)
    assert second.recording.latest["precision/skipped_steps"] == 2.0
