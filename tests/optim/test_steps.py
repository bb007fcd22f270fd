"""A trial step refuses optimizers that cannot step in a run, and sparse gradients give the same step as in torch."""

from __future__ import annotations

import functools
from typing import Any

import pytest
import torch
from torch import nn

from exp.check.optimizer_steps import step_errors
from exp.optim.optimizer import Optimization


class AroundTheClosure(torch.optim.SGD):
    """Optimizer that ascends along the gradients and then calls the closure, as sharpness-aware minimization does."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        assert closure is not None, "it needs a closure"
        weights = [one for group in self.param_groups for one in group["params"]]
        for weight in weights:
            weight.add_(weight.grad)
        torch.enable_grad()(closure)()
        super().step()


class Twice(torch.optim.SGD):
    """Optimizer that calls the closure twice if it gets one."""

    def step(self, closure: Any) -> None:  # type: ignore[override]
        closure()
        super().step()
        closure()
        super().step()


class TwoSets(torch.optim.SGD):
    """Optimizer with methods train and eval, like schedule-free optimizers."""

    def train(self) -> None: ...

    def eval(self) -> None: ...


DENSE = nn.Sequential(nn.Linear(3, 3), nn.LayerNorm(3))
SPARSE = nn.Sequential(nn.Embedding(5, 3, sparse=True))
MIXED = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))


@pytest.mark.parametrize(
    ("kind", "network", "says"),
    [
        (torch.optim.AdamW, DENSE, None),
        (torch.optim.LBFGS, DENSE, None),
        (torch.optim.Adafactor, DENSE, None),
        (AroundTheClosure, DENSE, "gradients of the previous step"),
        (Twice, DENSE, None),
        (TwoSets, DENSE, "two sets of weights"),
        (torch.optim.SparseAdam, DENSE, "does not support dense gradients"),
        (torch.optim.SparseAdam, SPARSE, None),
        (torch.optim.SparseAdam, MIXED, "does not support dense gradients"),
        (torch.optim.Adam, MIXED, "sparse=true"),
        (torch.optim.SGD, MIXED, None),
        (torch.optim.Adagrad, MIXED, None),
    ],
)
def test_a_trial_step_decides_about_an_optimizer(
    kind: type[torch.optim.Optimizer], network: nn.Module, says: str | None
) -> None:
    optimization = Optimization(optimizer_factory=functools.partial(kind, lr=0.1))
    optimizer, _ = optimization.make(network, total_steps=3)
    errors = list(step_errors(optimization, network, optimizer, key="optimizer"))
    assert [says in str(error) for error in errors] == ([True] if says else [])


def test_an_optimizer_of_a_phase_has_no_closure() -> None:
    optimization = Optimization(optimizer_factory=functools.partial(Twice, lr=0.1))
    optimizer, _ = optimization.make(DENSE, total_steps=3)
    (error,) = step_errors(optimization, DENSE, optimizer, key="phases.a.optimizer", has_closure=False)
    assert error.key == "phases.a.optimizer._target_"
    assert "closure" in error.got


@pytest.mark.numeric
@pytest.mark.filterwarnings(
    "ignore:Sparse invariant checks are implicitly disabled"
)  # torch warns for any sparse embedding
@pytest.mark.parametrize("kind", [torch.optim.SGD, torch.optim.Adagrad])
def test_sparse_gradients_are_stepped_without_fused(kind: type[torch.optim.Optimizer]) -> None:
    def trained(make: Any) -> dict[str, torch.Tensor]:
        torch.manual_seed(0)
        network = nn.Sequential(nn.Embedding(5, 3, sparse=True), nn.Linear(3, 2))
        optimizer = make(network)
        for _ in range(3):
            optimizer.zero_grad()
            network(torch.tensor([0, 2, 2])).square().sum().backward()
            optimizer.step()
        return network.state_dict()

    own = trained(lambda network: Optimization(optimizer_factory=functools.partial(kind, lr=0.1)).make(
        network, total_steps=3)[0])  # fmt: skip
    torchs = trained(lambda network: kind(network.parameters(), lr=0.1))
    assert all(torch.equal(own[name], tensor) for name, tensor in torchs.items())
