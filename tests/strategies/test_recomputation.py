"""Recomputed activations: gradients and buffers equal those without recomputation, and other state is refused."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn

from exp.strategies.units import checkpoint_activations


class Running(nn.Module):
    """Layer that subtracts a running mean; `how` selects if it replaces or updates the buffer, or counts calls."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.calls = how, 0
        self.line = nn.Linear(4, 4)
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        x = self.line(x)
        before = self.mean.clone()
        if self.how == "replaces":
            self.mean = 0.9 * self.mean + x.detach().mean(0)
        elif self.how == "updates":
            self.mean.mul_(0.9).add_(x.detach().mean(0))
        else:
            self.calls += 1
        return (x - before).tanh()


@pytest.mark.parametrize(
    "layer",
    [
        nn.BatchNorm1d(4),
        nn.BatchNorm1d(4, momentum=None),
        nn.Sequential(nn.Unflatten(1, (2, 2)), nn.InstanceNorm1d(2, track_running_stats=True), nn.Flatten()),
        nn.utils.parametrizations.spectral_norm(nn.Linear(4, 4)),
        nn.Sequential(Running("replaces"), nn.BatchNorm1d(4)),
        Running("updates"),
    ],
)
@pytest.mark.parametrize("patterns", [["1"], ["1", "1.0"]])
def test_recomputed_layers_have_the_state_of_one_forward(layer: nn.Module, patterns: list[str]) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(3, 4), layer, nn.Linear(4, 1)).double()
    again = copy.deepcopy(plain)
    checkpoint_activations(one for name, one in again.named_modules() if name in patterns)
    for step in range(3):
        inputs = [torch.randn(5, 3, dtype=torch.float64, generator=torch.Generator().manual_seed(step)) for _ in "ab"]
        for network in (plain, again):
            network.zero_grad()
            # The second micro-batch runs before the backward of the first.
            losses = [network(x).square().sum() for x in inputs]
            sum(losses).backward()
            with torch.no_grad():
                for parameter in network.parameters():
                    parameter -= 0.1 * parameter.grad
        for (name, one), other in zip(plain.state_dict().items(), again.state_dict().values(), strict=True):
            torch.testing.assert_close(one, other, rtol=0, atol=1e-12, msg=name)
