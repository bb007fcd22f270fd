"""Pixels of the pictures that the hooks samples and features draw."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn

import exp
from exp.data.digits import Digits
from exp.errors import RunError
from exp.extras.evaluation.samples import Caption, Samples, draw_captioned, pictures, to_rgb
from exp.extras.research.features import Features
from exp.hooks.figures import INK, RIGHT, WRONG


def alone(tensor):
    return tensor[None]


def shown(values, **settings):
    hook = Samples(**settings)
    hook.setup(nn.Linear(1, 1))
    hook.evaluated("val", values)
    return hook.after_evaluation("val", alone)["samples/val"]


def test_samples_are_shown_before_their_normalization():
    config = exp.compose([])
    inputs, _ = Digits().entries
    found = pictures(inputs[:50], mean=config.data.input_mean, std=config.data.input_std)
    pixels = torch.tensor(load_digits().images[:50]) / 16 * 255
    assert (found[:, 0].double() - pixels).abs().max() <= 0.51
    original = torch.rand(2, 3, 4, 4)
    mean, std = [0.4, 0.5, 0.6], [0.2, 0.1, 0.3]
    normalised = (original - torch.tensor(mean)[:, None, None]) / torch.tensor(std)[:, None, None]
    assert (pictures(normalised, mean=mean, std=std).float() - original * 255).abs().max() <= 0.51
    coloured = torch.randint(0, 256, (2, 3, 4, 4), dtype=torch.uint8)
    assert torch.equal(pictures(coloured, mean=mean, std=std), coloured), "uint8 values must be shown unchanged"
    # Without a mean, each picture is scaled to range from black to white.
    assert pictures(torch.tensor([[[-3.0, 0.0], [1.0, 5.0]]]), mean=None, std=None).tolist() == [
        [[[0, 96], [128, 255]]]
    ]


def frames(panel) -> list[tuple[int, int, int]]:
    """Return the colors of the frames in the first row of pictures."""
    white = (255, 255, 255)
    line = [tuple(pixel) for pixel in panel.draw().pixels[0].permute(1, 2, 0)[40].tolist()]
    found = [pixel for before, pixel in zip([white, *line], line, strict=False) if before == white]
    return [pixel for pixel in found if pixel in (RIGHT, WRONG, INK)]


def test_samples_are_a_random_choice_of_the_whole_evaluation():
    targets = torch.arange(200) // 100  # sorted by class
    inputs, scores = torch.arange(200.0).expand(8, 8, -1).permute(2, 0, 1) / 200, torch.eye(2)[torch.zeros(200).long()]
    hook, seen = Samples(count=4, mean=[0.0], std=[1.0]), []
    hook.attach(nn.Linear(1, 1), class_names={"target": ["disc", "bar"]})
    for size in (7, 200):
        for batch in zip(inputs.split(size), scores.split(size), targets.split(size), strict=True):
            hook.evaluated("val", dict(zip(("input", "output", "target"), batch, strict=True)))
        panel = hook.after_evaluation("val", alone)["samples/val"]
        seen.append((panel.pixels[:, 0, 0, 0].tolist(), panel.targets[:, 0].tolist()))
    (chosen, kinds), again = seen
    assert (chosen, kinds) == again == (sorted({*chosen}), kinds)
    assert kinds == [int(pixel > 127) for pixel in chosen]
    assert 1 <= sum(kinds) <= 3
    assert frames(panel)[::2] == [WRONG if kind else RIGHT for kind in kinds]
    words = [Caption(lines=[f"target {name}", "output disc"], right=name == "disc") for name in ("disc", "bar")]
    expected = draw_captioned(to_rgb(panel.pixels), [words[kind] for kind in kinds],
                         title=f"{4 - sum(kinds)} of 4 correct; orange is wrong", columns=4)  # fmt: skip
    assert np.array_equal(panel.draw().pixels[0].permute(1, 2, 0).numpy(), expected)


@pytest.mark.parametrize(
    ("output", "target", "outputs"),
    [
        (torch.tensor([[0.25], [3.0]]), torch.tensor([[0.5], [2.0]]), [[0.25], [3.0]]),  # a regression
        (torch.tensor([0.7, -0.1]), torch.tensor([1, 1]), [[1], [0]]),  # one output for two classes
        (torch.rand(2, 1, 8, 8), torch.rand(2, 1, 8, 8), None),  # targets that are pictures
        ({"output": torch.rand(2, 5)}, None, None),  # no target, and a nested output
    ],
)
def test_other_tasks_show_numbers_or_nothing(output, target, outputs):
    values = {"input": torch.rand(2, 1, 8, 8), "output": output}
    panel = shown(values if target is None else {**values, "target": target})
    assert (None if panel.outputs is None else panel.outputs.tolist()) == outputs
    assert panel.draw().pixels.shape[1] == 3


def test_training_samples_are_drawn_once_per_step(step):
    values = {"input": torch.rand(2, 1, 8, 8), "output": torch.rand(2, 3), "target": torch.tensor([0, 1])}
    now = step()
    assert Samples().after_forward(now, values) is None
    hook = Samples(stages=["train"])
    assert list(hook.after_forward(now, values)) == ["samples/train"]
    assert hook.after_forward(now, values) is None, "the second micro-batch"
    hook.evaluated("val", values)
    assert hook.after_evaluation("val", alone) is None


def maps_of(step, network, *inputs, **settings):
    hook = Features(**settings)
    hook.attach(network)
    for one in inputs:
        with hook.engaged():
            network(one)
    return hook.after_step(step(network))


def test_features_show_the_channels_of_the_first_sample(step):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 20, 3))
    first, second = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)
    found = maps_of(step, net, first, second)
    assert list(found) == ["features/0", "features/2"]
    image = found["features/0"]
    assert image.pixels.shape == (5, 1, 48, 48)  # 8 pixels, six times as large
    maps = net[0](first)[0].detach()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    expected = ((maps - low) / (high - low) * 255).round()
    assert (image.pixels[:, 0, ::6, ::6].float() - expected).abs().max() <= 1
    assert torch.equal(image.pixels[:, :, 3::6, 5::6], image.pixels[:, :, ::6, ::6])
    assert found["features/2"].pixels.shape == (16, 1, 48, 48)
    assert maps_of(step, net, first, maps=2, modules=["2"])["features/2"].pixels.shape[0] == 2


def test_features_need_a_module_with_maps(step):
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    assert list(maps_of(step, net, torch.randn(1, 1, 8, 8), modules=["*"])) == ["features/0"]
    with pytest.raises(RunError, match=r"no module has feature maps \[B, C, H, W\] in this step"):
        maps_of(step, net, torch.randn(1, 1, 8, 8), modules=["1", "2"])
