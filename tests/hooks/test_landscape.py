"""The hook landscape: its curve along the gradient equals one by hand."""

from __future__ import annotations

import csv

import pytest
import torch
from torch.nn.functional import cross_entropy

pytestmark = pytest.mark.numeric


def test_the_curve_along_the_gradient_equals_one_by_hand(fit, reference) -> None:
    run = ["model.layers.hidden.out_features=16", "model.layers.hidden2.out_features=12", "data.batch_size=24"]
    run += ["precision=fp64", "trainer.max_steps=1", "hooks=[landscape]", "hooks.landscape.points=5"]
    with (fit(*run).directory / "landscape" / "step_000001.csv").open() as file:
        found = [{name: float(value) for name, value in row.items()} for row in csv.DictReader(file)]
    net, batches = reference(*run)
    inputs, target = next(batches).data
    start = {name: parameter.detach().clone() for name, parameter in net.named_parameters()}
    cross_entropy(net(inputs.double()), target).backward()
    slope = sum(parameter.grad.square().sum() for parameter in net.parameters())
    weights = sum(one.square().sum() for one in start.values() if one.dim() > 1)
    for row, at in zip(found, (-0.5, -0.25, 0.0, 0.25, 0.5), strict=True):
        assert row["distance"] == at
        with torch.no_grad():
            for name, parameter in net.named_parameters():
                parameter.copy_(start[name] - at * parameter.grad * (weights / slope).sqrt())
            loss = cross_entropy(net(inputs.double()), target).item()
        assert row["against_gradient"] == pytest.approx(loss, rel=1e-9)
    # Along the random direction the curve meets the other one where the weights are, and there alone.
    assert [row["random"] == row["against_gradient"] for row in found] == [False, False, True, False, False]
