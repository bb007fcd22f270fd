"""A real run's event file: every tag of the contract is in it, and what it holds is true."""

from __future__ import annotations

import csv
import math
from pathlib import Path

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp

pytestmark = [
    # Lightning 2.6.6 against torch 2.13.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    # Lightning's advice to log oftener.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

# A default run's. Those of fp16, of several terms and of CUDA are tested where they are made.
LAYERS = [f"{layer}.{kind}" for layer in ("head", "hidden", "hidden2") for kind in ("bias", "weight")]
TAGS = sorted([
    "accuracy/test", "accuracy/val",
    "gradients/norm/total", "gradients/update_ratio/total",
    "loss/test", "loss/train", "loss/train_epoch", "loss/val",
    "memory/activations_mib", "memory/gradients_mib", "memory/optimizer_mib", "memory/parameters_mib",
    "optimizer/lr/default",
    "throughput/samples_per_second", "throughput/step_ms",
])  # fmt: skip
PARAMETERS = 64 * 256 + 256 + 256 * 128 + 128 + 128 * 10 + 10


def fit(directory, monkeypatch, *overrides: str) -> EventAccumulator:
    directory.mkdir()
    monkeypatch.chdir(directory)
    exp.fit(exp.compose(["trainer.max_epochs=3", *overrides]))
    (events,) = directory.rglob("events.out.tfevents.*")
    return EventAccumulator(str(events.parent), size_guidance={"scalars": 0}).Reload()


@pytest.fixture(scope="module")
def run(tmp_path_factory):
    with pytest.MonkeyPatch.context() as monkeypatch:
        yield fit(tmp_path_factory.mktemp("run") / "here", monkeypatch, "optimizer.lr=1e-3")


def values(run: EventAccumulator, tag: str) -> list[float]:
    return [event.value for event in run.Scalars(tag)]


def steps(run: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in run.Scalars(tag)]


def test_the_tags_are_those_of_the_contract(run):
    assert sorted(run.Tags()["scalars"]) == TAGS
    assert sorted(run.Tags()["images"]) == ["gradients/norm", "gradients/update_ratio", "throughput/part_ms"]


def test_the_x_axis_is_the_optimizer_step(run):
    assert steps(run, "loss/train") == list(range(1, 61))
    assert steps(run, "gradients/norm/total") == list(range(1, 61))
    # Of 60 steps 20 points, and the first.
    assert steps(run, "memory/optimizer_mib") == [1, *range(3, 61, 3)]
    assert steps(run, "gradients/update_ratio/total") == [1, *range(3, 61, 3)]
    assert steps(run, "throughput/step_ms") == list(range(3, 61, 3))
    assert steps(run, "loss/val") == steps(run, "accuracy/val") == [20, 40, 60]


def test_memory_equals_the_count_by_hand(run):
    in_bytes = {tag: [round(value * 2**20) for value in values(run, f"memory/{tag}_mib")] for tag in
                ("parameters", "gradients", "optimizer", "activations")}  # fmt: skip
    assert set(in_bytes["parameters"]) == set(in_bytes["gradients"]) == {4 * PARAMETERS}
    assert set(in_bytes["optimizer"]) == {4 * (2 * PARAMETERS + 6)}
    # For each sample: the input, both sides of two GELUs, and the log-probabilities; its label, and a total weight.
    by_hand = 64 * (4 * (64 + 2 * 256 + 2 * 128 + 10) + 8) + 4
    assert in_bytes["activations"][0] == pytest.approx(by_hand, rel=0.02)


def test_the_total_norm_is_that_of_its_parts_in_the_table(run):
    with (Path(run.path).parent / "table.csv").open() as file:
        rows = list(csv.DictReader(file))
    totals = dict(zip(steps(run, "gradients/norm/total"), values(run, "gradients/norm/total"), strict=True))
    assert [int(row["step"]) for row in rows] == [1, *range(3, 61, 3)]
    for row in rows:
        norms = [float(row[f"gradients/norm/{layer}"]) for layer in LAYERS]
        assert totals[int(row["step"])] == pytest.approx(math.hypot(*norms), rel=1e-5)


def test_speed_and_samples_agree(run):
    speeds = zip(values(run, "throughput/step_ms"), values(run, "throughput/samples_per_second"), strict=True)
    for milliseconds, rate in speeds:
        # The last batch of an epoch, of 5 samples, is one of three steps at most.
        assert 2 / 3 * 64 < rate * milliseconds / 1000 <= 64.001


def test_losses_are_the_same_bit_for_bit_without_hooks(run, tmp_path, monkeypatch):
    without = fit(tmp_path / "without", monkeypatch, "optimizer.lr=1e-3", "hooks=[]")
    measured = fit(tmp_path / "measured", monkeypatch, "optimizer.lr=1e-3", "hooks.memory.every_n_steps=1")
    assert "gradients/norm/total" not in without.Tags()["scalars"]
    assert len(values(measured, "memory/activations_mib")) == 60
    for tag in ("loss/train", "loss/val", "loss/test"):
        assert values(run, tag) == values(without, tag) == values(measured, tag)


def test_the_config_is_there_to_read(run):
    (event,) = run.Tensors("config")
    assert "lr: 0.001" in event.tensor_proto.string_val[0].decode()


def test_a_pattern_that_matches_no_module_ends_the_run_before_its_first_step(tmp_path, monkeypatch):
    with pytest.raises(exp.ConfigError, match=r"hooks\.gradients\.modules: 'encoder'; expected .* there are flatten"):
        fit(tmp_path / "here", monkeypatch, "hooks.gradients.modules=[encoder]")
