"""Figures of activations: NumPy's over the same entries, over calls, micro-batches and ranks together."""

from __future__ import annotations

import numpy as np
import pytest
import torch
from torch import nn

from exp.errors import RunError
from exp.hooks.activations import Activations, figures, merged, saturation
from exp.hooks.panels import Column, Histogram
from exp.hooks.step import Step
from exp.strategies.model_parallel import gather_ranks

pytestmark = pytest.mark.numeric


def step_of(network, **settings) -> Step:
    return Step(index=1, network=network, optimizers=[], batch_size=8, device=torch.device("cpu"), **settings)


def measured(network, *inputs, **settings):
    """What the hook gives for a step with a micro-batch for each of `inputs`."""
    hook = Activations(each_layer=True, **settings)
    hook.attach(network)
    step = step_of(network)
    for one in inputs:
        hook.passed("batch", step)
        with hook.engaged():
            network(one)
    found = hook.after_step(step)
    hook.detach()
    return numbers_of(found or {})


def numbers_of(found):
    """The numbers, and the histograms; the columns of heat maps hold the same ones."""
    scalars = {tag: value.item() for tag, value in found.items() if isinstance(value, torch.Tensor)}
    columns = {tag: value for tag, value in found.items() if isinstance(value, Column)}
    of_columns = {
        f"{tag}/{name}": number
        for tag, column in columns.items()
        for name, number in zip(column.names, column.values.tolist(), strict=True)
    }
    assert of_columns == scalars
    return scalars | {tag: value for tag, value in found.items() if isinstance(value, Histogram)}


def expected(name: str, entries: np.ndarray, units: np.ndarray) -> dict[str, float]:
    """entries: all; units: `[C, ...]`."""
    entries = entries.astype(np.float64)
    return {
        f"activations/mean/{name}": entries.mean(),
        f"activations/std/{name}": entries.std(),
        f"activations/zeros/{name}": (entries == 0).mean(),
        f"activations/dead_units/{name}": 1 - np.mean([unit.any() for unit in units]),
    }


def network() -> nn.Sequential:
    torch.manual_seed(0)
    net = nn.Sequential(nn.Conv2d(1, 6, 3), nn.ReLU(), nn.Flatten(), nn.Linear(216, 9), nn.ReLU())
    with torch.no_grad():
        net[0].bias[:2] = -10.0  # two channels and one feature that are never above zero
        net[3].bias[4] = -100.0
    return net


def test_over_two_micro_batches_the_figures_are_numpys_over_both():
    net = network()
    inputs = [torch.randn(5, 1, 8, 8), torch.randn(3, 1, 8, 8) + 1]
    found = measured(net, *inputs, modules=["1", "4"])
    with torch.no_grad():
        maps = torch.cat([net[:2](one) for one in inputs]).numpy()
        features = torch.cat([net(one) for one in inputs]).numpy()
    reference = expected("1", maps, maps.swapaxes(0, 1)) | expected("4", features, features.T)
    assert found == pytest.approx(reference, rel=1e-6)
    assert found["activations/dead_units/1"] == pytest.approx(2 / 6)
    assert found["activations/dead_units/4"] > 0.1


def test_a_star_is_the_layers_and_a_container_is_measured_where_it_is_named():
    net = nn.Sequential(nn.Linear(4, 4), nn.Sequential(nn.ReLU()))
    names = {tag.rpartition("/")[2] for tag in measured(net, torch.randn(8, 4))}
    assert names == {"0", "1.0"}
    assert "activations/mean/1" in measured(net, torch.randn(8, 4), modules=["1"])
    assert "activations/mean/network" in measured(net[0], torch.randn(8, 4))


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_parts_are_put_together_without_loss_however_far_the_mean_is_from_zero(dtype):
    values = (1000 + torch.randn(1000, 7, generator=torch.Generator().manual_seed(0))).to(dtype)
    whole = merged([figures(part, nn.Identity()) for part in values.split([1, 399, 600])])
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
def test_saturation_is_the_share_at_a_bound(module, inputs, share):
    found = measured(nn.Sequential(module), torch.tensor(inputs)[None])
    assert found["activations/saturated/0"] == pytest.approx(share)


def test_of_a_softmax_a_distribution_is_saturated_and_what_is_not_bounded_has_no_such_figure():
    scores = torch.tensor([[9.0, 0.0, 0.0], [2.0, 0.0, 0.0], [0.0, 0.0, 20.0]])
    found = measured(nn.Sequential(nn.Softmax(dim=1)), scores)
    assert found["activations/saturated/0"] == pytest.approx(2 / 3)
    assert saturation(scores.T.softmax(0), nn.Softmax(dim=0))[0] == 2
    assert saturation(scores.softmax(1), nn.Softmax())[0] == 2  # not told, torch sums along axis 1 of two
    assert saturation(scores.T.softmax(0)[None, :, :, None], nn.Softmax2d())[0] == 2
    assert not [tag for tag in measured(nn.Sequential(nn.ReLU()), scores) if "saturated" in tag]


def test_units_are_features_or_channels_and_another_axis_can_be_named():
    values = torch.zeros(2, 3, 4)
    values[0, 1, 2] = 1.0
    net = nn.Sequential(nn.Identity())
    assert measured(net, values)["activations/dead_units/0"] == pytest.approx(3 / 4)
    assert measured(net, values, unit_axis=1)["activations/dead_units/0"] == pytest.approx(2 / 3)
    with pytest.raises(RunError, match=r"unit_axis is 3; 0 gives \[2, 3, 4\], which has no such axis"):
        measured(net, values, unit_axis=3)


class Twice(nn.Module):
    """One activation behind two layers of different widths, and an output that is no tensor."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.act = nn.Linear(4, 6), nn.Linear(6, 3), nn.ReLU()
        self.lstm = nn.LSTM(3, 2, batch_first=True)

    def forward(self, x):
        return {"output": self.lstm(self.act(self.second(self.act(self.first(x))))[:, None])}


def test_a_module_that_is_called_twice_counts_with_both_calls():
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


def test_a_histogram_where_it_is_wanted():
    found = measured(nn.Sequential(nn.Identity()), torch.arange(12.0).reshape(3, 4), histogram=True)
    assert found["activations/histogram/0"].counts.sum() == 12


def _in_ranks(rank, inputs, sizes):
    """What one of several ranks gives for its share of a batch; a share of 0 is a stand-in."""
    net = network()
    hook = Activations(each_layer=True)
    hook.attach(net)
    mine = inputs.split([max(size, 1) for size in sizes])[rank.global_rank] if sizes[1] else inputs
    step = step_of(net, gather=gather_ranks, weight=float(sizes[rank.global_rank]))
    hook.passed("batch", step)
    with hook.engaged():
        net(mine)
    return numbers_of(hook.after_step(step))


@pytest.mark.parametrize("sizes", [(5, 3), (8, 0)])
def test_two_ranks_give_what_one_process_gives(ranks, sizes):
    inputs = torch.randn(8, 1, 8, 8)
    one = measured(network(), inputs)
    for found in ranks.call(_in_ranks, ranks=2, inputs=inputs, sizes=sizes):
        assert found == pytest.approx(one, rel=1e-5, abs=1e-7)


def test_not_due_nothing_is_measured():
    net = network()
    hook = Activations()
    hook.attach(net)
    net(torch.randn(2, 1, 8, 8))
    assert hook.after_step(step_of(net)) is None
    assert hook.due(100)
    assert not hook.due(99)
