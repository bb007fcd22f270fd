"""best.ckpt has the validated weights, even if callbacks change the module after the validation."""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback
from lightning.pytorch.callbacks import EMAWeightAveraging, ModelPruning, StochasticWeightAveraging

from exp.engine.checkpoint import read_checkpoint

pytestmark = [
    pytest.mark.numeric,
    pytest.mark.filterwarnings("ignore:SWA is currently only supported every epoch"),
]


class Spoils(Callback):
    """Callback that changes every weight at a hook, without a change of torch's version counters."""

    def __init__(self, hook: str) -> None:
        setattr(self, hook, self._spoil)

    def _spoil(self, trainer: Any, module: Any, *_: Any) -> None:
        for tensor in module.parameters():
            tensor.data.mul_(0.97)


def pruning(**settings: Any) -> ModelPruning:
    return ModelPruning("l1_unstructured", amount=0.3, use_lottery_ticket_hypothesis=False, **settings)


CHANGING = {
    "swa": functools.partial(StochasticWeightAveraging, swa_lrs=0.05, swa_epoch_start=2),
    "pruning": pruning,
    "pruning_behind_validation": functools.partial(pruning, prune_on_train_epoch_end=False),
    "ema": functools.partial(EMAWeightAveraging, decay=0.5),
    "epoch_end": functools.partial(Spoils, "on_train_epoch_end"),
    "validation_epoch_end": functools.partial(Spoils, "on_validation_epoch_end"),
    "epoch_start": functools.partial(Spoils, "on_train_epoch_start"),
}


HOLDS = {"holds_scored": True}


def value_of(small: Any, directory: Path, small_run: ModuleType, state: dict[str, torch.Tensor]) -> float:
    """Return the validation loss of weights, computed by a run that only validates."""
    other = small_run.Small(directory)
    other.module.load_state_dict(state)
    other.trainer.validate(other.module, datamodule=other.data, verbose=False)
    return float(other.recording.metrics["loss/val"])


@pytest.mark.parametrize("name", CHANGING)
def test_the_best_checkpoint_has_the_value_that_was_measured(tmp_path: Path, small_run: ModuleType, name: str) -> None:
    small = small_run.Small(tmp_path / "run", callbacks=(CHANGING[name](),), max_epochs=6, saving=HOLDS)
    small.fit()
    best = small.checkpointing.best
    small.trainer.test(small.module, datamodule=small.data, ckpt_path=str(small.checkpointing.best_path), verbose=False)
    tested = {f"network.{name}": tensor for name, tensor in small.weights().items()}
    assert value_of(small, tmp_path / "tested", small_run, tested) == best["value"]
    state = read_checkpoint(small.checkpointing.best_path)["state_dict"]
    assert value_of(small, tmp_path / "again", small_run, state) == best["value"]


def test_a_run_resumes_from_the_best_with_trained_weights(tmp_path: Path, small_run: ModuleType) -> None:
    def run(name: str, epochs: int, resume: Path | None = None) -> Any:
        small = small_run.Small(
            tmp_path / name, callbacks=(Spoils("on_train_epoch_end"),), max_epochs=epochs, saving=HOLDS
        )
        small.fit(resume=resume)
        return small

    whole, part = run("whole", 3), run("part", 2)
    best = part.checkpointing.best_path
    assert part.checkpointing.best["step"] == part.trainer.global_step
    assert "exp_scored" in read_checkpoint(best)
    again = run("again", 3, resume=best)
    losses = {key: value for key, value in whole.values.seen.items() if key[0].startswith("loss") and key[1] > 14}
    assert losses == {key: value for key, value in again.values.seen.items() if key[0].startswith("loss")}
    for name, tensor in again.weights().items():
        assert torch.equal(tensor, whole.weights()[name]), name
