"""Clipping equals torch's, also if several ranks hold shards of the gradients."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from exp.engine.module import clip

pytestmark = pytest.mark.numeric

LIMITS = ((0.5, "norm"), (0.5, None), (0.01, "value"), (1e3, "norm"), (None, "norm"), (0, "norm"))


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((4, 3), (5,), ()):
        made.append(nn.Parameter(torch.randn(shape, generator=generator)))
        made[-1].grad = torch.randn(shape, generator=generator)
    made.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    return made


@pytest.mark.parametrize(("value", "algorithm"), LIMITS)
def test_clipping_equals_torchs(value, algorithm):
    ours, theirs = parameters(), parameters()
    norm = clip(ours, value=value, algorithm=algorithm, strategy=SingleDeviceStrategy(device="cpu"))
    if algorithm == "value":
        nn.utils.clip_grad_value_(theirs, value)
    expected = nn.utils.clip_grad_norm_(theirs, value) if value and algorithm != "value" else None
    assert norm is None if expected is None else torch.equal(norm, expected)
    for one, two in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(one.grad, two.grad)


BASE = (
    "model=sequential", "precision=fp64", "trainer.max_epochs=null", "trainer.max_steps=5", "test=false", "logger=[]",
)  # fmt: skip


@pytest.mark.slow
@pytest.mark.any_processor
def test_gradients_of_parts_are_clipped_by_value(ranks):
    """Tests of clipping by norm are in tests/strategies."""
    limits = ("trainer.gradient_clip_val=0.001", "trainer.gradient_clip_algorithm=value")
    one = ranks.train(*BASE, *limits, "strategy=single")
    for strategy in ("fsdp", "tensor_parallel"):
        parts = ranks.train(*BASE, *limits, f"strategy={strategy}", ranks=2)
        assert parts.losses == pytest.approx(one.losses, abs=1e-10), strategy
