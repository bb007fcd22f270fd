"""The panels of a real run, read back from its event file: they are right, and two ranks draw what one process does."""

from __future__ import annotations

import io
from pathlib import Path

import numpy as np
import pytest
import torch
from PIL import Image as Pillow
from sklearn.metrics import confusion_matrix, precision_score, recall_score
from tensorboard.backend.event_processing.event_accumulator import EventAccumulator
from tensorboard.util.tensor_util import make_ndarray

import exp
from exp.check.plan import examine, resolve
from exp.config.reading import read
from exp.construct import build_data, build_network
from exp.shared_types import DataSpec

pytestmark = pytest.mark.numeric

# In double precision, so that no sum over ranks turns a prediction. With batches of 67 the last one of validation is a
# single sample, for which the second rank holds a stand-in.
RUN = [
    "model=lenet",
    "precision=fp64",
    "hooks=[activations,features,samples,confusion,pr_curve]",
    "hooks.samples.stages=[train,val,test]",
    "hooks.activations.every_n_steps=10",
    "hooks.activations.each_layer=true",
    "data.batch_size=67",
    "trainer.max_steps=19",
]


def events(directory: Path) -> EventAccumulator:
    everything = {"scalars": 0, "images": 0, "tensors": 0}
    return EventAccumulator(str(directory / "tensorboard"), size_guidance=everything).Reload()


def picture(read: EventAccumulator, tag: str) -> np.ndarray:
    return np.asarray(Pillow.open(io.BytesIO(read.Images(tag)[-1].encoded_image_string)))


def of_the_test_part(directory: Path) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Inputs, targets and probabilities of the test part, from the best checkpoint, without a hook."""
    plain, _ = read(exp.compose([*RUN, f"hydra.run.dir={directory}-again"]))
    network = build_network(plain, DataSpec.of(plain["data"])).double().eval()
    saved = torch.load(directory / "checkpoints" / "best.ckpt", weights_only=True)["state_dict"]
    network.load_state_dict(
        {name.removeprefix("network."): value for name, value in saved.items() if "network" in name}
    )
    batches = [batch.data for batch in build_data(plain).loader("test")]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        return inputs.numpy(), targets.numpy(), network(inputs.double()).softmax(-1).numpy()


@pytest.mark.any_processor
def test_what_one_process_draws_is_right_and_two_ranks_draw_the_same(ranks):
    one = ranks.train(*RUN)
    inputs, targets, probabilities = of_the_test_part(one.directory)
    found = events(one.directory)

    # Ten cells of 30 pixels, that end 12 above the picture's end, and begin where the first grey line does.
    sheet = picture(found, "confusion/test").astype(float)
    left = int((sheet[-12 - 300] == 225).all(-1).argmax())
    cells = sheet[-12 - 300 + 1 : -12 : 30, left + 1 : left + 300 : 30]
    counts = confusion_matrix(targets, probabilities.argmax(-1))
    shares = counts / counts.sum(1, keepdims=True)
    seen = np.where(np.eye(10, dtype=bool), 1 - cells[..., 0] / 255, 1 - cells[..., 2] / 255) ** 2
    assert np.abs(seen - np.where(shares > 0, np.maximum(shares, 0.04), 0)).max() < 0.01

    for digit in (0, 7):
        curve = make_ndarray(found.Tensors(f"pr_curve/test/{digit}")[-1].tensor_proto)
        assert curve[[0, 3], 0].sum() == (targets == digit).sum()
        for place in (20, 63, 100):
            predicted = probabilities[:, digit] >= np.linspace(0, 1, 127)[place]
            precision = precision_score(targets == digit, predicted, zero_division=1)
            assert curve[4:, place].tolist() == pytest.approx([precision, recall_score(targets == digit, predicted)])

    # 4 of the 16 pictures a row, each of 8 by 8 pixels, eight times as large: the first one's, by its brightest line.
    sheet = picture(found, "samples/test")
    pixels = (inputs[0, 0] * 0.375 + 0.3125) * 255
    enlarged = sheet[..., 0][23 : 23 + 64, 6 + 2 : 6 + 2 + 64][4::8, 4::8]
    assert np.abs(enlarged - pixels).max() < 1

    two = ranks.train(*RUN, "strategy=ddp", ranks=2)
    again = events(two.directory)
    assert two.losses == pytest.approx(one.losses, rel=1e-12)
    assert sorted(found.Tags()["images"]) == sorted(again.Tags()["images"])
    for tag in found.Tags()["images"]:
        assert [event.step for event in found.Images(tag)] == [event.step for event in again.Images(tag)]
        assert np.array_equal(picture(found, tag), picture(again, tag)), tag
    for tag in found.Tags()["tensors"]:
        if tag.startswith("pr_curve/"):
            first, second = (make_ndarray(one.Tensors(tag)[-1].tensor_proto) for one in (found, again))
            assert np.array_equal(first, second), tag
    measured = [tag for tag in one.values if tag.startswith("activations/")]
    assert len(measured) == 4 * 12
    for tag in measured:
        assert list(one.values[tag]) == [1, 10]
        assert list(two.values[tag].values()) == pytest.approx(list(one.values[tag].values()), rel=1e-9, abs=1e-12), tag


@pytest.mark.any_processor
def test_ranks_of_one_model_count_a_sample_once_and_shards_are_seen_whole(ranks):
    run = ["precision=fp64", "trainer.max_steps=2", "trainer.limit_val_batches=2", "test=false"]
    every = ["hooks=[confusion,pr_curve,activations]", "hooks.activations.each_layer=true"]
    one = ranks.train(*run, *every)
    found = events(one.directory)
    sharded = ranks.train(*run, *every, "strategy=fsdp", ranks=2)
    measured = [tag for tag in one.values if tag.startswith("activations/")]
    assert measured
    for tag in measured:
        assert sharded.values[tag] == pytest.approx(one.values[tag], rel=1e-9, abs=1e-12), tag
    split = ranks.train(*run, "hooks=[confusion,pr_curve]", "strategy=tensor_parallel", ranks=2)
    for two in (sharded, split):
        again = events(two.directory)
        assert np.array_equal(picture(found, "confusion/val"), picture(again, "confusion/val"))
        first, second = (make_ndarray(read.Tensors("pr_curve/val/3")[-1].tensor_proto) for read in (found, again))
        assert np.array_equal(first, second)


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["data=diabetes", "hooks=[confusion,pr_curve]"],
            [
                "hooks.confusion.num_classes: null; expected the number of classes",
                "hooks.pr_curve.num_classes: null; expected the number of classes",
            ],
        ),
        (
            [
                "hooks=[activations,confusion,pr_curve]",
                "hooks.activations.modules=[conv]",
                "hooks.confusion.num_classes=1001",
                "hooks.confusion.stages=[train]",
                "hooks.pr_curve.positive_class=10",
                "hooks.pr_curve.thresholds=1",
                "hooks.pr_curve.stages=[]",
            ],
            [
                "hooks.activations.modules: 'conv'; expected a pattern of module names",
                "hooks.confusion.num_classes: 1001; expected 2 to 1000 classes",
                "hooks.confusion.stages: 'train'; expected some of val, test",
                "hooks.pr_curve.positive_class: 10; expected a class from 0 to 9, or null",
                "hooks.pr_curve.thresholds: 1; expected 2 or more",
                "hooks.pr_curve.stages: []; expected some of val, test",
            ],
        ),
        (
            ["experiment=gan", "hooks=[confusion]"],
            ["hooks.confusion.output: output, which is [B, 1, 8, 8]; expected an output of the network that is"],
        ),
        (
            ["hooks=[activations,confusion]", "strategy=tensor_parallel", "launch.devices=2"],
            ["hooks.activations: a Activations hook with strategy=tensor_parallel"],
        ),
        (
            ["hooks=[confusion]", "strategy=hybrid", "launch.devices=4", "strategy.tensor=1", "strategy.pipeline=2"],
            ["hooks.confusion: a Confusion hook with strategy.pipeline=2"],
        ),
    ],
)
def test_wrong_use_is_refused_before_the_run(overrides, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sorted(str(fault) for fault in examine(resolve(exp.compose(overrides))).faults)
    assert len(found) == len(says)
    for fault in says:
        assert any(one.startswith(fault) for one in found), found
