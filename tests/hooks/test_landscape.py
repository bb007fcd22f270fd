"""The hook landscape: its curves equal those by hand."""

from __future__ import annotations

import csv
import math

import pytest
import torch
from torch.nn.functional import cross_entropy

import exp
from exp.data.randomness import seed_for

pytestmark = pytest.mark.numeric


def test_the_curves_equal_those_by_hand(fit, reference) -> None:
    run = ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "data.batch_size=24"]
    run += ["precision=fp64", "trainer.max_steps=1", "hooks=[landscape]", "hooks.landscape.points=5"]
    with (fit(*run).directory / "landscape" / "step_000001.csv").open() as file:
        found = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    net, batches = reference(*run)
    inputs, target = next(batches).data
    generator = torch.Generator().manual_seed(seed_for(exp.compose(run).seed, "landscape", 1))
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    cross_entropy(net(inputs.double()), target).backward()
    across, total, slope = {}, 0.0, 0.0
    for name, parameter in net.named_parameters():
        across[name] = torch.zeros_like(start[name])
        if parameter.dim() > 1:
            drawn = torch.randn(parameter.shape, generator=generator, dtype=torch.float64)
            across[name] = drawn * start[name].norm(dim=1, keepdim=True) / drawn.norm(dim=1, keepdim=True)
        total += across[name].square().sum().item()
        slope += parameter.grad.square().sum().item()
    down = {name: -parameter.grad * math.sqrt(total / slope) for name, parameter in net.named_parameters()}
    for row, at in zip(found, (-0.5, -0.25, 0.0, 0.25, 0.5), strict=True):
        assert row["distance"] == at
        for column, direction in (("against_gradient", down), ("random", across)):
            with torch.no_grad():
                for name, parameter in net.named_parameters():
                    parameter.copy_(start[name] + at * direction[name])
                loss = cross_entropy(net(inputs.double()), target).item()
            assert row[column] == pytest.approx(loss, rel=1e-9)
