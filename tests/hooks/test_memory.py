"""The four parts of memory against counts by hand, in bytes."""

from __future__ import annotations

import gc
import weakref

import psutil
import pytest
import torch
from torch import nn

from exp.hooks.memory import Memory, mebibytes
from exp.hooks.saved_tensors import storages
from exp.hooks.step import Step

MIB = 2**20


def step(net: nn.Module, optimizer: torch.optim.Optimizer) -> Step:
    return Step(index=1, network=net, optimizers=[optimizer], batch_size=64, device=torch.device("cpu"))


def one_step(net, optimizer, inputs, hook, *, micro_batches: int = 1) -> dict[str, float]:
    now = step(net, optimizer)
    for _ in range(micro_batches):
        with hook.around_forward(now):
            loss = net(inputs).square().sum()
        loss.backward()
    values = dict(hook.after_backward(now))
    optimizer.step()
    optimizer.zero_grad(set_to_none=True)
    return values | hook.after_step(now)


def in_bytes(values: dict[str, float]) -> dict[str, int]:
    return {tag.removeprefix("memory/"): round(value * MIB) for tag, value in values.items()}


def test_four_parts_of_an_mlp_equal_the_count_by_hand():
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    values = in_bytes(one_step(net, torch.optim.AdamW(net.parameters()), torch.randn(64, 64), Memory()))
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert values["parameters_mib"] == parameters
    assert values["gradients_mib"] == parameters
    assert values["optimizer_mib"] == 2 * parameters + 4 * 4  # two moments, and the step of each of 4 parameters
    # the input, the ReLU's output (saved by it and by the next layer: one storage), and what square() keeps
    assert values["activations_mib"] == 4 * 64 * (64 + 128 + 10)


def test_momentum_free_sgd_keeps_nothing():
    net = nn.Linear(3, 2)
    values = in_bytes(one_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(5, 3), Memory()))
    assert values["optimizer_mib"] == 0


def test_tied_parameters_and_views_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.last.weight = self.first.weight

    assert mebibytes(Tied().parameters()) * MIB == 6 * 6 * 4
    whole = torch.zeros(100)
    assert list(storages([whole[:10], whole[50:], whole.view(10, 10).t()]).values()) == [400]


def test_frozen_parameters_have_no_gradients_and_no_state():
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    net[0].requires_grad_(False)
    trained = [parameter for parameter in net.parameters() if parameter.requires_grad]
    values = in_bytes(one_step(net, torch.optim.Adam(trained), torch.randn(2, 8), Memory()))
    assert values["parameters_mib"] == 4 * (72 + 9)
    assert values["gradients_mib"] == 4 * 9
    assert values["optimizer_mib"] == 4 * (2 * 9 + 2)


def test_buffers_are_no_activations():
    net = nn.BatchNorm1d(16)
    inputs = torch.randn(8, 16, requires_grad=True)
    expected: dict[int, int] = {}
    excluded = set(storages([*net.parameters(), *net.buffers()]))

    def keep(tensor):
        if tensor.untyped_storage().data_ptr() not in excluded:
            expected.update(storages([tensor]))
        return tensor.detach()

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        net(inputs).square().sum()
    values = in_bytes(one_step(net, torch.optim.SGD(net.parameters(), lr=0.1), inputs, Memory()))
    assert values["activations_mib"] == sum(expected.values()) == 4 * (2 * 8 * 16 + 2 * 16)


def test_a_batch_that_is_a_view_of_many_counts_for_its_own_part():
    net, hook = nn.Linear(4, 2), Memory()
    many = torch.randn(1000, 4)
    now = step(net, torch.optim.SGD(net.parameters(), lr=0.1))
    now.data = (many[:8], torch.zeros(8))
    with hook.around_forward(now):
        net(now.data[0]).sum()
    assert in_bytes(hook.after_step(now))["activations_mib"] == 4 * 8 * 4


def test_activations_are_the_largest_micro_batch_s_and_start_anew_each_step():
    net, hook = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Memory()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    large = in_bytes(one_step(net, optimizer, torch.randn(32, 4), hook, micro_batches=3))["activations_mib"]
    small = in_bytes(one_step(net, optimizer, torch.randn(8, 4), hook))["activations_mib"]
    assert (large, small) == (4 * 32 * 8, 4 * 8 * 8)


def test_the_resident_set_is_the_process_s():
    net = nn.Linear(2, 2)
    values = one_step(net, torch.optim.SGD(net.parameters(), lr=0.1), torch.randn(1, 2), Memory(details=True))
    assert values["memory/host_rss_mib"] == pytest.approx(psutil.Process().memory_info().rss / MIB, rel=0.1)


def test_the_measured_graph_is_freed():
    net, hook = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), Memory()
    optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
    with hook.around_forward(step(net, optimizer)):
        output = net(torch.randn(2, 4))
    watched = weakref.ref(output)
    gc.disable()
    del output
    alive = watched() is not None
    gc.enable()
    assert not alive


def test_the_losses_of_a_measured_run_are_those_of_an_unmeasured_one_bit_for_bit():
    def losses(measured: bool) -> list[float]:
        torch.manual_seed(0)
        net = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Dropout(0.2), nn.Linear(16, 2))
        optimizer, hook, seen = torch.optim.AdamW(net.parameters(), lr=0.01), Memory(every_n_steps=1), []
        for _ in range(20):
            inputs = torch.randn(16, 8)
            if measured:
                with hook.around_forward(step(net, optimizer)):
                    loss = net(inputs).square().mean()
            else:
                loss = net(inputs).square().mean()
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            seen.append(loss.item())
        return seen

    assert losses(True) == losses(False)
