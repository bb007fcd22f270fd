"""Tests of domain-adversarial training from YAML, against the sum of the gradients of its two losses."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.nn.functional import cross_entropy

import exp
from exp.check.plan import resolve
from exp.construct import build_data, build_network

pytestmark = pytest.mark.numeric

SHORT = ["experiment=domain_adversarial", "metrics=[]", "hooks=[]", "logger=[]", "test=false", "monitor=loss/train"]
SHORT += ["trainer.limit_val_batches=0", "checkpoint.save_best=false", "mode=min"]
SGD = ["optimizer=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0", "optimizer.lr=0.1"]
STEPS = 4


def by_hand(command: list[str], weight: float) -> dict[str, torch.Tensor]:
    """Return the weights of training without gradient reversal, with the sign of the domain loss changed by hand."""
    plain = resolve(exp.compose(command)).plain
    plain["model"]["layers"]["reversal"] = {"_target_": "torch.nn.Identity"}
    data = build_data(plain)
    network = build_network(plain, data.spec).double()
    parameters = dict(network.named_parameters())
    loader = data.loader("train")
    loader.set_position(0, 0)
    for _, batch in zip(range(STEPS), loader, strict=False):
        output = network(batch.data["input"].double())
        classes = cross_entropy(output["output"], batch.data["target"], ignore_index=-100)
        domains = cross_entropy(output["domain_output"], batch.data["domain"])
        of = [
            torch.autograd.grad(loss, parameters.values(), retain_graph=True, allow_unused=True)
            for loss in (classes, domains)
        ]
        with torch.no_grad():
            for (name, parameter), one, other in zip(parameters.items(), *of, strict=True):
                sign = -weight if name.startswith("features") else 1.0
                parameter -= 0.1 * ((0 if one is None else one) + (0 if other is None else sign * other))
    return {name: parameter.detach() for name, parameter in parameters.items()}


def test_features_maximize_the_domain_loss(ranks: Any) -> None:
    command = [*SHORT, *SGD, f"trainer.max_steps={STEPS}", "model.layers.reversal.weight=0.7"]
    trained = ranks.train(*command)
    found = trained.checkpoint()["state_dict"]
    for name, tensor in by_hand(command, 0.7).items():
        torch.testing.assert_close(found[f"network.{name}"].double(), tensor, rtol=1e-4, atol=1e-6)
    assert set(trained.values) >= {"loss/train/cross_entropy", "loss/train/domain"}
