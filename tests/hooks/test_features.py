"""Feature maps: those of the first sample, one channel a picture, from black to white."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import exp
from exp.check.plan import examine, resolve
from exp.errors import RunError
from exp.hooks.features import Features
from exp.hooks.step import Step


def drawn(network, *inputs, **settings):
    hook = Features(**settings)
    hook.attach(network)
    step = Step(index=1, network=network, optimizers=[], batch_size=2, device=torch.device("cpu"))
    for one in inputs:
        with hook.engaged():
            network(one)
    return hook.after_step(step)


def test_a_grid_has_the_channels_of_the_first_sample_of_the_first_micro_batch():
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 5, 3, padding=1), nn.ReLU(), nn.Conv2d(5, 20, 3))
    first, second = torch.randn(3, 1, 8, 8), torch.randn(3, 1, 8, 8)
    found = drawn(net, first, second, columns=3)
    assert list(found) == ["features/0", "features/2"]
    image = found["features/0"]
    assert image.columns == 3
    assert image.pixels.shape == (5, 1, 48, 48)  # 8 pixels, six times as large
    maps = net[0](first)[0].detach()
    low, high = maps.amin((1, 2), keepdim=True), maps.amax((1, 2), keepdim=True)
    expected = ((maps - low) / (high - low) * 255).round()
    assert (image.pixels[:, 0, ::6, ::6].float() - expected).abs().max() <= 1
    assert torch.equal(image.pixels[:, :, 3::6, 5::6], image.pixels[:, :, ::6, ::6])
    assert found["features/2"].pixels.shape == (16, 1, 48, 48)
    assert drawn(net, first, maps=2, modules=["2"])["features/2"].pixels.shape[0] == 2


def test_a_star_takes_what_has_maps_and_where_nothing_has_the_run_says_so():
    net = nn.Sequential(nn.Conv2d(1, 2, 3), nn.Flatten(), nn.Linear(72, 3))
    assert list(drawn(net, torch.randn(1, 1, 8, 8), modules=["*"])) == ["features/0"]
    with pytest.raises(RunError, match=r"no module gives feature maps in this step.*1 gives \[1, 72\], 2 gives"):
        drawn(net, torch.randn(1, 1, 8, 8), modules=["1", "2"])


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (
            ["model=lenet", "hooks.features.modules=[conv1,flatten]", "hooks.features.maps=0"],
            [
                "hooks.features.maps: 0; expected 1 or more",
                "hooks.features.modules: 'flatten': flatten gives [B, 64]; expected a module whose output is [B, C, H, "
                "W]; there are conv1, relu1, pool1, conv2, relu2, pool2",
            ],
        ),
        (
            ["hooks.features.modules=['*']"],
            ["hooks.features.modules: '*': the network gives [B, 10], flatten gives [B, 64]"],
        ),
        (
            ["model=lenet", "strategy=tensor_parallel", "launch.devices=2"],
            ["hooks.features: a Features hook with strategy=tensor_parallel"],
        ),
    ],
)
def test_wrong_use_is_refused_before_the_run(overrides, says, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    found = sorted(str(fault) for fault in examine(resolve(exp.compose(["hooks=[features]", *overrides]))).faults)
    assert len(found) == len(says)
    for fault, start in zip(found, says, strict=True):
        assert fault.startswith(start), fault
