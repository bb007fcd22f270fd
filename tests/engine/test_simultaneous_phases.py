"""Simultaneous phases equal the loop of PyTorch's AMP notes: one forward, both backwards, then both steps.

https://docs.pytorch.org/docs/stable/notes/amp_examples.html#working-with-multiple-models-losses-and-optimizers
"""

from __future__ import annotations

import functools
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from exp.data.data import Data
from exp.data.in_memory import Tensors
from exp.engine.phased_module import PhasedModule
from exp.objectives.objective import Term
from exp.optim.optimizer import Optimization
from exp.optim.phase import Phase

pytestmark = pytest.mark.numeric
OPTIMIZERS = {
    "first": functools.partial(torch.optim.SGD, lr=0.05, momentum=0.9),
    "second": functools.partial(torch.optim.SGD, lr=0.02),
}


class Two(nn.Module):
    """Two models with the same input. Both losses use both outputs, and the first model has a BatchNorm."""

    def __init__(self, inf_at: int | None = None) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first = nn.Sequential(nn.Linear(6, 4), nn.BatchNorm1d(4), nn.Tanh(), nn.Linear(4, 2))
        self.second = nn.Linear(6, 2)
        self.calls, self.inf_at = 0, inf_at

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        one, two = self.first(x), self.second(x)
        self.calls += self.training
        if self.calls == self.inf_at and self.training:
            two.register_hook(lambda gradient: gradient * float("inf"))
        return {"output": one, "sum": 2 * one + 3 * two, "difference": 3 * one - 5 * two}


def phases(terms: dict[str, list[str]]) -> list[Phase]:
    return [
        Phase(
            name=name,
            terms=own,
            parameters=[f"{name}.*"],
            optimization=Optimization(optimizer_factory=OPTIMIZERS[name]),
            owns_optimizer=True,
            simultaneous=name == "second",
        )
        for name, own in terms.items()
    ]


def run(small_run: ModuleType, directory: Path, terms: dict[str, list[str]], **settings: Any) -> tuple[Any, Any]:
    seen, dtype = small_run.Batches(), settings.pop("dtype")
    inputs = small_run.samples(96)[0].to(dtype)
    targets = inputs[:, :2].sin()
    small = small_run.Small(
        directory,
        module=functools.partial(PhasedModule, phases=phases(terms)),
        data=Data(
            train=Tensors(entries=(inputs, targets)),
            val=Tensors(entries=(inputs[:16], targets[:16])),
            keeps_doubles=True,
            batch_size=16,
            num_outputs=2,
        ),
        model=settings.pop("model", None) or Two().to(dtype),
        terms={"a": Term(loss=nn.MSELoss(), output="sum"), "b": Term(loss=nn.MSELoss(), output="difference")},
        metrics={},
        max_epochs=3,
        callbacks=(seen,),
        **settings,
    )
    small.fit()
    return small, [data for _, _, data in seen.seen]


def by_hand(
    batches: list[tuple[Tensor, Tensor]], terms: dict[str, list[str]], network: Two, *, count: int, scaled: bool
) -> Two:
    optimizers = {name: make(getattr(network, name).parameters()) for name, make in OPTIMIZERS.items()}
    scaler = torch.amp.GradScaler("cpu", enabled=scaled)
    for start in range(0, len(batches), count):
        for one in optimizers.values():
            one.zero_grad()
        for x, target in batches[start : start + count]:
            with torch.autocast("cpu", torch.float16, enabled=scaled):
                values = network(x)
            wide = {name: value.float() if scaled else value for name, value in values.items()}
            losses = {
                "a": nn.functional.mse_loss(wide["sum"], target) / count,
                "b": nn.functional.mse_loss(wide["difference"], target) / count,
            }
            for name, own in terms.items():
                parameters = list(getattr(network, name).parameters())
                loss = sum(losses[term] for term in own)
                for parameter, gradient in zip(
                    parameters, torch.autograd.grad(scaler.scale(loss), parameters, retain_graph=True), strict=True
                ):
                    parameter.grad = gradient if parameter.grad is None else parameter.grad + gradient
        for one in optimizers.values():
            scaler.step(one)
        scaler.update()
    return network


BOTH = {"first": ["a", "b"], "second": ["a", "b"]}
OWN = {"first": ["a"], "second": ["b"]}


@pytest.mark.parametrize("terms", [BOTH, OWN], ids=["notes", "own_losses"])
@pytest.mark.parametrize("count", [1, 3])
def test_it_equals_the_loop_by_hand(
    tmp_path: Path, small_run: ModuleType, terms: dict[str, list[str]], count: int
) -> None:
    dtype = torch.float64
    small, seen = run(small_run, tmp_path, terms, dtype=dtype, accumulate_grad_batches=count)
    network = by_hand(seen, terms, Two().to(dtype), count=count, scaled=False)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(small.weights()[name], tensor, rtol=0, atol=1e-12)
    assert int(small.weights()["first.1.num_batches_tracked"]) == len(seen)


def test_it_does_so_with_one_loss_scale_where_one_optimizer_skips_a_step(tmp_path: Path, small_run: ModuleType) -> None:
    small, seen = run(small_run, tmp_path, OWN, dtype=torch.float32, word="fp16", model=Two(inf_at=4))
    network = by_hand(seen, OWN, Two(inf_at=4), count=1, scaled=True)
    for name, tensor in network.state_dict().items():
        torch.testing.assert_close(small.weights()[name], tensor, rtol=1e-4, atol=1e-5)
