"""Precisions on a GPU. test_words.py and test_scaler.py test everything except the kernels on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import AbstractContextManager, nullcontext

import pytest
import torch
from torch import nn

from exp.build import Parts
from exp.precision.plugin import TensorFloat32, build_precision, why_without_effect

pytestmark = pytest.mark.gpu
RUN = ("launch.accelerator=cuda", "launch.devices=1", "model=lenet", "trainer.max_steps=20", "data.batch_size=64")


@pytest.mark.parametrize("word", ["tf32", "bf16", "fp16", "bf16_true", "fp64"])
def test_a_word_trains_to_the_loss_of_float32(word: str, parts: Callable[..., Parts]) -> None:
    losses = {}
    for each in ("fp32", word):
        built = parts(f"precision={each}", *RUN)
        built.trainer.fit(built.module, datamodule=built.data)
        losses[each] = float(built.module.last.loss)
    assert losses[word] == pytest.approx(losses["fp32"], rel=0.1)


def test_a_step_of_fp16_never_waits_for_the_device(without_waiting: Callable[[], AbstractContextManager[None]]) -> None:
    """A fused optimizer decides on the device if it skips a step, and exp does not wait for the decision."""
    plugin = build_precision("fp16", device_type="cuda", enabled=True)
    network = nn.Linear(8, 8, device="cuda")
    optimizer = torch.optim.AdamW(network.parameters(), fused=True)
    x = torch.randn(4, 8, device="cuda")
    for step in range(3):
        with plugin.forward_context():
            loss = network(x).float().pow(2).mean()
        plugin.scale(loss).backward()
        # The first step creates the optimizer state, which may wait.
        with without_waiting() if step else nullcontext():
            plugin.unscale(optimizer)
            plugin.step(optimizer)
            plugin.update()
        optimizer.zero_grad()
    assert float(plugin.skipped_steps) == 0.0


def test_a_deterministic_run_repeats_bit_for_bit(parts: Callable[..., Parts]) -> None:
    losses = []
    try:
        for _ in range(2):
            built = parts("runtime.deterministic=true", *RUN)
            built.trainer.fit(built.module, datamodule=built.data)
            losses.append(float(built.module.last.loss))
    finally:
        torch.use_deterministic_algorithms(False)
    assert losses[0] == losses[1]


def test_only_tf32_is_less_exact_than_float32() -> None:
    if reason := why_without_effect("cuda"):
        pytest.skip(reason)
    a, b = (torch.randn(512, 512, device="cuda", dtype=torch.float64) for _ in range(2))
    errors = []
    for allowed in (True, False):
        switches = TensorFloat32(allowed=allowed)
        switches.set()
        errors.append(float(((a.float() @ b.float()).double() - a @ b).norm() / (a @ b).norm()))
        switches.put_back()
    assert errors[1] < 1e-6 < 1e-4 < errors[0] < 1e-2
