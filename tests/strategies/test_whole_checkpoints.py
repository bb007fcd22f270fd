"""Every strategy saves the same checkpoint as one process, and resumes from that of every other strategy."""

from __future__ import annotations

import itertools
from pathlib import Path

import pytest
import yaml

VARIANTS = yaml.safe_load(Path(__file__).with_name("variants.yaml").read_text())
NAMES = ["fsdp", "tensor_parallel", "pipeline", "interleaved_1f1b", "layer_split", "shards times tensor"]
STRATEGIES = {name: {**VARIANTS["strategies"], **VARIANTS["variants"]}[name] for name in NAMES}
STRATEGIES["single"] = ("strategy=single", 1)
FAST = [("fsdp", "single"), ("single", "tensor_parallel"), ("single", "pipeline")]
LONGER = "trainer.max_steps=8"


def train(ranks, name, *words):
    strategy, count, *_ = STRATEGIES[name]
    devices = () if "launch.devices" in strategy else (f"launch.devices={count}",)
    return ranks.train(*words, *strategy.split(), "launch.accelerator=cpu", *devices, ranks=count)


def last(trained):
    return f"resume={trained.directory}/checkpoints/last.ckpt"


@pytest.fixture
def longer(alone, run):
    return alone(*run, LONGER)


def require_resumed(ranks, require_same_state, whole, run, earlier, later):
    """Assert that a run with the strategy `earlier`, resumed with `later`, equals a run of one process."""
    before = train(ranks, earlier, *run)
    after = train(ranks, later, *run, LONGER, last(before))
    for tag, values in whole.values.items():
        if tag == "loss/train" or tag.startswith("gradients/norm/"):
            assert before.values[tag] | after.values[tag] == pytest.approx(values, rel=0, abs=1e-10), tag
    for tag in ("loss/val", "accuracy/val"):
        assert after.report["metrics"][tag] == pytest.approx(whole.report["metrics"][tag], rel=0, abs=1e-10), tag
    require_same_state(whole, after)


@pytest.mark.parametrize(("earlier", "later"), FAST)
def test_each_strategy_resumes_from_another(ranks, run, longer, require_same_state, earlier, later):
    require_resumed(ranks, require_same_state, longer, run, earlier, later)


@pytest.mark.slow
def test_every_pair_of_strategies_with_adamw(ranks, share, run, alone, require_same_state):
    words = (
        *run,
        "optimizer=adamw",
        "optimizer.betas=[0.9,0.99]",
        "scheduler=step",
        "scheduler.interval=step",
        "scheduler.step_size=3",
    )
    words = tuple(word for word in words if word != "optimizer.momentum=0.9")
    whole = alone(*words, LONGER)
    for earlier, later in share.of(list(itertools.permutations(STRATEGIES, 2))):
        print(f"{earlier}; {later}")
        require_resumed(ranks, require_same_state, whole, words, earlier, later)


@pytest.mark.slow
def test_every_strategy_evaluates_a_checkpoint_alike(ranks, share, run):
    evaluate = (*run, "train=false", "test=true", last(train(ranks, "fsdp", *run)))
    expected = train(ranks, "single", *evaluate).report["metrics"]
    assert {"loss/test", "accuracy/test"} <= expected.keys()
    for name in share.of([name for name in STRATEGIES if name != "single"]):
        found = train(ranks, name, *evaluate).report["metrics"]
        assert found == pytest.approx(expected, rel=0, abs=1e-10), name
