"""Hooks do not change layers and terms that use torch.func, and ignore tensors within a transform."""

from __future__ import annotations

import importlib
from pathlib import Path

import pytest
import torch
from torch import nn

from exp.hooks.hook import is_transformed
from exp.hooks.memory import MIB
from exp.hooks.saved_tensors import Kept, SavedTensors

pytestmark = pytest.mark.numeric
SMALL = ["data=wine", "trainer.max_steps=3", "optimizer=sgd", "precision=fp64", "security.allow=[functional]"]
ENERGY = (
    "model={_target_: exp.models.containers.SequentialModel, layers: {energy: {_target_: functional.GradientOfEnergy, "
    "size: 13, width: 8}, head: {_target_: torch.nn.Linear, out_features: 3}}}"
)


@pytest.fixture(autouse=True)
def importable(monkeypatch, in_tmp):
    monkeypatch.syspath_prepend(str(Path(__file__).parent))


@pytest.mark.any_processor
@pytest.mark.parametrize("how", ["hessian", *(pytest.param(one, marks=pytest.mark.slow) for one in ("vmap", "vjp"))])
def test_hooks_change_no_bit_of_transforms(fit, how) -> None:
    term = f"+objective.derivative={{_target_: functional.Derivative, how: {how}}}"
    found = [
        fit(*SMALL, ENERGY, term, f"hooks={hooks}").checkpoint()["state_dict"]
        for hooks in ("[]", "[gradients,memory,throughput,activations]")
    ]
    assert all(torch.equal(found[0][name], found[1][name]) for name in found[0])


def test_tensors_saved_within_a_transform_do_not_count() -> None:
    reports: list[Kept] = []
    layer = importlib.import_module("functional").GradientOfEnergy(size=13, width=8).double()
    head = nn.Linear(13, 3).double()
    x = torch.ones(5, 13, dtype=torch.float64)
    disabling = torch.autograd.graph.disable_saved_tensors_hooks
    with SavedTensors(nn.ModuleList([layer, head]), (), lambda kept, failed: reports.append(kept)):
        inner = layer(x)
        # The hooks are active again after nested transforms.
        torch.func.jacrev(torch.func.grad(lambda one: one.sin().sum()))(x[0])
        loss = head(inner).exp().sum()
    assert torch.autograd.graph.disable_saved_tensors_hooks is disabling
    # The head keeps its input, and exp() keeps its result.
    assert reports[0].by_module[head] == inner.nbytes
    assert reports[0].by_module[None] >= 5 * 3 * 8
    assert reports[0].size < MIB
    loss.backward()
    assert layer.inner.weight.grad is not None


def test_a_tensor_within_a_transform_is_recognized() -> None:
    seen = []

    def look(one: torch.Tensor) -> torch.Tensor:
        seen.append(is_transformed(one))
        return one.sum()

    x = torch.ones(2, 3)
    look(x)
    torch.func.grad(look)(x)
    torch.func.vmap(look)(x)
    assert seen == [False, True, True]
