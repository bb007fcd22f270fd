"""A hook of one's own: what is called, where, and what a wrong config says."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exp.errors import ConfigError, RunError
from exp.hooks.hook import Hook
from exp.hooks.step import Step


class Double(Hook):
    transforms = True

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
    assert hook.seen == []
    with hook.engaged():
        net(torch.randn(1, 4))
    net(torch.randn(1, 4))
    assert hook.seen == ["1", "2.0", "2.1"]


def test_types_match_like_names_and_take_their_subclasses():
    net = network()
    hook = Names(modules=["torch.nn.Linear", "ReLU"])
    hook.attach(net)
    with hook.engaged():
        net(torch.randn(1, 4))
    assert hook.seen == ["0", "1", "2.0", "2.1"]


def test_an_observer_that_returns_something_is_told_how_to_become_a_transform():
    class Forgetful(Hook):
        def forward(self, name, module, inputs, output):
            return 2 * output

    hook, net = Forgetful(modules=["1"]), network()
    hook.attach(net, name="mine")
    with (
        hook.engaged(),
        pytest.raises(RunError, match=r"hooks.mine: Forgetful.forward returned a Tensor.*transforms = True"),
    ):
        net(torch.randn(1, 4))


class Gradients(Hook):
    """Everything in the backward, noted."""

    def __init__(self, **settings) -> None:
        super().__init__(**settings)
        self.of_outputs: dict[str, torch.Tensor] = {}
        self.of_inputs: dict[str, torch.Tensor] = {}
        self.of_parameters: dict[str, torch.Tensor] = {}

    def tensor_gradient(self, name, gradient):
        self.of_outputs[name] = gradient.clone()

    def full_backward(self, name, module, grad_inputs, grad_outputs):
        self.of_inputs[name] = grad_inputs[0].clone()

    def post_accumulate_grad(self, name, parameter):
        self.of_parameters[name] = parameter.grad.clone()


def test_gradients_at_modules_are_autograd_s_own_and_leave_no_trace():
    net, inputs = network(), torch.randn(5, 4)
    hook = Gradients(modules=["2"])
    hook.attach(net)
    with hook.engaged():
        hidden = net[1](net[0](inputs))
        output = net[2](hidden)
    loss = output.square().sum()
    loss.backward()
    hook.disengage()
    seen = dict(hook.of_outputs), dict(hook.of_inputs), dict(hook.of_parameters)
    net.zero_grad()
    hidden = net[1](net[0](inputs)).detach().requires_grad_()
    output = net[2](hidden)
    output.retain_grad()
    output.square().sum().backward()
    assert torch.equal(seen[0]["2"], output.grad)
    assert torch.equal(seen[1]["2"], hidden.grad)
    assert seen[2].keys() == {"2.0.weight", "2.0.bias", "2.1.weight", "2.1.bias"}
    assert torch.equal(seen[2]["2.1.weight"], net[2][1].weight.grad)
    assert (hook.of_outputs, hook.of_inputs, hook.of_parameters) == seen


class Halved(Hook):
    """Weights are saved halved, and doubled when they are loaded."""

    transforms = True

    def state_dict_save(self, name, module, state):
        return {key: value / 2 for key, value in state.items()}

    def state_dict_load(self, name, module, state):
        return {key: value * 2 for key, value in state.items()}


def test_state_dicts_can_be_watched_and_changed_on_the_way():
    net = network()
    hook = Halved(modules=["2.0"])
    hook.attach(net)
    state = net.state_dict()
    assert torch.equal(state["2.0.weight"], net[2][0].weight / 2)
    assert torch.equal(state["2.1.weight"], net[2][1].weight)
    before = {name: tensor.clone() for name, tensor in net.named_parameters()}
    net.load_state_dict(state)
    assert all(torch.equal(tensor, before[name]) for name, tensor in net.named_parameters())
    hook.detach()
    assert torch.equal(net.state_dict()["2.0.weight"], before["2.0.weight"])


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


def test_what_was_not_set_up_is_not_torn_down():
    class Once(Hook):
        def teardown(self):
            ended.append(self)

    ended: list[Hook] = []
    hook = Once()
    hook.detach()
    assert ended == []
    hook.attach(network())
    hook.detach()
    hook.detach()
    assert ended == [hook]
