"""A forward that changes more than the numbers of buffers is found, however the network holds what changes."""

import pytest
import torch
from torch import nn

from exp.models.kept_state import KeptState, written_parameters


class Held:
    calls = 0


def counter():
    calls = 0

    def count():
        nonlocal calls
        calls += 1

    return count


class Keeping(nn.Module):
    """Changes, in its forward, the part of itself that `what` names."""

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


class Writing(nn.Module):
    """Writes into its parameters, in its forward, as `how` says."""

    def __init__(self, how):
        super().__init__()
        self.how, self.is_new = how, True
        self.line, self.words = nn.Linear(2, 2), nn.Embedding(5, 2, max_norm=1.0 if how == "max_norm" else None)

    def forward(self, x, words):
        weight, bias = self.line.weight, self.line.bias
        with torch.no_grad():
            match self.how:
                case "clamp":
                    weight.clamp_(-0.1, 0.1)
                case "data":
                    weight.data.clamp_(-0.1, 0.1)
                case "view":
                    weight.data[0].mul_(0.9)
                case "replaced":
                    weight.data = weight / weight.norm()
                case "several":
                    torch._foreach_mul_([weight, bias], 0.9)
                case "out":
                    torch.mul(weight, 0.9, out=weight)
                case "noise":
                    weight.add_(torch.randn_like(weight))
                case "mean":
                    bias.lerp_(x.mean(0), 0.1)
                case "first" if self.is_new:
                    bias.data.copy_(-x.mean(0))
                    self.is_new = False
                case "data_mean":
                    bias.data = bias - self.line(x).mean(0)
        return self.line(x) + self.words(words)


@pytest.mark.parametrize(
    ("how", "expected"),
    [
        ("nothing", {}),
        ("max_norm", {"words.weight": True}),
        ("clamp", {"line.weight": False}),
        ("data", {"line.weight": False}),
        ("view", {"line.weight": False}),
        ("replaced", {"line.weight": False}),
        ("several", {"line.weight": False, "line.bias": False}),
        ("out", {"line.weight": False}),
        ("noise", {"line.weight": True}),
        ("mean", {"line.bias": True}),
        ("first", {"line.bias": True}),
        ("data_mean", {"line.bias": True}),
    ],
)
@pytest.mark.parametrize("device", ["cpu", "meta"])
def test_parameters_that_a_forward_writes_are_named(how, expected, device):
    with torch.device(device):
        network, inputs = Writing(how), (torch.ones(4, 2), torch.zeros(4, dtype=torch.int64))
    assert written_parameters(network, lambda: network(*inputs), inputs) == expected
