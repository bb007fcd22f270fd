"""Samples: pictures as they were before the data set normalised them, with what is right and what is wrong."""

from __future__ import annotations

import pytest
import torch
from sklearn.datasets import load_digits

import exp
from exp.check.plan import examine, resolve
from exp.hooks.figures import INK, RIGHT, WRONG
from exp.hooks.samples import Samples, pictures


def alone(tensor):
    return tensor[None]


def shown(values, *, batches: int = 1, **settings):
    hook = Samples(**settings)
    hook.setup(torch.nn.Linear(1, 1))
    for _ in range(batches):
        hook.evaluated("val", values)
    return hook.after_evaluation("val", alone)["samples/val"]


def test_digits_come_back_as_the_pixels_that_scikit_learn_ships(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    config = exp.compose([])
    from exp.data.digits import Digits

    inputs, _ = Digits().entries
    found = pictures(inputs[:50], mean=config.data.input_mean, std=config.data.input_std)
    pixels = torch.tensor(load_digits().images[:50]) / 16 * 255
    assert (found[:, 0].double() - pixels).abs().max() <= 0.51


def test_channels_have_their_own_scale_bytes_have_none_and_without_one_each_is_stretched():
    original = torch.rand(2, 3, 4, 4)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.1, 0.3]
    normalised = (original - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    found = pictures(normalised, mean=mean, std=std)
    assert (found.float() - original * 255).abs().max() <= 0.51
    coloured = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(pictures(coloured, mean=mean, std=std), coloured)
    grey = pictures(torch.tensor([[[-3.0, 0.0], [1.0, 5.0]]]), mean=None, std=None)
    assert grey.tolist() == [[[[0, 96], [128, 255]]]]


def colours(panel) -> list[tuple[int, int, int]]:
    """The frame of each picture, found as a row of the grid is walked through the middle of its pictures."""
    sheet = panel.drawn().pixels[0].permute(1, 2, 0)
    # Below the title a row of the sheet that no white margin fills: through the first row of pictures.
    line = [tuple(pixel) for pixel in sheet[40].tolist()]
    found = [pixel for before, pixel in zip([(255, 255, 255), *line], line, strict=False) if before == (255, 255, 255)]
    return [pixel for pixel in found if pixel in (RIGHT, WRONG, INK)]


def test_a_frame_says_whether_the_network_was_right():
    scores = torch.eye(4)[[0, 1, 2, 3, 0]]
    values = {"input": torch.rand(5, 1, 8, 8), "output": scores, "target": torch.tensor([0, 1, 0, 3, 2])}
    panel = shown(values, columns=5)
    assert panel.outputs[:, 0].tolist() == [0, 1, 2, 3, 0]
    assert panel.targets[:, 0].tolist() == [0, 1, 0, 3, 2]
    assert colours(panel)[::2] == [RIGHT, RIGHT, WRONG, RIGHT, WRONG]


def test_pictures_of_several_batches_up_to_the_count():
    values = {"input": torch.rand(5, 8, 8), "output": torch.rand(5, 3), "target": torch.zeros(5).long()}
    panel = shown(values, batches=3, count=12)
    assert panel.pixels.shape == (12, 1, 8, 8)
    assert len(panel.targets) == len(panel.outputs) == 12
    assert torch.equal(panel.pixels[10:], panel.pixels[:2])


@pytest.mark.parametrize(
    ("output", "target", "outputs", "target_shape"),
    [
        (torch.tensor([[0.25], [3.0]]), torch.tensor([[0.5], [2.0]]), [[0.25], [3.0]], (1,)),  # a regression
        (torch.tensor([0.7, -0.1]), torch.tensor([1, 1]), [[1], [0]], ()),  # one output for two classes
        (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8), None, (1, 8, 8)),  # pictures to predict
        ({"output": torch.rand(2, 5)}, None, None, None),  # no target, and an output within an output
    ],
)
def test_what_is_no_classification_says_its_numbers_or_its_shape(output, target, outputs, target_shape):
    values = {"input": torch.rand(2, 1, 8, 8), "output": output}
    panel = shown(values if target is None else {**values, "target": target})
    assert (None if panel.outputs is None else panel.outputs.tolist()) == outputs
    assert panel.target_shape == target_shape
    assert panel.drawn().pixels.shape[1] == 3


def test_a_training_step_is_drawn_by_choice_once_for_its_micro_batches():
    from exp.hooks.step import Step

    values = {"input": torch.rand(2, 1, 8, 8), "output": torch.rand(2, 3), "target": torch.tensor([0, 1])}
    step = Step(index=1, network=torch.nn.Linear(1, 1), optimizers=[], batch_size=2, device=torch.device("cpu"))
    assert Samples().after_forward(step, values) is None
    hook = Samples(stages=["train"])
    assert list(hook.after_forward(step, values)) == ["samples/train"]
    assert hook.after_forward(step, values) is None
    hook.evaluated("val", values)
    assert hook.after_evaluation("val", alone) is None


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["data=wine"], ["hooks.samples: input of shape [13]; expected data whose input is a picture"]),
        (
            [
                "hooks.samples.stages=[valid]",
                "hooks.samples.mean=[1,2]",
                "hooks.samples.std=[0]",
                "hooks.samples.count=0",
            ],
            [
                "hooks.samples.count: 0; expected 1 or more",
                "hooks.samples.mean: 2 numbers; expected one number",
                "hooks.samples.stages: 'valid'; expected some of train, val, test",
                "hooks.samples.std: [0]; expected numbers above 0",
            ],
        ),
        (
            ["hooks.samples.stages=[]", "hooks.samples.mean=null"],
            [
                "hooks.samples.mean: null; expected a list as hooks.samples.std is, or null for both",
                "hooks.samples.stages: []; expected some of train, val, test",
            ],
        ),
    ],
)
def test_wrong_use_is_refused_before_the_run(overrides, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sorted(str(fault) for fault in examine(resolve(exp.compose(["hooks=[samples]", *overrides]))).faults)
    assert len(found) == len(says)
    for fault, start in zip(found, says, strict=True):
        assert fault.startswith(start)
