"""Throughput counts the time between steps, and no pause."""

from __future__ import annotations

import time

import pytest
import torch
from torch import nn

from exp.hooks.hook import Step
from exp.hooks.throughput import Throughput


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns itself."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


def step(index: int, batch_size: int = 64) -> Step:
    return Step(index=index, network=nn.Identity(), optimizers=[], batch_size=batch_size, device=torch.device("cpu"))


def test_means_over_the_steps_since_the_last_value(clock):
    hook = Throughput(every_n_steps=4)
    sizes = [64, 64, 64, 32, 64, 64, 64, 16]
    logged = {}
    for index, size in enumerate(sizes, start=1):
        clock.now += 0.010 if index <= 4 else 0.020
        values = hook.after_step(step(index, size))
        if values:
            logged[index] = values
    assert list(logged) == [4, 8]
    assert logged[4]["throughput/step_ms"] == pytest.approx(10)  # steps 2 to 4: the first has no beginning
    assert logged[4]["throughput/samples_per_second"] == pytest.approx((64 + 64 + 32) / 0.030)
    assert logged[8]["throughput/step_ms"] == pytest.approx(20)
    assert logged[8]["throughput/samples_per_second"] == pytest.approx((64 + 64 + 64 + 16) / 0.080)


def test_a_pause_is_nobody_s_time(clock):
    hook = Throughput(every_n_steps=4)
    for index in (1, 2):
        clock.now += 0.010
        hook.after_step(step(index))
    hook.pause()
    clock.now += 30
    for index in (3, 4):
        clock.now += 0.010
        values = hook.after_step(step(index))
    assert values["throughput/step_ms"] == pytest.approx(10)


def test_a_step_that_has_nothing_to_compare_with_logs_nothing(clock):
    assert Throughput(every_n_steps=1).after_step(step(1)) is None
