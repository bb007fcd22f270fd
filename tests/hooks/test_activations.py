"""The figures of the hook activations equal NumPy's over all calls, micro-batches and ranks."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from exp.extras.debugging.activations import Activations, figures, merge_figures
from exp.hooks.panels import Column, Histogram

pytestmark = pytest.mark.numeric


@pytest.fixture
def measured(step):
    """A function that runs one micro-batch per input, and returns the values that the hook logs for the step."""

    def measure(network, *inputs, **settings):
        hook = Activations(each_layer=True, **settings)
        hook.attach(network)
        now = step(network)
        for one in inputs:
            hook.passed("batch", now)
            with hook.engaged():
                network(one)
        found = hook.after_step(now) or {}
        hook.detach()
        scalars = {tag: value.item() for tag, value in found.items() if isinstance(value, torch.Tensor)}
        # The columns of the heat maps have the same numbers as the scalars.
        assert scalars == {
            f"{tag}/{name}": number
            for tag, column in found.items()
            if isinstance(column, Column)
            for name, number in zip(column.names, column.values.tolist(), strict=True)
        }
        return scalars | {tag: value for tag, value in found.items() if isinstance(value, Histogram)}

    return measure


def expected(name: str, entries: np.ndarray, units: np.ndarray) -> dict[str, float]:
    """Return the values by tag, from all entries of an output, and from the same entries as `[C, ...]`."""
    entries = entries.astype(np.float64)
    return {
        f"activations/mean/{name}": entries.mean(),
        f"activations/std/{name}": entries.std(),
        f"activations/zeros/{name}": (entries == 0).mean(),
        f"activations/dead_units/{name}": 1 - np.mean([unit.any() for unit in units]),
    }


def test_figures_over_micro_batches_equal_numpys(measured):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 9), nn.ReLU())
    with torch.no_grad():
        net[0].bias[:2] = -10.0  # two channels and one feature are never above zero
        net[3].bias[4] = -100.0
    inputs = [torch.randn(5, 1, 8, 8), torch.randn(3, 1, 8, 8) + 1]
    found = measured(net, *inputs, modules=["1", "4"])
    with torch.no_grad():
        maps = torch.cat([net[:2](one) for one in inputs]).numpy()
        features = torch.cat([net(one) for one in inputs]).numpy()
    reference = expected("1", maps, maps.swapaxes(0, 1)) | expected("4", features, features.T)
    assert found == pytest.approx(reference, rel=1e-6)
    assert found["activations/dead_units/1"] == pytest.approx(2 / 6)
    assert found["activations/dead_units/4"] > 0.1


def test_a_star_matches_layers_without_containers(measured):
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    assert {tag.rpartition("/")[2] for tag in measured(net, torch.randn(8, 4))} == {"0", "1.0"}
    assert "activations/mean/1" in measured(net, torch.randn(8, 4), modules=["1"])
    assert "activations/mean/network" in measured(net[0], torch.randn(8, 4))
    histogram = measured(net, torch.randn(3, 4), histogram=True)["activations/histogram/0"]
    assert histogram.counts.sum() == 12


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_parts_merge_exactly_far_from_zero(dtype):
    values = (1000 + torch.randn(1000, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = merge_figures([figures(part, nn.Identity()) for part in values.split([1, 399, 600])])
    exact = values.double().numpy()
    assert whole[1].item() == pytest.approx(exact.mean(), rel=1e-6)
    assert (whole[2] / whole[0]).sqrt().item() == pytest.approx(exact.std(), rel=1e-4)


@pytest.mark.parametrize(
    ("module", "inputs", "share"),
    [
        (nn.Tanh(), [-5.0, -2.4, -1.0, 0.0, 1.0, 2.0, 2.4, 9.0], 4 / 8),  # tanh(2.0) is 0.964, tanh(2.4) 0.984
        (nn.Sigmoid(), [-9.0, -4.5, 0.0, 4.7], 2 / 4),  # sigmoid(-4.5) is 0.011, sigmoid(4.7) 0.991
        (nn.Softsign(), [-100.0, 0.0, 10.0, 60.0], 2 / 4),
        (nn.Hardsigmoid(), [-4.0, -2.0, 2.0, 3.0], 2 / 4),
        (nn.Hardtanh(-2.0, 4.0), [-3.0, -2.0, -1.9, 3.9, 4.0], 3 / 5),
        (nn.ReLU6(), [-1.0, 0.0, 5.0, 6.0, 7.0], 2 / 5),
    ],
)
def test_saturation_is_the_share_at_a_bound(measured, module, inputs, share):
    found = measured(nn.Sequential(module), torch.tensor(inputs)[None])
    assert found["activations/saturated/0"] == pytest.approx(share)


def test_only_bounded_modules_saturate(measured):
    for module in (nn.ReLU(), nn.Softmax(dim=1)):
        assert not [tag for tag in measured(nn.Sequential(module), torch.randn(2, 3)) if "saturated" in tag]


def test_units_of_a_sequence_are_its_features(measured):
    values = torch.zeros(2, 3, 4)
    values[0, 1, 2] = 1.0
    net = nn.Sequential(nn.Identity())
    assert measured(net, values)["activations/dead_units/0"] == pytest.approx(3 / 4)


class Twice(nn.Module):
    """Network that uses one activation after two layers of different widths, with an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 6), nn.Linear(6, 3), nn.ReLU()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        return {"output": self.lstm(self.act(self.second(self.act(self.first(x))))[:, None])}


def test_all_calls_of_a_module_count(measured):
    torch.manual_seed(0)
    net, inputs = Twice(), torch.randn(16, 4)
    found = measured(net, inputs, modules=["act", "lstm"])
    with torch.no_grad():
        wide = net.act(net.first(inputs))
        narrow = net.act(net.second(wide))
        output = net(inputs)["output"][0]
    entries = np.concatenate([wide.numpy().ravel(), narrow.numpy().ravel()])
    units = [*wide.T.numpy(), *narrow.T.numpy()]
    reference = expected("act", entries, units) | expected("lstm", output.numpy(), output.numpy().reshape(-1, 2).T)
    assert found == pytest.approx(reference, rel=1e-6)


def test_nothing_is_measured_when_not_due(step):
    net = nn.Sequential(nn.Linear(4, 4))
    hook = Activations()
    hook.attach(net)
    net(torch.randn(2, 4))
    assert hook.after_step(step(net)) is None
    assert hook.due(100)
    assert not hook.due(99)
