"""The largest use of memory: by phase, by rank, and over a whole run whose counter is set back in between."""

from __future__ import annotations

import gc
import os
import resource
import sys
from contextlib import nullcontext

import pytest
import torch
from torch import nn

import exp
from exp.errors import ConfigError
from exp.hooks.memory import Memory
from exp.hooks.memory_peaks import HOST, SWITCH, AllocatedPeak, Peak, ResidentPeak
from exp.hooks.step import Step

MIB = 2**20
counted = pytest.mark.skipif(not HOST.can_restart, reason="only Linux has a counter of the resident set to set back")
on_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="the CUDA allocator's counters need a GPU")


NET = nn.Linear(2, 2)
STEP = {"index": 1, "network": NET, "optimizers": [], "batch_size": 1, "device": torch.device("cpu")}


def _measured(step: Step, hook: Memory | None = None, *, boundaries=("batch", "forward", "backward", "optimizer")):
    hook = hook or Memory(details=True)
    with hook.around_forward(step) or nullcontext():
        NET(torch.ones(1, 2)).sum()
    for boundary in boundaries:
        hook.passed(boundary, step)
    return hook.after_step(step)


class Counted(Peak):
    """A counter that a test sets."""

    def __init__(self) -> None:
        super().__init__()
        self.used = self.largest = 0

    def use(self, size: int) -> None:
        self.used, self.largest = size, max(self.largest, size)

    def since_restart(self) -> int:
        return self.largest

    def _restart(self) -> None:
        self.largest = self.used


def test_what_was_largest_before_a_restart_is_not_forgotten():
    peak = Counted()
    peak.use(10)
    peak.use(2)
    peak.restart()
    assert (peak.since_restart(), peak.so_far()) == (2, 10)
    peak.use(5)
    assert (peak.since_restart(), peak.so_far()) == (5, 10)
    peak.forget()
    assert peak.so_far() == 5


@counted
def test_the_resident_peak_sees_what_was_freed_again():
    gc.collect()
    HOST.restart()
    before = HOST.since_restart()
    large = torch.ones(32 * MIB)
    del large
    assert HOST.since_restart() - before == pytest.approx(128 * MIB, rel=0.1)
    HOST.restart()
    assert HOST.since_restart() - before < 64 * MIB
    assert HOST.so_far() - before > 96 * MIB


@pytest.mark.parametrize(
    "refused", [PermissionError(13, "Permission denied", SWITCH), FileNotFoundError(2, "", SWITCH)]
)
def test_where_the_counter_cannot_be_set_back_a_run_goes_on_without(monkeypatch, caplog, refused):
    opened = os.open

    def open_others(path, *arguments, **options):
        if path == SWITCH:
            raise refused
        return opened(path, *arguments, **options)

    monkeypatch.setattr(os, "open", open_others)
    peak = ResidentPeak()
    peak.forget()
    peak.restart()
    assert not peak.can_restart
    unit = 1 if sys.platform == "darwin" else 1024
    assert peak.so_far() == unit * resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    if sys.platform == "linux":
        (told,) = caplog.messages
        assert SWITCH in told
        assert "memory/host_peak_* are left out" in told
    monkeypatch.setattr("exp.hooks.memory.HOST", peak)
    assert not any("host_peak" in tag for tag in _measured(Step(**STEP)))


@counted
def test_each_phase_has_its_own_peak():
    net, hook = nn.Linear(2, 2), Memory(details=True)
    step = Step(index=1, network=net, optimizers=[], batch_size=1, device=torch.device("cpu"))
    hook.passed("batch", step)
    large = torch.ones(64 * MIB)
    del large
    hook.passed("forward", step)
    hook.passed("backward", step)
    large = torch.ones(32 * MIB)
    del large
    hook.passed("optimizer", step)
    values = hook.after_step(step)
    forward, backward, own = (values[f"memory/host_peak_{phase}_mib"] for phase in ("forward", "backward", "step"))
    assert forward - backward == pytest.approx(256, rel=0.1)
    assert own - backward == pytest.approx(128, rel=0.1)
    # The next step begins anew.
    assert not any("peak" in tag for tag in hook.after_step(step))


@counted
def test_a_pipeline_s_forward_and_backward_are_one_phase():
    hook = Memory(details=True)
    values = _measured(Step(**STEP), hook, boundaries=("batch", "backward", "optimizer"))
    assert {tag for tag in values if "peak" in tag} == {
        "memory/host_peak_forward_backward_mib",
        "memory/host_peak_step_mib",
    }
    assert "memory/host_peak_forward_mib" in _measured(Step(**STEP), hook)


def test_what_lies_in_a_cuda_graph_is_left_out_and_said_once(caplog):
    caplog.set_level("INFO", "exp.hooks.memory")
    hook = Memory(details=True)
    for _ in range(2):
        values = _measured(Step(**STEP, is_graphed=True), hook)
        assert "memory/activations_mib" not in values
        assert "memory/parameters_mib" in values
    assert len(caplog.messages) == 1
    assert "memory/activations_mib" in caplog.messages[0]


@on_cuda
def test_cuda_has_its_own_counters_and_the_share_that_is_reserved_for_nothing():
    net = nn.Linear(2, 2).cuda()
    step = Step(index=1, network=net, optimizers=[], batch_size=1, device=torch.device("cuda", 0))
    hook = Memory(details=True)
    hook.passed("batch", step)
    large = torch.ones(64 * MIB, device="cuda")
    del large
    hook.passed("forward", step)
    hook.passed("backward", step)
    hook.passed("optimizer", step)
    values = hook.after_step(step)
    assert values["memory/peak_forward_mib"] - values["memory/peak_backward_mib"] == pytest.approx(256, abs=2)
    assert values["memory/peak_mib"] >= values["memory/peak_forward_mib"]
    assert 0.0 < values["memory/fragmentation"] < 1.0
    assert values["memory/reserved_mib"] >= values["memory/allocated_mib"]
    assert AllocatedPeak(0).since_restart() >= 0


def test_over_ranks_there_are_the_smallest_the_mean_and_the_largest(ranks):
    values = ranks.train(
        *(
            "model=transformer",
            "strategy=fsdp",
            "hooks=[memory]",
            "hooks.memory.details=true",
            "hooks.memory.every_n_steps=1",
            "metrics=[]",
        ),
        *("trainer.max_epochs=null", "trainer.max_steps=2", "trainer.limit_val_batches=0", "test=false"),
        *("monitor=loss/train", "launch.accelerator=cpu"),
        ranks=2,
    ).values
    tags = {tag for tag in values if tag.startswith("memory/")}
    plain = {tag for tag in tags if tag.count("/") == 1}
    parts = {f"memory/{part}_mib" for part in ("parameters", "gradients", "optimizer", "activations", "host_rss")}
    assert parts <= plain
    assert tags - plain == {f"{tag}/{word}" for tag in plain for word in ("min", "mean", "max")}
    for tag in plain:
        for step in (1, 2):
            least, mean, most = (values[f"{tag}/{word}"][step] for word in ("min", "mean", "max"))
            assert 0 < least <= mean <= most
            # The plain tag is the first rank's.
            assert least <= values[tag][step] <= most
            assert mean == pytest.approx((least + most) / 2)


def test_stages_of_a_pipeline_have_what_they_hold(ranks):
    values = ranks.train(
        *(
            "model=transformer",
            "strategy=pipeline",
            "launch.devices=2",
            "hooks=[memory]",
            "hooks.memory.details=true",
            "metrics=[]",
        ),
        *("trainer.max_epochs=null", "trainer.max_steps=1", "trainer.limit_val_batches=0", "test=false"),
        *("monitor=loss/train", "launch.accelerator=cpu"),
        ranks=2,
    ).values
    found = {tag: steps[1] for tag, steps in values.items() if tag.startswith("memory/")}
    whole = sum(parameter.numel() * 4 for parameter in _transformer().parameters()) / MIB
    assert found["memory/parameters_mib/min"] < found["memory/parameters_mib/max"]
    assert 2 * found["memory/parameters_mib/mean"] == pytest.approx(whole)
    assert all(value == value for value in found.values()), "a tag that no rank has is left out"
    assert not any("peak_forward_mib" in tag or "peak_backward_mib" in tag for tag in found)


def _transformer() -> nn.Module:
    from exp.construct import build_data, build_network, plain_config

    plain = plain_config(exp.compose(["model=transformer"]))
    return build_network(plain, build_data(plain).spec)


def test_a_history_without_the_cuda_allocator_is_refused():
    overrides = ["launch.accelerator=cpu", "hooks=[memory]", "hooks.memory.record_history=true"]
    with pytest.raises(ConfigError, match=r"hooks.memory.record_history: true on cpu; expected false: only the CUDA"):
        exp.validate(exp.compose(overrides))
