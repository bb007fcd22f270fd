"""Throughput: the time between steps and no pause, where it goes, and what share of the peak it makes."""

from __future__ import annotations

import logging
import time

import pytest
import torch
from torch import nn

import exp
from exp.hooks.step import Step
from exp.hooks.throughput import PARTS, TOGETHER, StepTimer, Throughput, tokens_in_a_sample
from exp.hooks.utilisation import Workload
from exp.models.flop_count import FlopCount

PARTS_MS = [f"throughput/{part}_ms" for part in PARTS]


@pytest.fixture
def clock(monkeypatch):
    """A clock that the test turns itself."""

    class Clock:
        now = 100.0

    monkeypatch.setattr(time, "perf_counter", lambda: Clock.now)
    return Clock


class Loop:
    """Steps as the engine makes them: a hook is called where it is due."""

    def __init__(self, hook: Throughput, clock, *, data=None) -> None:
        self.hook, self.clock, self.data = hook, clock, data
        self.index = self.samples = 0
        self.waited = 0.0
        self.called: list[int] = []
        self.logged: dict[int, dict] = {}

    def step(self, *, size=64, wait=0.001, forward=0.003, backward=0.004, optimizer=0.002, rest=0.0, micro=1):
        self.index += 1
        due = self.hook.due(self.index)
        step = Step(index=self.index, network=nn.Identity(), optimizers=[], batch_size=size, device=torch.device("cpu"))
        step.data = self.data
        self.samples += size
        for _ in range(micro):
            self.clock.now += wait
            self.waited += wait
            step.samples_seen, step.seconds_waited = self.samples, self.waited
            for boundary, seconds in (("batch", 0.0), ("forward", forward), ("backward", backward)):
                self.clock.now += seconds or 0.0
                if due and seconds is not None:
                    self.hook.passed(boundary, step)
        self.clock.now += optimizer
        if due:
            self.called.append(self.index)
            self.hook.passed("optimizer", step)
            if values := self.hook.after_step(step):
                self.logged[self.index] = values
        self.clock.now += rest


def test_means_are_over_the_steps_since_the_last_value(clock):
    loop = Loop(Throughput(every_n_steps=4), clock)
    for size in (64, 64, 64, 32):
        loop.step(size=size)
    for size in (64, 64, 64, 16):
        loop.step(size=size, forward=0.013)
    assert list(loop.logged) == [4, 8]
    first, second = loop.logged.values()
    assert first["throughput/step_ms"] == pytest.approx(10)  # steps 2 to 4: the first has no beginning
    assert first["throughput/samples_per_second"] == pytest.approx((64 + 64 + 32) / 0.030)
    assert second["throughput/step_ms"] == pytest.approx(20)
    assert second["throughput/samples_per_second"] == pytest.approx((64 + 64 + 64 + 16) / 0.080)


def test_a_pause_and_the_step_behind_it_are_nobody_s_time(clock):
    loop = Loop(Throughput(every_n_steps=6), clock)
    loop.step()
    loop.step()
    loop.hook.pause()
    clock.now += 15
    loop.hook.pause()
    clock.now += 15
    loop.step(size=7)
    for _ in range(3):
        loop.step()
    assert loop.logged[6]["throughput/step_ms"] == pytest.approx(10)
    assert loop.logged[6]["throughput/samples_per_second"] == pytest.approx(6400)


def test_a_pause_inside_a_step_takes_that_step_out(clock):
    """A checkpoint is written when the batch is there already."""
    loop = Loop(Throughput(every_n_steps=4), clock)
    for _ in range(3):
        loop.step()
    assert loop.hook.due(4)
    loop.hook.pause()
    clock.now += 30
    loop.step(size=1)
    assert loop.logged[4]["throughput/step_ms"] == pytest.approx(10)
    assert loop.logged[4]["throughput/samples_per_second"] == pytest.approx(6400)


def test_it_is_called_at_three_steps_of_fifty(clock):
    loop = Loop(Throughput(), clock)
    for _ in range(120):
        loop.step()
    assert loop.called == [1, 44, 45, 50, 94, 95, 100]
    assert list(loop.logged) == [50, 100]


def test_a_run_that_goes_on_starts_its_clock_at_its_first_step(clock):
    loop = Loop(Throughput(), clock)
    loop.index = 70
    loop.step()
    assert loop.called == [71]


def test_a_step_that_has_nothing_to_compare_with_logs_nothing(clock):
    loop = Loop(Throughput(every_n_steps=1), clock)
    loop.step()
    assert loop.logged == {}


def test_the_parts_are_those_of_a_step_before_the_due_one(clock):
    loop = Loop(Throughput(every_n_steps=4, each_part=True), clock)
    for _ in range(2):
        loop.step()
    loop.step(wait=0.006, forward=0.005, backward=0.007, optimizer=0.001)
    loop.step(wait=1, forward=1, backward=1, optimizer=1)  # where hooks that are due at every fourth step are
    assert [loop.logged[4][tag] for tag in PARTS_MS] == pytest.approx([6, 5, 7, 1, 0])


def test_the_parts_of_accumulated_batches_are_added_up_and_the_rest_is_what_is_left(clock):
    loop = Loop(Throughput(every_n_steps=2, each_part=True), clock)
    loop.step(rest=0.030)
    loop.step(wait=0.006, forward=0.005, backward=0.007, optimizer=0.001, micro=3)
    found = loop.logged[2]
    assert [found[tag] for tag in PARTS_MS] == pytest.approx([18, 15, 21, 1, 30])
    assert sum(found[tag] for tag in PARTS_MS) == pytest.approx(found["throughput/step_ms"])


def test_a_pipeline_s_forward_and_backward_are_one_part(clock):
    """Its schedule runs them by turns, so that no forward is marked."""
    loop = Loop(Throughput(every_n_steps=2, each_part=True), clock)
    loop.step(rest=0.030)
    loop.step(wait=0.006, forward=None, backward=0.007, optimizer=0.001, micro=3)
    found = loop.logged[2]
    parts = [found[f"throughput/{part}_ms"] for part in ("data", TOGETHER, "optimizer", "rest")]
    assert parts == pytest.approx([18, 21, 1, 30])
    assert sum(parts) == pytest.approx(found["throughput/step_ms"])
    assert not {"throughput/forward_ms", "throughput/backward_ms"} & found.keys()


def test_a_pause_leaves_out_the_parts_of_its_step(clock):
    loop = Loop(Throughput(every_n_steps=4), clock)
    for _ in range(2):
        loop.step()
    loop.hook.pause()
    loop.step()
    loop.step()
    assert "throughput/step_ms" in loop.logged[4]
    assert not set(PARTS_MS) & set(loop.logged[4])


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
def test_tokens_are_whole_numbers_in_two_dimensions(data, tokens):
    assert tokens_in_a_sample(data) == tokens


def workload(**more) -> Workload:
    count = FlopCount(forward=2e6, backward=4e6, by_operator={"mm": 6e6})
    return Workload(**{"precision": "fp32", "devices": 3, "flops": lambda data: count, **more})


def test_utilisation_is_flops_a_second_over_the_peak_of_all_devices(clock):
    loop = Loop(Throughput(every_n_steps=2, peak_flops=1e11, workload=workload()), clock)
    for _ in range(4):
        loop.step()
    for values in loop.logged.values():
        assert values["throughput/mfu"] == pytest.approx(6400 * 6e6 / 3e11)
    assert "| a sample, in a step | 6e+06 |" in loop.logged[2]["throughput/flops"].markdown
    assert "throughput/flops" not in loop.logged[4]


def test_the_time_of_counting_is_in_no_step(clock):
    def slowly(data):
        clock.now += 60
        return FlopCount(forward=1.0, backward=2.0, by_operator={})

    loop = Loop(Throughput(every_n_steps=1, each_part=True, peak_flops=1e11, workload=workload(flops=slowly)), clock)
    for _ in range(3):
        loop.step()
    for values in loop.logged.values():
        assert values["throughput/step_ms"] == pytest.approx(10)
        assert sum(values[tag] for tag in PARTS_MS) == pytest.approx(10)


def test_flops_that_cannot_be_counted_are_said_once_and_can_be_given(clock, caplog):
    def fails(data):
        raise NotImplementedError("no numbers\nand more")

    with caplog.at_level(logging.WARNING):
        loop = Loop(Throughput(every_n_steps=1, peak_flops=1e11, workload=workload(flops=fails)), clock)
        for _ in range(4):
            loop.step()
    assert all("throughput/mfu" not in values for values in loop.logged.values())
    assert [record.getMessage() for record in caplog.records] == [
        "throughput/mfu is not logged: the FLOPs of a step could not be counted without numbers (NotImplementedError: "
        "no numbers). Write hooks.throughput.flops_per_sample"
    ]
    loop = Loop(
        Throughput(every_n_steps=1, peak_flops=1e11, flops_per_sample=9e6, workload=workload(flops=fails)), clock
    )
    loop.step()
    loop.step()
    assert loop.logged[2]["throughput/mfu"] == pytest.approx(6400 * 9e6 / 3e11)


def test_a_cpu_has_no_peak_unless_it_is_measured(clock, caplog):
    with caplog.at_level(logging.WARNING):
        loop = Loop(Throughput(every_n_steps=1, workload=workload()), clock)
        loop.step()
        loop.step()
    assert not caplog.records
    assert "throughput/mfu" not in loop.logged[2]


@pytest.mark.parametrize("name", ["peak_flops", "flops_per_sample"])
def test_a_peak_of_nothing_is_refused(name):
    with pytest.raises(exp.ConfigError, match=rf"hooks\.throughput\.{name}: 0; expected a number above 0"):
        exp.validate(exp.compose([f"hooks.throughput.{name}=0"]))


# --- real runs ---


def run(directory, *overrides: str) -> dict[str, dict[int, float]]:
    """The values of a run in this process, by tag and step."""
    given = ["logger=[csv]", "trainer.enable_progress_bar=false", "test=false", f"hydra.run.dir={directory}"]
    exp.fit(exp.compose([*given, *overrides]))
    found: dict[str, dict[int, float]] = {}
    for row in read_rows(directory):
        for tag, value in row.items():
            if tag not in ("step", "epoch") and value not in ("", None):
                found.setdefault(tag, {})[int(row["step"])] = float(value)
    return found


def read_rows(directory):
    import csv

    with (directory / "metrics.csv").open() as file:
        return list(csv.DictReader(file))


@pytest.fixture(autouse=True)
def in_tmp(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)


EVERY_STEP = [
    "hooks=[throughput]",
    "hooks.throughput.each_part=true",
    "hooks.throughput.every_n_steps=1",
    "trainer.max_steps=24",
]


@pytest.mark.parametrize(
    "more",
    [
        [],
        ["trainer.accumulate_grad_batches=3"],
        ["runtime.steps_per_execution=1"],
        ["precision=fp16", "checkpoint.every_n_steps=5"],
    ],
)
def test_the_parts_of_every_step_sum_to_its_time(tmp_path, more):
    values = run(tmp_path / "run", *EVERY_STEP, *more)
    times = values["throughput/step_ms"]
    assert len(times) > 12
    assert 1 not in times
    for tag in PARTS_MS:
        assert values[tag].keys() == times.keys()
        assert all(value >= 0 for value in values[tag].values())
    for step, taken in times.items():
        assert sum(values[tag][step] for tag in PARTS_MS) == pytest.approx(taken, rel=1e-9)
        assert min(values[f"throughput/{part}_ms"][step] for part in ("forward", "backward", "optimizer")) > 0


def test_phases_have_parts_too(tmp_path):
    values = run(tmp_path / "run", "experiment=gan", *EVERY_STEP)
    for step, taken in values["throughput/step_ms"].items():
        assert sum(values[tag][step] for tag in PARTS_MS) == pytest.approx(taken, rel=1e-9)
        assert min(values[f"throughput/{part}_ms"][step] for part in ("forward", "backward", "optimizer")) > 0


def test_utilisation_of_a_run_and_its_tokens(tmp_path):
    limits = ["data.batch_size=8", "trainer.max_steps=4", "trainer.limit_val_batches=1"]
    options = ["hooks=[throughput]", "hooks.throughput.every_n_steps=2", "hooks.throughput.peak_flops=1e12"]
    values = run(tmp_path / "run", "data=text", *limits, *options)
    block = 64
    for step, rate in values["throughput/samples_per_second"].items():
        assert values["throughput/tokens_per_second"][step] == pytest.approx(rate * block)
        # The FLOPs of this model are held to a formula in test_flops.py.
        assert values["throughput/mfu"][step] == pytest.approx(rate * 47_210_496 / 1e12)


def test_measuring_changes_no_loss(tmp_path):
    given = ["trainer.max_steps=12", "model=lenet", "model.layers.relu1={_target_: torch.nn.Dropout}"]
    without = run(tmp_path / "without", *given, "hooks=[]")["loss/train"]
    measured = ["hooks=[throughput]", "hooks.throughput.every_n_steps=3", "hooks.throughput.peak_flops=measured"]
    with_it = run(tmp_path / "with", *given, *measured)
    assert with_it["loss/train"] == without
    assert with_it["throughput/mfu"]
    assert all(share > 0 for share in with_it["throughput/mfu"].values())


def test_two_ranks_are_two_devices(ranks):
    given = [*EVERY_STEP, "hooks.throughput.every_n_steps=2", "trainer.max_steps=6"]
    peak = ["hooks.throughput.peak_flops=1e12", "hooks.throughput.flops_per_sample=1e6"]
    values = ranks.train("strategy=ddp", *given, *peak, ranks=2).values
    for step, rate in values["throughput/samples_per_second"].items():
        assert values["throughput/mfu"][step] == pytest.approx(rate * 1e6 / 2e12)
        assert sum(values[tag][step] for tag in PARTS_MS) > 0


@pytest.mark.skipif(not torch.cuda.is_available(), reason="events of a CUDA device need one")
def test_on_cuda_the_device_s_own_clock_counts():
    device = torch.device("cuda")
    matrix = torch.ones(4096, 4096, device=device)
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
