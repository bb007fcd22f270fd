"""Strategies with weights in parts find what one process finds, and go on from each other's checkpoints."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.numeric

# 200 samples a batch: the last one of an epoch, its 7th, is short, and 4 ranks do not divide it.
BASE = (
    "model=transformer", "model.constants.width=16", "model.constants.hidden=32", "data.batch_size=200",
    "precision=fp64", "trainer.gradient_clip_val=0.5", "test=false",
    "trainer.max_epochs=null", "trainer.num_sanity_val_steps=0", "hooks=[gradients]", "logger=[]",
    "hooks.gradients.each_parameter=true",
)  # fmt: skip
HALF, WHOLE = "trainer.max_steps=8", "trainer.max_steps=15"

FSDP = ("strategy=fsdp",), 2
TENSOR = ("strategy=tensor_parallel", "strategy.sequence=true"), 2
SHARDED = ("strategy=hybrid", "strategy.data=shard", "launch.devices=4"), 4


def difference(one, other):
    assert len(one) == len(other) > 0
    return max(abs(a - b) for a, b in zip(one, other, strict=True))


def last(trained):
    return f"resume={trained.directory}/checkpoints/last.ckpt"


def same(one, other):
    """Nested values, tensors to 1e-8: AdamW divides gradients that are rounding alone by its eps."""
    if isinstance(one, torch.Tensor):
        return torch.allclose(one, other, rtol=0, atol=1e-8)
    if isinstance(one, dict):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if isinstance(one, list):
        return len(one) == len(other) and all(map(same, one, other))
    return one == other


@pytest.mark.any_processor
def test_each_goes_on_from_another(ranks):
    one = ranks.train(*BASE, WHOLE, "strategy=single")
    norms = {tag: values for tag, values in one.values.items() if tag.startswith("gradients/norm/")}
    assert len(norms) > 30
    expected = one.checkpoint()
    for (earlier, count), (later, later_count) in ((FSDP, TENSOR), (TENSOR, SHARDED)):
        before = ranks.train(*BASE, HALF, *earlier, ranks=count)
        after = ranks.train(*BASE, WHOLE, *later, last(before), ranks=later_count)
        assert difference(one.losses, before.losses + after.losses) < 1e-10
        assert after.report["metrics"]["loss/val"] == pytest.approx(one.report["metrics"]["loss/val"], abs=1e-10)
        # The norms are those of whole gradients, each logged once.
        for tag, values in norms.items():
            assert before.values[tag] | after.values[tag] == pytest.approx(values, abs=1e-10), tag
        # What one process would have written, state of the optimizer included.
        saved = after.checkpoint()
        for key in ("state_dict", "optimizer_states", "lr_schedulers", "exp_position"):
            assert same(saved[key], expected[key]), key


@pytest.mark.any_processor
def test_the_same_evaluation(ranks):
    trained = ranks.train(*BASE, "trainer.max_steps=5", *FSDP[0], ranks=2)
    evaluate = [*BASE, "train=false", "test=true", last(trained), "metrics=[accuracy]"]
    one = ranks.train(*evaluate, "strategy=single").report["metrics"]
    assert {"loss/test", "accuracy/test"} <= one.keys()
    for overrides, count in (TENSOR, SHARDED):
        assert ranks.train(*evaluate, *overrides, ranks=count).report["metrics"] == pytest.approx(one, abs=1e-10)


@pytest.mark.parametrize(("overrides", "count"), [FSDP, SHARDED])
@pytest.mark.any_processor
def test_averages_of_weights_are_saved_whole(ranks, overrides, count):
    averaged = [*BASE, "callbacks=[ema]", "trainer.max_epochs=2", "trainer.limit_train_batches=4", "test=true"]
    one = ranks.train(*averaged, "strategy=single")
    parts = ranks.train(*averaged, *overrides, ranks=count)
    for tag in ("loss/val", "loss/test"):
        assert parts.report["metrics"][tag] == pytest.approx(one.report["metrics"][tag], abs=1e-10)
    saved, expected = parts.checkpoint(), one.checkpoint()
    assert same(saved["current_model_state"], expected["current_model_state"])
    assert same(saved["state_dict"], expected["state_dict"])
