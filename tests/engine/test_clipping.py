"""Clipping is torch's own for whole gradients, and the same for parts of them."""

from __future__ import annotations

import pytest
import torch
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import nn

from exp.engine.module import clip

pytestmark = pytest.mark.numeric

LIMITS = ((0.5, "norm"), (0.5, None), (0.01, "value"))


def parameters():
    generator = torch.Generator().manual_seed(0)
    made = []
    for shape in ((4, 3), (5,), ()):
        made.append(nn.Parameter(torch.randn(shape, generator=generator)))
        made[-1].grad = torch.randn(shape, generator=generator)
    made.append(nn.Parameter(torch.zeros(2)))  # without a gradient
    return made


@pytest.mark.parametrize(("value", "algorithm"), LIMITS)
def test_whole_gradients(value, algorithm):
    ours, theirs = parameters(), parameters()
    norm = clip(ours, value=value, algorithm=algorithm, strategy=SingleDeviceStrategy(device="cpu"))
    if algorithm == "value":
        nn.utils.clip_grad_value_(theirs, value)
        assert norm is None
    else:
        assert torch.equal(norm, nn.utils.clip_grad_norm_(theirs, value))
    for one, two in zip(ours[:-1], theirs[:-1], strict=True):
        assert torch.equal(one.grad, two.grad)


@pytest.mark.parametrize("value", [None, 0])
def test_nothing_to_clip(value):
    ours = parameters()
    assert clip(ours, value=value, algorithm="norm", strategy=SingleDeviceStrategy(device="cpu")) is None
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(ours[:-1], parameters()[:-1], strict=True))


def test_small_gradients_are_left_alone():
    ours = parameters()
    clip(ours, value=1e3, algorithm="norm", strategy=SingleDeviceStrategy(device="cpu"))
    assert all(torch.equal(one.grad, two.grad) for one, two in zip(ours[:-1], parameters()[:-1], strict=True))


BASE = (
    "model=sequential", "precision=fp64", "trainer.max_epochs=null", "trainer.max_steps=5", "test=false", "logger=[]",
)  # fmt: skip


@pytest.mark.any_processor
def test_parts(ranks):
    """By value; by norm in tests/strategies/test_whole_checkpoints.py."""
    limits = ("trainer.gradient_clip_val=0.001", "trainer.gradient_clip_algorithm=value")
    one = ranks.train(*BASE, *limits, "strategy=single")
    for strategy in ("fsdp", "tensor_parallel"):
        parts = ranks.train(*BASE, *limits, f"strategy={strategy}", ranks=2)
        assert parts.losses == pytest.approx(one.losses, abs=1e-10), strategy
