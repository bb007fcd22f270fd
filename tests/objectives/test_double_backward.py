"""Tests of gradient penalties in training, with mixed precision and several ranks, compared with float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

import exp
from exp.check.resolution import resolve
from exp.construct import build_data, build_network

pytestmark = pytest.mark.numeric

QUIET = ["metrics=[]", "hooks=[]", "logger=[]", "test=false", "trainer.limit_val_batches=0"]
QUIET += ["checkpoint.save_best=false", "monitor=loss/train"]
PLAIN_SGD = ["optimizer=sgd", "optimizer.momentum=0.0", "optimizer.weight_decay=0.0"]
# One step of plain SGD with learning rate 1 changes the weights by the gradient.
ONE_STEP = [*QUIET, *PLAIN_SGD, "optimizer.lr=1.0", "trainer.max_steps=1"]
EXACT = {"r1": [], "jacobian": ["objective.jacobian.projections=null"]}


def by_hand(command: list[str], term: str) -> tuple[float, dict[str, Tensor], dict[str, Tensor]]:
    """Return the penalty of the first batch in float64, its gradient by parameter, and the parameters."""
    settings = resolve(exp.compose(command)).settings
    data = build_data(settings)
    network = build_network(settings, data.spec).double()
    x = next(iter(data.loader("train"))).data[0].double().requires_grad_()
    with sdpa_kernel(SDPBackend.MATH):
        output = network(x)
        columns = [output.sum()] if term == "r1" else [column.sum() for column in output.unbind(1)]
        slopes = [torch.autograd.grad(column, x, create_graph=True)[0].flatten(1) for column in columns]
        value = sum(slope.square().sum(1) for slope in slopes).mean()
        value.backward()
    named = dict(network.named_parameters())
    gradients = {name: torch.zeros_like(p) if p.grad is None else p.grad for name, p in named.items()}
    return value.item(), gradients, {name: p.detach() for name, p in named.items()}


@pytest.mark.parametrize(
    ("model", "term", "word"),
    [
        ("sequential", "r1", "fp32"),
        ("sequential", "jacobian", "fp16"),
        ("transformer", "r1", "bf16"),
        pytest.param("rnn", "jacobian", "fp32", marks=pytest.mark.slow),
        pytest.param("lenet", "r1", "bf16", marks=pytest.mark.slow),
    ],
)
def test_penalties_and_gradients_equal_those_of_float64(ranks: Any, model: str, term: str, word: str) -> None:
    command = [f"model={model}", f"objective=[{term}]", f"objective.{term}.weight=1.0", *EXACT[term], *ONE_STEP]
    command += [f"precision={word}"]
    trained = ranks.train(*command)
    value, gradients, before = by_hand(command, term)
    after = trained.checkpoint()["state_dict"]
    most = {"fp32": 1e-5, "fp16": 1e-2, "bf16": 3e-2}[word]
    assert trained.losses[0] == pytest.approx(value, rel=most)
    found = {name: before[name] - after[f"network.{name}"].double() for name in gradients}
    error = norm({name: found[name] - gradients[name] for name in gradients})
    assert error < most * norm(gradients)


def norm(tensors: dict[str, Tensor]) -> float:
    return torch.stack([tensor.norm() for tensor in tensors.values()]).norm().item()


@pytest.mark.parametrize(("word", "most"), [("fp32", 1e-5), pytest.param("fp16", 5e-3, marks=pytest.mark.slow)])
def test_penalties_of_ranks_equal_those_of_one_process(ranks: Any, word: str, most: float) -> None:
    # 60 samples in batches of 25: three ranks have 9, 8 and 8 samples of a batch, and 4, 3 and 3 of the last one.
    command = ["objective=[cross_entropy,r1,jacobian]", "objective.r1.weight=0.5", *EXACT["jacobian"], *QUIET]
    command += [*PLAIN_SGD, "data.batch_size=25", "data.parts.train=60", "trainer.max_epochs=3", f"precision={word}"]
    command += ["trainer.accumulate_grad_batches=2", "trainer.gradient_clip_val=0.5", "optimizer.lr=0.05"]
    alone = ranks.train(*command)
    shared = ranks.train(*command, "strategy=ddp", "launch.devices=3", "launch.accelerator=cpu", ranks=3)
    for tag in ("loss/train", "loss/train/r1", "loss/train/jacobian"):
        assert shared.values[tag] == pytest.approx(alone.values[tag], rel=most)
    weights = alone.checkpoint()["state_dict"]
    for name, tensor in shared.checkpoint()["state_dict"].items():
        torch.testing.assert_close(tensor, weights[name], rtol=0, atol=most)


def test_evaluation_has_the_terms_of_training(ranks: Any) -> None:
    command = ["+objective=[r1,consistency]", "objective.r1.weight=2.0", "objective.consistency.weight=3.0"]
    trained = ranks.train("model=mlp", *command, "trainer.max_epochs=1", "hooks=[memory]", "trainer.max_steps=3")
    for stage in ("val", "test"):
        loss, ce, r1, consistency = (
            trained.report["metrics"][f"loss/{stage}{name}"] for name in ("", "/cross_entropy", "/r1", "/consistency")
        )
        assert r1 > 0
        assert consistency == 0.0
        assert loss == pytest.approx(ce + 2.0 * r1, rel=1e-5)
    assert trained.report["metrics"]["loss/train/consistency"] > 0
