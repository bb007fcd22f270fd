"""The hook landscape: its numbers by hand, its directions, and a run that it leaves untouched."""

from __future__ import annotations

import csv
import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn.functional import cross_entropy

import exp
from exp.check.plan import resolve
from exp.construct import build_data, build_network
from exp.data.randomness import seed_for
from exp.errors import ConfigError
from exp.hooks.figures import COLOURS, curves
from exp.hooks.landscape import downhill, length, random_direction

pytestmark = pytest.mark.numeric

COMMAND = ["metrics=[]", "monitor=loss/train", "test=false", "trainer.limit_val_batches=0", "logger=[]"]
COMMAND += ["checkpoint.save_best=false", "trainer.max_steps=4", "data.batch_size=24"]
HOOK = ["hooks=[landscape]", "hooks.landscape.every_n_steps=2", "hooks.landscape.points=5"]
SMALL = ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12"]
# Statistics that a forward moves, and random numbers that it draws.
RESTLESS = [
    "model.layers.activation={_target_: torch.nn.BatchNorm1d}", "model.layers.activation2={_target_: torch.nn.Dropout}",
]  # fmt: skip
TWO = ["strategy=ddp", "launch.devices=2", "launch.accelerator=cpu"]


def curve(directory: Path, step: int) -> list[dict[str, float]]:
    with (directory / "landscape" / f"step_{step:06d}.csv").open() as file:
        return [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]


def by_hand(overrides: list[str]) -> list[dict[str, float]]:
    """The first step's curves, with the directions written out filter by filter."""
    config = exp.compose(overrides)
    plain = resolve(config).plain
    data = build_data(plain)
    net = build_network(plain, data.spec).double()
    loader = data.loader("train")
    loader.set_position(0, 0)
    inputs, target = next(iter(loader)).data
    generator = torch.Generator().manual_seed(seed_for(plain["seed"], "landscape", 1))
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    cross_entropy(net(inputs.double()), target).backward()
    across, total, slope = {}, 0.0, 0.0
    for name, parameter in net.named_parameters():
        across[name] = torch.zeros_like(start[name])
        if parameter.dim() > 1:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            for row, given, own in zip(across[name], drawn, start[name], strict=True):
                row.copy_(given * math.sqrt((own**2).sum()) / math.sqrt((given**2).sum()))
        total += (across[name] ** 2).sum().item()
        slope += (parameter.grad**2).sum().item()
    down = {name: -parameter.grad * math.sqrt(total / slope) for name, parameter in net.named_parameters()}
    rows = []
    for at in (-0.5, -0.25, 0.0, 0.25, 0.5):
        row = {"distance": at}
        for column, direction in (("against_gradient", down), ("random", across)):
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter.copy_(start[name] + at * direction[name])
                row[column] = cross_entropy(net(inputs.double()), target).item()
        rows.append(row)
    return rows


def test_the_curves_are_those_by_hand(ranks: Any) -> None:
    overrides = [*COMMAND, *SMALL, *HOOK, "precision=fp64", "trainer.max_steps=1"]
    found = curve(ranks.train(*overrides).directory, 1)
    for row, expected in zip(found, by_hand(overrides), strict=True):
        assert row == pytest.approx(expected, rel=1e-9)


@pytest.mark.parametrize("model", [[*SMALL, *RESTLESS], ["model=resnet"]])
@pytest.mark.any_processor
def test_the_run_is_untouched_bit_for_bit_and_the_middle_is_the_steps_own_loss(ranks: Any, model: list[str]) -> None:
    if model == ["model=resnet"]:
        model = [*model, "trainer.max_steps=2"]
    plain = ranks.train(*COMMAND, *model, "hooks=[]")
    found = ranks.train(*COMMAND, *model, *HOOK)
    assert found.losses == plain.losses
    expected = plain.checkpoint()["state_dict"]
    assert any("running_mean" in name for name in expected)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in found.checkpoint()["state_dict"].items())
    steps = [step for step in (1, 2, 4) if step <= len(plain.losses)]
    for step in steps:
        middle = curve(found.directory, step)[2]
        assert middle == {"distance": 0.0, "against_gradient": plain.losses[step - 1], "random": plain.losses[step - 1]}
    assert len(list((found.directory / "landscape").iterdir())) == len(steps)


def test_ranks_micro_batches_and_a_loss_scale_change_nothing(ranks: Any) -> None:
    # 15 a batch, so that the two ranks hold 8 and 7.
    shared = ["data.batch_size=15", "trainer.accumulate_grad_batches=2", "trainer.max_steps=1"]
    whole = [*COMMAND, *SMALL, *HOOK]
    one = curve(ranks.train(*whole, *shared).directory, 1)
    two = curve(ranks.train(*whole, *shared, *TWO, "precision=fp16", ranks=2).directory, 1)
    for row, expected in zip(two, one, strict=True):
        assert row == pytest.approx(expected, rel=1e-2)


def test_a_random_direction_has_the_norm_of_each_filter_and_none_for_biases() -> None:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(3, 4, 5), nn.BatchNorm2d(4), nn.Linear(6, 2))
    parameters = dict(net.named_parameters())
    found = random_direction(parameters, generator=torch.Generator().manual_seed(1))
    for name in ("0.weight", "2.weight"):
        for own, drawn in zip(parameters[name], found[name], strict=True):
            assert drawn.norm().item() == pytest.approx(own.norm().item(), rel=1e-5)
    assert all(not found[name].any() for name in ("0.bias", "1.weight", "1.bias", "2.bias"))
    down = downhill({name: torch.ones_like(one) for name, one in parameters.items()}, found)
    assert length(down).item() == pytest.approx(length(found).item())
    assert down["0.weight"].amax().item() < 0
    assert length(downhill(dict.fromkeys(parameters), found)).item() == 0.0


@pytest.mark.parametrize("values", [[1.0, 2.0, 3.0], [1.0, math.nan, 3.0], [2.0, 2.0, 2.0], [1e-3, 1.0, 1e6]])
def test_a_picture_holds_each_curve(values: list[float]) -> None:
    picture = curves(
        [-1.0, 0.0, 1.0], {"one": values, "other": [value + 1 for value in values]}, title="loss", along="distance"
    )
    assert picture.dtype == np.uint8
    for colour in COLOURS[:2]:
        assert (picture == colour).all(-1)[38:].any()
    lost = curves([0.0, 1.0], {"one": [math.inf, math.nan]}, title="loss", along="distance")
    assert not (lost == COLOURS[0]).all(-1)[38:].any()


@pytest.mark.any_processor
@pytest.mark.parametrize(
    ("overrides", "messages"),
    [
        (["hooks.landscape.points=4"], ["hooks.landscape.points: 4; expected an odd number"]),
        (["hooks.landscape.distance=0"], ["hooks.landscape.distance: 0; expected a number above 0"]),
        (
            [*TWO, "strategy=fsdp"],
            ["ranks hold parts of them"],
        ),
        (
            [*TWO, "objective.cross_entropy.loss.ignore_index=3", "+objective=[jacobian]"],
            ["a rank's loss is no share of it", "an objective that needs"],
        ),
    ],
)
def test_what_cannot_be_is_told_before_the_run(
    tmp_path, monkeypatch, overrides: list[str], messages: list[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ConfigError) as caught:
        exp.validate(exp.compose([*COMMAND, *HOOK, *overrides]))
    for message in messages:
        assert message in str(caught.value)
