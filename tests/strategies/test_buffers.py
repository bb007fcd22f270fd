"""Validation and checkpoints use the buffers of rank 0 with every strategy, also with phases and averages."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve

NETWORK = (
    "{_target_: torch.nn.Sequential, _args_: [{_target_: torch.nn.Flatten}, {_target_: torch.nn.Linear, in_features: "
    "64, out_features: 8}, {_target_: torch.nn.BatchNorm1d, num_features: 8}, {_target_: torch.nn.Linear, "
    "in_features: 8, out_features: 10}]}"
)
SETTINGS = (
    *(f"model={NETWORK}", "precision=fp64", "optimizer=sgd", "data.batch_size=301", "trainer.max_epochs=1"),
    *("test=false", "logger=[]", "hooks=[]", "metrics=[]"),
)
PHASES = "+phases.all={terms: [cross_entropy], parameters: '*'}"


@pytest.mark.parametrize(
    ("options", "count"),
    [
        (("strategy=ddp",), 2),
        (("strategy=ddp", PHASES), 3),
        (("strategy=ddp", PHASES, "callbacks=[ema]", "strategy.broadcast_buffers=false"), 2),
        (("strategy=ddp", "callbacks=[ema]", "strategy.broadcast_buffers=false"), 2),
        (("strategy=fsdp", "callbacks=[ema]"), 2),
    ],
)
@pytest.mark.any_processor
def test_the_saved_network_has_the_validated_loss(ranks: Any, options: tuple[str, ...], count: int) -> None:
    run = ranks.train(*SETTINGS, *options, ranks=count)
    network = exp.load(run.directory).network("last").eval()
    batches = [batch.data for batch in plan(resolve(exp.compose(list(SETTINGS)))).data.loader("val")]
    inputs, targets = (torch.cat(parts) for parts in zip(*batches, strict=True))
    with torch.no_grad():
        expected = nn.functional.cross_entropy(network(inputs.double()), targets).item()
    (found,) = run.values["loss/val"].values()
    assert found == pytest.approx(expected, rel=0, abs=1e-12)
