"""A hook of one's own: what is called, where, and what a wrong config says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exp.errors import ConfigError
from exp.hooks.hook import Hook, Step


class Double(Hook):
    def forward(self, name, module, inputs, output):
        return 2 * output


class Names(Hook):
    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.seen: list[str] = []

    def forward(self, name, module, inputs, output):
        self.seen.append(name)


def network() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 3), nn.ReLU(), nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 2)))


def test_a_transform_replaces_the_output_of_the_modules_that_match_until_it_is_detached():
    net, inputs = network(), torch.randn(5, 4)
    plain = net(inputs)
    hook = Double(modules=["2"])
    hook.attach(net)
    assert torch.equal(net(inputs), 2 * plain)
    hook.detach()
    hook.detach()
    assert torch.equal(net(inputs), plain)


def test_an_observer_sees_names_in_the_order_of_the_forward():
    net = network()
    hook = Names(modules=["2.*", "1"])
    hook.attach(net)
    net(torch.randn(1, 4))
    assert hook.seen == ["1", "2.0", "2.1"]


def test_a_pattern_without_a_module_is_a_fault_that_names_the_modules():
    with pytest.raises(ConfigError) as caught:
        Names(modules=["encoder.*", "0", "decoder"]).attach(network(), name="mine")
    message = str(caught.value)
    assert [fault.key for fault in caught.value.faults] == ["hooks.mine.modules"] * 2
    assert "'encoder.*'" in message
    assert "'decoder'" in message
    assert "there are 0, 1, 2, 2.0, 2.1" in message


def test_a_period_below_one_is_refused():
    with pytest.raises(ValueError, match="every_n_steps is 0; expected a whole number of steps, 1 or more"):
        Hook(every_n_steps=0)


def test_only_overridden_methods_are_reported_as_such():
    assert Double().overrides("forward")
    assert not Double().overrides("after_step")
    assert not Hook().overrides("forward")


@given(period=st.integers(1, 100), index=st.integers(1, 10_000))
def test_due_at_the_first_step_and_at_every_multiple(period, index):
    assert Hook(every_n_steps=period).due(index) == (index == 1 or index % period == 0)


def test_a_step_needs_no_loss():
    step = Step(index=1, network=network(), optimizers=[], batch_size=4, device=torch.device("cpu"))
    assert step.loss is None
