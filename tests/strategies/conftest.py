"""Fixtures with runs of one process, for comparison with runs of several ranks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

# A transformer with 4,922 parameters.
MODEL = ("model=transformer", "model.constants.width=16", "model.constants.hidden=32")
# SGD, because AdamW turns the rounding error of a gradient near zero into a whole step. FSDP has no fused optimizer.
# Batches of 505 samples do not divide by 2 or 4, and the third batch of an epoch has 248.
SETTINGS = (
    *("precision=fp64", "optimizer=sgd", "optimizer.momentum=0.9", "optimizer.fused=false"),
    *("trainer.gradient_clip_val=0.3", "data.batch_size=505", "trainer.max_epochs=null", "trainer.max_steps=4"),
    *("trainer.log_every_n_steps=1", "trainer.limit_val_batches=2", "hooks=[gradients,memory]"),
    *("hooks.gradients.each_parameter=true", "metric_stages=[train,val,test]", "test=false", "logger=[]"),
)
# Figures that depend on time, on the system, or on the part of the network in a rank. The update ratio is not compared,
# because the gradient of a bias of keys is only rounding error.
NOT_COMPARED = ("memory/", "throughput/", "gradients/update_ratio/")


def same_run(one: Any, other: Any, *, tolerance: float = 1e-10) -> None:
    """Assert that two runs have the same values, weights and optimizer state.

    Values are losses, norms of gradients, metrics of every stage and learning rates. Weights and momenta may differ
    by a hundred times the tolerance.
    """
    assert one.values.keys() == other.values.keys()
    for tag, values in one.values.items():
        if not tag.startswith(NOT_COMPARED):
            assert other.values[tag] == pytest.approx(values, rel=0, abs=tolerance), tag
    same_state(one, other, tolerance=100 * tolerance)


def same_state(one: Any, other: Any, *, tolerance: float = 1e-8) -> None:
    """Assert that the last checkpoints of two runs have the same weights, averages and state."""
    expected, saved = one.checkpoint(), other.checkpoint()
    assert list(saved["state_dict"]) == list(expected["state_dict"])
    for key in ("state_dict", "current_model_state", "optimizer_states", "lr_schedulers", "exp_position"):
        assert same_values(saved.get(key), expected.get(key), tolerance=tolerance), key


def same_values(one: Any, other: Any, *, tolerance: float) -> bool:
    if isinstance(one, torch.Tensor):
        return one.shape == other.shape and torch.allclose(one, other, rtol=0, atol=tolerance)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same_values(one[key], other[key], tolerance=tolerance) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(
            same_values(left, right, tolerance=tolerance) for left, right in zip(one, other, strict=True)
        )
    return bool(one == other)


@pytest.fixture
def require_same_run() -> Callable[..., None]:
    return same_run


@pytest.fixture
def require_same_state() -> Callable[..., None]:
    return same_state


@pytest.fixture
def settings() -> tuple[str, ...]:
    """Overrides of a small run in float64, without the model."""
    return SETTINGS


@pytest.fixture
def run() -> tuple[str, ...]:
    """Overrides of a small run of a transformer in float64."""
    return (*MODEL, *SETTINGS)


@pytest.fixture(scope="session")
def runs_of_one_process() -> dict[tuple[str, ...], Any]:
    return {}


@pytest.fixture
def alone(ranks: Any, runs_of_one_process: dict[tuple[str, ...], Any]) -> Callable[..., Any]:
    """A function that returns the run of one process with overrides, trained once for all tests."""

    def trained(*words: str) -> Any:
        if words not in runs_of_one_process:
            runs_of_one_process[words] = ranks.train(*words, "strategy=single")
        return runs_of_one_process[words]

    return trained


@pytest.fixture
def reference(alone: Callable[..., Any], run: tuple[str, ...]) -> Any:
    """The run of one process with the overrides `run`."""
    return alone(*run)
