"""The event file of a default run: tags, steps, and memory of activations."""

from __future__ import annotations

import pytest
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

import exp

pytestmark = [
    # Lightning 2.6.6 uses a deprecated name of torch 2.13.
    pytest.mark.filterwarnings("ignore:.*isinstance.treespec, LeafSpec.*"),
    # Lightning recommends logging more often.
    pytest.mark.filterwarnings("ignore:The number of training batches"),
]

TAGS = sorted([
    "accuracy/test", "accuracy/val",
    "gradients/norm/total", "gradients/update_ratio/total",
    "loss/test", "loss/train", "loss/train_epoch", "loss/val",
    "memory/activations_mib", "memory/gradients_mib", "memory/optimizer_mib", "memory/parameters_mib",
    "monitor/best", "monitor/best_step", "optimizer/lr/default",
    "throughput/samples_per_second", "throughput/step_ms",
])  # fmt: skip


@pytest.fixture(scope="module")
def run(tmp_path_factory) -> EventAccumulator:
    directory = tmp_path_factory.mktemp("run")
    with pytest.MonkeyPatch.context() as monkeypatch:
        monkeypatch.chdir(directory)
        exp.fit(exp.compose(["trainer.max_epochs=3", "optimizer.lr=1e-3"]))
    (events,) = directory.rglob("events.out.tfevents.*")
    return EventAccumulator(str(events.parent), size_guidance={"scalars": 0}).Reload()


def steps(run: EventAccumulator, tag: str) -> list[int]:
    return [event.step for event in run.Scalars(tag)]


def test_a_default_run_has_the_tags_of_the_contract(run):
    assert sorted(run.Tags()["scalars"]) == TAGS
    assert sorted(run.Tags()["images"]) == ["gradients/norm", "gradients/update_ratio", "throughput/part_ms"]


def test_the_x_axis_is_the_optimizer_step(run):
    assert steps(run, "loss/train") == list(range(1, 61))
    assert steps(run, "gradients/norm/total") == list(range(1, 61))
    # 20 points for 60 steps, and the first step.
    assert steps(run, "memory/optimizer_mib") == [1, *range(3, 61, 3)]
    assert steps(run, "gradients/update_ratio/total") == [1, *range(3, 61, 3)]
    assert steps(run, "throughput/step_ms") == list(range(3, 61, 3))
    assert steps(run, "loss/val") == steps(run, "accuracy/val") == [20, 40, 60]


def test_the_memory_of_activations_is_counted(run):
    # For each sample: input, inputs and outputs of two GELUs, log probabilities and label; one total weight.
    by_hand = 64 * (4 * (64 + 2 * 256 + 2 * 128 + 10) + 8) + 4
    assert run.Scalars("memory/activations_mib")[0].value * 2**20 == pytest.approx(by_hand, rel=0.02)
