"""Tests of transforms of samples and of batches."""

from __future__ import annotations

import random

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset

from exp.data.data import Data
from exp.errors import ConfigError, RunError

INPUTS, TARGETS = torch.arange(24.0).reshape(12, 2), torch.arange(12) % 3


class Flip:
    """Random transform of input and target."""

    def __call__(self, input, target):
        return (-input, 2 - target) if random.random() < 0.5 else (input, target)


class Named:
    def __call__(self, image, target):
        return {"target": target + 1, "marked": image.sum()}


class Relabel(nn.Module):
    def forward(self, target):
        return (target + 1) % 3


class Scaled:
    def __init__(self, factor):
        self.factor = factor

    def __call__(self, value):
        return value * self.factor


class Rows(torch.utils.data.Dataset):
    def __len__(self):
        return 12

    def __getitem__(self, index):
        return {"image": INPUTS[index], "table": INPUTS[index] + 1, "target": TARGETS[index] % 2}


class Stream(IterableDataset):
    def __iter__(self):
        return iter(TensorDataset(INPUTS, TARGETS))


def data(**settings) -> Data:
    table = TensorDataset(INPUTS, TARGETS)
    return Data(**{"train": table, "val": table, "batch_size": 5, "num_classes": 3, "seed": 1, **settings})


def batches(made, stage="train", **where):
    loader = made.loader(stage, **where)
    return [batch.data for batch in loader]


@pytest.mark.parametrize("stream", [False, True])
def test_inputs_and_targets_are_transformed_together(stream):
    settings = {"train": Stream()} if stream else {}
    made = data(train_transforms=[Flip()], **settings)
    first = batches(made)
    for inputs, targets in first:
        was = inputs[:, 0] < 0
        number = (inputs[:, 0].abs() / 2).long()
        assert torch.equal(targets[inputs[:, 0] != 0], torch.where(was, 2 - number % 3, number % 3)[inputs[:, 0] != 0])
    assert any(bool((inputs < 0).any()) for inputs, _ in first)
    assert str(first) == str(batches(data(train_transforms=[Flip()], num_workers=1, **settings)))
    loader = made.loader("train")
    loader.set_position(0, 2)
    assert str([batch.data for batch in loader]) == str(first[2:])


def test_transforms_run_in_order_for_their_stage():
    made = data(transforms={"ten": Scaled(10)}, train_transforms=[Scaled(2), Relabel()], shuffle=False)
    assert torch.equal(batches(made)[0][0], 20 * INPUTS[:5])
    assert torch.equal(batches(made)[0][1], (TARGETS[:5] + 1) % 3)
    assert torch.equal(batches(made, "val")[0][0], 10 * INPUTS[:5])
    assert torch.equal(batches(made, "val")[0][1], TARGETS[:5])
    named = data(train=Rows(), val=None, transforms=[Named()], shuffle=False)
    batch = batches(named)[0]
    assert torch.equal(batch["marked"], INPUTS[:5].sum(1))
    assert torch.equal(batch["target"], TARGETS[:5] % 2 + 1)


def test_unsuitable_transforms_are_reported():
    with pytest.raises(ConfigError, match="with the parameter input; expected parameters with names"):
        data(train=Rows(), val=None, transforms=[Flip()])
    with pytest.raises(RunError, match="returns 1 values; expected values for input, target"):
        data(train_transforms=[lambda input, target: input])


def test_batch_transforms_depend_on_the_position_only():
    made = data(train_batch_transforms=[nn.Dropout()])
    batch = next(iter(made.loader("train")))

    def mixed(**where):
        place = {"stage": "train", "rank": 0, "epoch": 0, "number": 0, **where}
        return str(made.transform_batch(batch, **place).data)

    assert mixed() == mixed()
    assert len({mixed(), mixed(rank=1), mixed(epoch=1), mixed(number=1)}) == 4
    assert not made.transforms_batches("val")


FLIPPED = "data.train_batch_transforms={flip: {_target_: exp.data.images.RandomFlip}}"


def test_a_run_with_batch_transforms_resumes_exactly(ranks):
    words = ("hooks=[]", "test=false", "trainer.max_epochs=2", "data.batch_size=256", "optimizer=sgd")
    whole = ranks.train(*words, FLIPPED)
    killed = ranks.train(*words, FLIPPED, "trainer.max_steps=7")
    rest = ranks.train(*words, FLIPPED, f"resume={killed.directory}/checkpoints/last.ckpt")
    expected = whole.checkpoint()["state_dict"]
    for name, value in rest.checkpoint()["state_dict"].items():
        assert torch.equal(value, expected[name])
