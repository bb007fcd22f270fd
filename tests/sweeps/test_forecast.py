"""Whether a stack is the faster way, and how many members fit, is known before it is made."""

import functools
import time

import pytest
import torch

from exp import compose
from exp.check.plan import plan, resolve
from exp.sweeps import forecast


@functools.cache
def decided(*overrides):
    return plan(resolve(compose(overrides=list(overrides))))


def test_a_members_memory_is_what_it_holds_and_keeps():
    small = decided("model.layers.hidden.out_features=64", "model.layers.hidden2.out_features=64")
    parameters = 64 * 64 + 64 + 64 * 64 + 64 + 64 * 10 + 10
    # Parameters and AdamW's two averages, twice; gradients; and beside them what a batch of 64 keeps in its layers.
    held = (2 * 3 + 1) * 4 * parameters
    kept = 2 * 4 * 64 * (64 + 4 * 64)
    assert held < forecast.member_bytes(small) < held + 2 * kept
    # SGD has one average of each parameter.
    sgd = decided("model.layers.hidden.out_features=64", "model.layers.hidden2.out_features=64", "optimizer=sgd")
    assert forecast.member_bytes(small) - forecast.member_bytes(sgd) == pytest.approx(2 * 4 * parameters, rel=0.01)


def test_a_stack_is_split_to_fit_the_memory_that_is_free():
    one = forecast.member_bytes(decided())
    assert forecast.most_members(decided(), free=20 * one) == 10
    assert forecast.most_members(decided(), free=20 * one, stacks=2) == 5
    assert forecast.most_members(decided(), free=0) == 1
    assert forecast.most_members(decided(), free=2**50) == forecast.MOST


def test_what_is_faster_is_measured_and_leaves_no_trace(monkeypatch):
    for overrides in ((), ("trainer.max_steps=2",)):
        decided(*overrides)  # a plan draws numbers, too
    threads, state = torch.get_num_threads(), torch.default_generator.get_state()
    measured = []
    monkeypatch.setattr(forecast, "_fastest", lambda work, *, repeats: (work(), measured.pop(0))[1])
    # One step of a millisecond, and a step of a stack of eight that takes two, and one that takes sixteen.
    measured[:] = [1e-3, 1e-3, 2e-3]
    assert forecast.is_faster(decided(), members=32)
    measured[:] = [1e-3, 1e-3, 16e-3]
    assert not forecast.is_faster(decided(), members=32)
    # Of three members it is a step of three.
    measured[:] = [1e-3, 1e-3, 2e-3]
    assert forecast.is_faster(decided(), members=3)
    measured[:] = [1e-3, 1e-3, 7e-3]
    assert not forecast.is_faster(decided(), members=3)
    # Of a long step nothing more is tried; a run of a few such steps gains by its start.
    measured[:] = [50e-3]
    assert not forecast.is_faster(decided(), members=32)
    measured[:] = [50e-3]
    assert forecast.is_faster(decided("trainer.max_steps=2"), members=32)
    assert torch.get_num_threads() == threads
    assert torch.equal(torch.default_generator.get_state(), state)


def test_a_large_network_is_not_even_tried_and_one_that_is_compiled_need_not_be(monkeypatch):
    monkeypatch.setattr(forecast, "_times", None)
    assert not forecast.is_faster(decided("model.layers.hidden.out_features=200000"), members=32)
    assert forecast.is_faster(decided("runtime.compile=true"), members=4)


def test_the_time_of_other_programs_is_not_counted():
    assert forecast._fastest(lambda: time.sleep(0.02), repeats=1) < 0.01
