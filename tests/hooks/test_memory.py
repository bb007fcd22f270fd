"""The hook memory: its four parts equal counts by hand and the tensors that stay alive; peaks of each phase."""

from __future__ import annotations

import gc
import resource
import sys
import weakref
from contextlib import nullcontext

import psutil
import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode

from exp.check.plan import read_resolved
from exp.construct import build_data, build_network, build_objective
from exp.hooks.memory import Memory, mebibytes
from exp.hooks.memory_use import HOST, AllocatedPeak, ResidentPeak
from exp.hooks.saved_tensors import storages
from exp.nested import tensors_in

MIB = 2**20
counted = pytest.mark.skipif(not HOST.can_restart, reason="only Linux can reset the peak of the resident set")


@pytest.fixture
def measure(step):
    """A function that measures one step of a network, and returns the bytes of each part."""

    def run(net, optimizer, inputs, hook=None, *, micro_batches: int = 1) -> dict[str, int]:
        hook, now = hook or Memory(), step(net, optimizers=[optimizer])
        for _ in range(micro_batches):
            with hook.around_forward(now):
                loss = net(inputs).square().sum()
            loss.backward()
        values = dict(hook.after_backward(now))
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        values |= hook.after_step(now)
        return {tag.removeprefix("memory/"): round(value * MIB) for tag, value in values.items()}

    return run


def plain_sgd(net: nn.Module) -> torch.optim.Optimizer:
    return torch.optim.SGD(net.parameters(), lr=0.1)


def test_the_four_parts_equal_a_count_by_hand(measure):
    net = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    values = measure(net, torch.optim.AdamW(net.parameters()), torch.randn(64, 64))
    parameters = 4 * (64 * 128 + 128 + 128 * 10 + 10)
    assert values["parameters_mib"] == parameters
    assert values["gradients_mib"] == parameters
    assert (
        values["optimizer_mib"] == 2 * parameters + 4 * 4
    )  # two moments, and the step counter of each of 4 parameters
    # Input, output of the ReLU (the ReLU and the next layer save the same storage), and the input of square().
    assert values["activations_mib"] == 4 * 64 * (64 + 128 + 10)
    assert measure(net, plain_sgd(net), torch.randn(64, 64))["optimizer_mib"] == 0


def test_tied_parameters_and_views_count_once():
    class Tied(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6, bias=False), nn.Linear(6, 6, bias=False)
            self.last.weight = self.first.weight

    assert mebibytes(Tied().parameters()) * MIB == 6 * 6 * 4
    whole = torch.zeros(100)
    assert list(storages([whole[:10], whole[50:], whole.view(10, 10).t()]).values()) == [400]


def test_frozen_parameters_have_no_gradients_and_state(measure):
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 1))
    net[0].requires_grad_(False)
    values = measure(net, torch.optim.Adam(net[1].parameters()), torch.randn(2, 8))
    assert values["parameters_mib"] == 4 * (72 + 9)
    assert values["gradients_mib"] == 4 * 9
    assert values["optimizer_mib"] == 4 * (2 * 9 + 2)


def test_buffers_are_no_activations(measure):
    net = nn.BatchNorm1d(16)
    values = measure(net, plain_sgd(net), torch.randn(8, 16, requires_grad=True))
    # Input, output (kept by square()), and mean and deviation of the batch.
    assert values["activations_mib"] == 4 * (2 * 8 * 16 + 2 * 16)


def test_a_batch_view_counts_its_own_part(step):
    net, hook = nn.Linear(4, 2), Memory()
    many = torch.randn(1000, 4)
    now = step(net, optimizers=[plain_sgd(net)])
    now.data = (many[:8], torch.zeros(8))
    with hook.around_forward(now):
        net(now.data[0]).sum()
    assert round(hook.after_step(now)["memory/activations_mib"] * MIB) == 4 * 8 * 4


def test_activations_are_those_of_the_largest_micro_batch(measure):
    net, hook = nn.Sequential(nn.Linear(4, 4), nn.ReLU()), Memory()
    large = measure(net, plain_sgd(net), torch.randn(32, 4), hook, micro_batches=3)["activations_mib"]
    small = measure(net, plain_sgd(net), torch.randn(8, 4), hook)["activations_mib"]
    assert (large, small) == (4 * 32 * 8, 4 * 8 * 8), "each step must start with a count of 0"


def test_the_resident_set_is_that_of_the_process(measure):
    net = nn.Linear(2, 2)
    values = measure(net, plain_sgd(net), torch.randn(1, 2), Memory(details=True))
    assert values["host_rss_mib"] == pytest.approx(psutil.Process().memory_info().rss, rel=0.1)


def test_measuring_does_not_keep_the_graph(step):
    net, hook = nn.Sequential(nn.Linear(4, 4), nn.Sigmoid()), Memory()
    with hook.around_forward(step(net, optimizers=[plain_sgd(net)])):
        output = net(torch.randn(2, 4))
    watched = weakref.ref(output)
    gc.disable()
    del output
    alive = watched() is not None
    gc.enable()
    assert not alive


# --- in runs ---


class Made(TorchDispatchMode):
    """Dispatch mode that records the storages that operators create by address, without keeping them alive."""

    def __init__(self) -> None:
        super().__init__()
        self.storages: dict[int, tuple[StorageWeakRef, int]] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        result = func(*args, **(kwargs or {}))
        for tensor in tensors_in(result):
            storage = tensor.untyped_storage()
            reference = StorageWeakRef(storage)
            self.storages[reference.cdata] = (reference, storage.nbytes())
        return result


def bytes_kept(network: nn.Module, objective: nn.Module, batch) -> int:
    """Return the bytes that the graph of a forward and the objective keeps alive, without the loss."""
    own = {tensor.untyped_storage()._cdata for tensor in (*network.parameters(), *network.buffers())}
    with Made() as made:
        # Copies are new storages, so that the batch counts if the graph keeps it.
        values = {"input": batch.data[0].clone(), "target": batch.data[1].clone()}
        values["output"] = network(values["input"])
        loss, _ = objective(values, batch)
        values.clear()
    gc.collect()
    own.add(loss.untyped_storage()._cdata)
    return sum(size for at, (reference, size) in made.storages.items() if at not in own and not reference.expired())


MODELS = ["mlp", "lenet", "resnet", "rnn", "transformer", "gpt"]


@pytest.mark.parametrize("model", [MODELS[0], *(pytest.param(one, marks=pytest.mark.slow) for one in MODELS[1:])])
def test_the_four_parts_of_a_run(fit, text, model: str) -> None:
    overrides = [f"model={model}", "hooks=[memory]", "trainer.max_steps=1", *(text if model == "gpt" else [])]
    run = fit(*overrides)
    found = {tag: round(steps[1] * MIB) for tag, steps in run.values.items() if tag.startswith("memory/")}
    settings = read_resolved(run.directory).settings
    data = build_data(settings)
    network = build_network(settings, data.spec)
    sizes = [parameter.numel() * 4 for parameter in network.parameters()]
    assert found["memory/parameters_mib"] == found["memory/gradients_mib"] == sum(sizes)
    # Two moments, and the step counter of each parameter.
    assert found["memory/optimizer_mib"] == 2 * sum(sizes) + 4 * len(sizes)
    kept = bytes_kept(network, build_objective(settings), next(iter(data.loader("train"))))
    assert found["memory/activations_mib"] == pytest.approx(kept, rel=0.02)


# --- peaks ---


@counted
def test_the_resident_peak_includes_freed_memory():
    gc.collect()
    HOST.restart()
    before = HOST.since_restart()
    large = torch.ones(32 * MIB)
    del large
    assert HOST.since_restart() - before == pytest.approx(128 * MIB, rel=0.1)
    HOST.restart()
    assert HOST.since_restart() - before < 64 * MIB
    assert HOST.so_far() - before > 96 * MIB


def peaks_of(step, hook=None, *, phases=("batch", "forward", "backward", "optimizer"), device="cpu", **settings):
    """Return the values of a step that allocates 256 MiB in the forward and 128 MiB after the backward."""
    net, hook = nn.Linear(2, 2), hook or Memory(details=True)
    now = step(net, device=torch.device(device), **settings)
    with hook.around_forward(now) or nullcontext():
        net(torch.ones(1, 2)).sum()
    for phase in phases:
        if phase in ("forward", "optimizer"):
            large = torch.ones((64 if phase == "forward" else 32) * MIB, device=device)
            del large
        hook.passed(phase, now)
    return hook.after_step(now)


def test_without_peak_counter_a_run_has_no_peaks(monkeypatch, caplog, step):
    monkeypatch.setattr("exp.hooks.memory_use.SWITCH", "/proc/self/status/none")
    peak = ResidentPeak()
    peak.forget()
    peak.restart()
    assert not peak.can_restart
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak.so_far() == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "linux":
        (warning,) = caplog.messages
        assert "memory/host_peak_* are not logged" in warning
    monkeypatch.setattr("exp.hooks.memory.HOST", peak)
    assert not any("host_peak" in tag for tag in peaks_of(step))


@counted
def test_each_phase_has_its_own_peak(step):
    hook = Memory(details=True)
    values = peaks_of(step, hook)
    forward, backward, own = (values[f"memory/host_peak_{phase}_mib"] for phase in ("forward", "backward", "step"))
    assert forward - backward == pytest.approx(256, rel=0.1)
    assert own - backward == pytest.approx(128, rel=0.1)
    assert not any("peak" in tag for tag in hook.after_step(step())), (
        "the next step must have no peaks before its first phase"
    )


@counted
def test_forward_and_backward_of_pipelines_share_a_peak(step):
    values = peaks_of(step, phases=("batch", "backward", "optimizer"))
    peaks = {tag for tag in values if "peak" in tag}
    assert peaks == {"memory/host_peak_forward_backward_mib", "memory/host_peak_step_mib"}


@pytest.mark.gpu
def test_cuda_has_peaks_and_fragmentation(step):
    kept = torch.ones(MIB, device="cuda:0")
    values = peaks_of(step, device="cuda:0")
    assert values["memory/allocated_mib"] >= kept.nbytes / MIB
    assert values["memory/peak_forward_mib"] - values["memory/peak_backward_mib"] == pytest.approx(256, abs=2)
    assert values["memory/peak_mib"] >= values["memory/peak_forward_mib"]
    assert 0.0 < values["memory/fragmentation"] < 1.0
    assert values["memory/reserved_mib"] >= values["memory/allocated_mib"]
    assert AllocatedPeak(0).since_restart() >= 0
