"""A forward that changes state other than the numbers of buffers is found, for all kinds of attributes."""

import pytest
import torch
from torch import nn

from exp.models.kept_state import KeptState


class Held:
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1

    return count


class Keeping(nn.Module):
    """Module that changes one of its attributes in its forward; `what` names the attribute."""

    shared = 0

    def __init__(self, what):
        super().__init__()
        self.what, self.calls, self.seen, self.held, self.count = what, 0, [], {"a": (Held(),)}, counter()
        self.line, self.norm, self.plain = nn.Linear(2, 2), nn.BatchNorm1d(2), torch.zeros(2)
        self.register_buffer("mean", torch.zeros(2))
        self.unpicklable = lambda x: x

    @torch.no_grad()
    def forward(self, x):
        x = self.unpicklable(self.line(x))
        match self.what:
            case "nothing":
                self.norm(x)
                self.mean.mul_(0.9).add_(x.mean(0))
            case "mean":
                self.mean = 0.9 * self.mean + x.mean(0)
            case "calls":
                self.calls += 1
            case "seen":
                self.seen.append(x)
            case "held":
                self.held["a"][0].calls += 1
            case "count":
                self.count()
            case "shared":
                type(self).shared += 1
            case "plain":
                self.plain += 1
            case "line.weight":
                self.line.weight.clamp_(-0.1, 0.1)
            case "line.bias":
                self.line.bias.data = self.line.bias + 1
            case "norm.running_mean":
                self.norm.running_mean.data = x.mean(0)
        return x


NAMES = (
    "mean", "calls", "seen", "held", "count", "shared", "plain", "line.weight", "line.bias", "norm.running_mean",
)  # fmt: skip


@pytest.mark.parametrize("what", ["nothing", *NAMES])
def test_what_a_forward_changes_is_named(what):
    network = Keeping(what)
    kept = KeptState(network)
    network(torch.ones(4, 2))
    assert kept.changes() == [what] * (what != "nothing")
