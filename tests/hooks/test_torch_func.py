"""Layers and terms by torch.func beside hooks: they run as without, and what transforms work on is nobody's output."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

import exp
from exp.hooks.hook import is_transformed
from exp.hooks.memory import MIB
from exp.hooks.saved_tensors import Kept, SavedTensors

pytestmark = pytest.mark.numeric
SMALL = [
    *("data=wine", "trainer.max_steps=3", "trainer.max_epochs=1", "test=false", "optimizer=sgd", "precision=fp64"),
    *("logger=[]", "trainer.limit_val_batches=1", "metrics=[]"),
]
ENERGY = (
    "model={_target_: exp.models.containers.SequentialModel, layers: {energy: {_target_: functional.GradientOfEnergy, "
    "size: 13, width: 8}, head: {_target_: torch.nn.Linear, out_features: 3}}}"
)


@pytest.fixture(autouse=True)
def importable(monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    monkeypatch.chdir(tmp_path)


@pytest.mark.any_processor
@pytest.mark.parametrize("how", ["vmap", "jacrev", "hessian", "vjp"])
def test_a_run_with_the_default_hooks_and_activations_is_the_one_without_hooks(how) -> None:
    found = []
    for hooks in ("[]", "[gradients,memory,throughput,activations]"):
        term = f"+objective.derivative={{_target_: functional.Derivative, how: {how}}}"
        config = exp.compose(
            [*SMALL, ENERGY, term, f"hooks={hooks}", "security.allow=[functional]", f"name=r{len(found)}"]
        )
        directory = Path(exp.fit(config).directory)
        found.append(torch.load(directory / "checkpoints" / "last.ckpt", weights_only=True)["state_dict"])
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_what_is_saved_within_a_transform_is_not_counted_and_the_rest_is() -> None:
    reports: list[Kept] = []
    layer, head = (
        importlib.import_module("functional").GradientOfEnergy(size=13, width=8).double(),
        nn.Linear(13, 3).double(),
    )
    x = torch.ones(5, 13, dtype=torch.float64)
    own = [*layer.parameters(), *head.parameters()]
    disabling = torch.autograd.graph.disable_saved_tensors_hooks
    with SavedTensors(lambda: own, {}, lambda kept, failed: reports.append(kept)):
        inner = layer(x)
        # Two transforms, one in the other, and afterwards the hooks are back.
        torch.func.jacrev(torch.func.grad(lambda one: one.sin().sum()))(x[0])
        loss = head(inner).exp().sum()
    assert torch.autograd.graph.disable_saved_tensors_hooks is disabling
    # What the head keeps of its input, and exp of its result.
    assert reports[0].by_module[head] == inner.nbytes
    assert reports[0].by_module[None] >= 5 * 3 * 8
    assert reports[0].size < MIB
    loss.backward()
    assert layer.inner.weight.grad is not None


def test_one_can_tell_a_tensor_within_a_transform() -> None:
    seen = []

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed(one))
        return one.sum()

    x = torch.ones(2, 3)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    assert seen == [False, True, True]
