"""The hook throughput: time of a step without pauses, parts of this time, and share of the peak FLOPs."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

import exp
from exp.hooks.throughput import PARTS, TOGETHER, StepTimer, Throughput, tokens_in_a_sample
from exp.hooks.utilisation import Workload
from exp.models.flop_count import FlopCount

PARTS_MS = [f"throughput/{part}_ms" for part in PARTS]


@pytest.fixture
def loop(monkeypatch, step):
    """A function that returns a Loop with a clock that the test sets."""
    monkeypatch.setattr(time, "perf_counter", lambda: Loop.now)
    return lambda data=None, **settings: Loop(Throughput(**settings), step, data=data)


class Loop:
    """Training loop without training, which calls the hook as the engine does."""

    now = 100.0

    def __init__(self, hook: Throughput, step, *, data=None) -> None:
        self.hook, self.make_step, self.data = hook, step, data
        self.index = self.samples = 0
        self.waited = 0.0
        self.called: list[int] = []
        self.logged: dict[int, dict] = {}

    def pause(self, seconds: float) -> None:
        self.hook.pause()
        Loop.now += seconds

    def step(self, *, size=64, wait=0.001, forward=0.003, backward=0.004, optimizer=0.002, rest=0.0, micro=1):
        self.index += 1
        due = self.hook.due(self.index)
        step = self.make_step(index=self.index, batch_size=size)
        step.data = self.data
        self.samples += size
        for _ in range(micro):
            Loop.now += wait
            self.waited += wait
            step.samples_seen, step.seconds_waited = self.samples, self.waited
            for boundary, seconds in (("batch", 0.0), ("forward", forward), ("backward", backward)):
                Loop.now += seconds or 0.0
                if due and seconds is not None:
                    self.hook.passed(boundary, step)
        Loop.now += optimizer
        if due:
            self.called.append(self.index)
            self.hook.passed("optimizer", step)
            if values := self.hook.after_step(step):
                self.logged[self.index] = values
        Loop.now += rest

    def steps(self, count: int) -> Loop:
        for _ in range(count):
            self.step()
        return self


def test_values_are_means_since_the_last_ones(loop):
    found = loop(every_n_steps=4)
    for size in (64, 64, 64, 32):
        found.step(size=size)
    for size in (64, 64, 64, 16):
        found.step(size=size, forward=0.013)
    assert list(found.logged) == [4, 8]
    first, second = found.logged.values()
    assert first["throughput/step_ms"] == pytest.approx(10)  # steps 2 to 4, because the start of step 1 is unknown
    assert first["throughput/samples_per_second"] == pytest.approx((64 + 64 + 32) / 0.030)
    assert second["throughput/step_ms"] == pytest.approx(20)
    assert second["throughput/samples_per_second"] == pytest.approx((64 + 64 + 64 + 16) / 0.080)


def test_pauses_and_their_steps_do_not_count(loop):
    between = loop(every_n_steps=6).steps(2)
    between.pause(15)
    between.pause(15)
    between.step(size=7)
    between.steps(3)
    inside = loop(every_n_steps=4).steps(3)
    assert inside.hook.due(4)
    inside.pause(30)  # as for a checkpoint that is written after the batch is loaded
    inside.step(size=1)
    for values in (between.logged[6], inside.logged[4]):
        assert values["throughput/step_ms"] == pytest.approx(10)
        assert values["throughput/samples_per_second"] == pytest.approx(6400)
    early = loop(every_n_steps=4).steps(2)
    early.hook.pause()
    early.steps(2)
    assert "throughput/step_ms" in early.logged[4]
    assert not set(PARTS_MS) & set(early.logged[4]), "a step with a pause must have no parts"


def test_the_hook_runs_at_three_of_fifty_steps(loop):
    found = loop().steps(120)
    assert found.called == [1, 44, 45, 50, 94, 95, 100]
    assert list(found.logged) == [50, 100]
    resumed = loop()
    resumed.index = 70
    assert resumed.steps(1).called == [71]
    assert loop(every_n_steps=1).steps(1).logged == {}, "the first step has no beginning"


def test_the_split_step_is_before_the_due_one(loop):
    found = loop(every_n_steps=4, each_part=True).steps(2)
    found.step(wait=0.006, forward=0.005, backward=0.007, optimizer=0.001)
    found.step(wait=1, forward=1, backward=1, optimizer=1)  # other hooks need time at every fourth step
    assert [found.logged[4][tag] for tag in PARTS_MS] == pytest.approx([6, 5, 7, 1, 0])


@pytest.mark.parametrize(
    ("forward", "parts", "times"),
    [
        (0.005, list(PARTS), [18, 15, 21, 1, 30]),
        # A pipeline alternates forward and backward, so they have one common time.
        (None, ["data", TOGETHER, "optimizer", "rest"], [18, 21, 1, 30]),
    ],
)
def test_parts_of_micro_batches_sum_to_the_step(loop, forward, parts, times):
    found = loop(every_n_steps=2, each_part=True)
    found.step(rest=0.030)
    found.step(wait=0.006, forward=forward, backward=0.007, optimizer=0.001, micro=3)
    values = {tag: value for tag, value in found.logged[2].items() if tag.endswith("_ms")}
    total = values.pop("throughput/step_ms")
    values.pop("throughput/part_ms", None)
    assert values == pytest.approx({f"throughput/{part}_ms": time for part, time in zip(parts, times, strict=True)})
    assert sum(values.values()) == pytest.approx(total)


@pytest.mark.parametrize(
    ("data", "tokens"),
    [
        ((torch.zeros(3, 7, dtype=torch.long), torch.zeros(3)), 7),
        ({"input": torch.zeros(3, 7, dtype=torch.int32), "target": torch.zeros(3)}, 7),
        ((torch.zeros(3, 7), torch.zeros(3)), None),
        ((torch.zeros(3, 1, 8, 8, dtype=torch.uint8), torch.zeros(3)), None),
        ((torch.zeros(3, 7, dtype=torch.bool), torch.zeros(3)), None),
        ({"left": torch.zeros(3, 7, dtype=torch.long), "mask": torch.ones(3, 7)}, 7),
        ({"target": torch.zeros(3, 7, dtype=torch.long)}, None),
    ],
)
def test_tokens_are_integers_in_two_dimensions(data, tokens):
    assert tokens_in_a_sample(data) == tokens


def workload(**more) -> Workload:
    count = FlopCount(forward=2e6, backward=4e6, by_operator={"mm": 6e6})
    return Workload(**{"precision": "fp32", "devices": 3, "flops": lambda data: count, **more})


def test_mfu_is_relative_to_all_devices(loop):
    found = loop(every_n_steps=2, peak_flops=1e11, workload=workload()).steps(4)
    for values in found.logged.values():
        assert values["throughput/mfu"] == pytest.approx(6400 * 6e6 / 3e11)
    assert "| a sample, in a step | 6e+06 |" in found.logged[2]["throughput/flops"].markdown
    assert "throughput/flops" not in found.logged[4]


def test_the_time_of_counting_flops_does_not_count(loop):
    def slowly(data):
        Loop.now += 60
        return FlopCount(forward=1.0, backward=2.0, by_operator={})

    found = loop(every_n_steps=1, each_part=True, peak_flops=1e11, workload=workload(flops=slowly)).steps(3)
    for values in found.logged.values():
        assert values["throughput/step_ms"] == pytest.approx(10)
        assert sum(values[tag] for tag in PARTS_MS) == pytest.approx(10)


def test_uncountable_flops_warn_once_and_can_be_given(loop, caplog):
    def fails(data):
        raise NotImplementedError("no numbers\nand more")

    settings = {"every_n_steps": 1, "workload": workload(flops=fails)}
    with caplog.at_level(logging.WARNING):
        found = loop(peak_flops=1e11, **settings).steps(4)
    assert all("throughput/mfu" not in values for values in found.logged.values())
    assert caplog.messages == [
        "throughput/mfu is not logged: the FLOPs of a step could not be counted on the meta device "
        "(NotImplementedError: no numbers). Write the FLOPs of a sample in hooks.throughput.flops_per_sample"
    ]
    given = loop(peak_flops=1e11, flops_per_sample=9e6, **settings).steps(2)
    assert given.logged[2]["throughput/mfu"] == pytest.approx(6400 * 9e6 / 3e11)
    assert "throughput/mfu" not in loop(every_n_steps=1, workload=workload()).steps(2).logged[2], "a CPU has no peak"


# --- runs ---

EVERY_STEP = ["hooks=[throughput]", "hooks.throughput.each_part=true", "hooks.throughput.every_n_steps=1"]
ACCUMULATED = ["trainer.accumulate_grad_batches=3"]


@pytest.mark.parametrize(
    "more",
    [
        ["precision=fp16", "checkpoint.every_n_steps=5", *ACCUMULATED],
        *(
            pytest.param(one, marks=pytest.mark.slow)
            for one in (
                [],
                ["runtime.steps_per_execution=1"],
                ["experiment=gan", "monitor=loss/val/generator", "trainer.limit_val_batches=1"],
            )
        ),
    ],
)
def test_parts_of_every_step_sum_to_its_time(fit, more):
    values = fit(*EVERY_STEP, "trainer.max_steps=12", *more).values
    times = values["throughput/step_ms"]
    assert len(times) > 6
    assert 1 not in times
    for step, taken in times.items():
        assert sum(values[tag][step] for tag in PARTS_MS) == pytest.approx(taken, rel=1e-9)
        assert min(values[tag][step] for tag in PARTS_MS) >= 0
        assert min(values[f"throughput/{part}_ms"][step] for part in ("forward", "backward", "optimizer")) > 0


def test_a_run_logs_mfu_and_tokens(fit, text, reference):
    options = ["hooks=[throughput]", "hooks.throughput.every_n_steps=2", "hooks.throughput.peak_flops=1e12"]
    run = [*text, "data.batch_size=8", "trainer.max_steps=4", *options]
    values = fit(*run).values
    weights = sum(one.weight.numel() for one in reference(*run)[0].modules() if isinstance(one, nn.Linear))
    layers, width, block = 2, exp.compose(run).model.constants.width, 64
    flops = block * (6 * weights + 12 * layers * width * block)  # see test_flops.py
    for step, rate in values["throughput/samples_per_second"].items():
        assert values["throughput/tokens_per_second"][step] == pytest.approx(rate * block)
        assert values["throughput/mfu"][step] == pytest.approx(rate * flops / 1e12)


@pytest.mark.gpu
def test_on_cuda_parts_are_times_of_the_device():
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)
    matrix = matrix @ matrix / 4096  # loads cuBLAS before the measurement
    torch.cuda.synchronize()
    split = StepTimer(device, time.perf_counter(), waited=0.0)
    for name, products in (("batch", 0), ("forward", 2), ("backward", 4), ("optimizer", 1)):
        for _ in range(products):
            matrix = matrix @ matrix / 4096
        split.mark(name)
    split.end(time.perf_counter(), waited=0.0)
    torch.cuda.synchronize()
    assert split.is_known
    found = split.milliseconds()
    assert found["backward"] > found["forward"] > found["optimizer"] > 0
