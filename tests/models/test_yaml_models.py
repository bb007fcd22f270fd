"""Every model of conf/model trains on real data, with sizes from the data and the command line."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from sklearn.datasets import load_digits
from torch import nn
from torch.nn.functional import cross_entropy

from exp.shared_types import DataSpec

pytestmark = pytest.mark.numeric

TEXT = DataSpec(input_shape=(16,), input_dtype="int64", num_classes=30, num_outputs=30)
WINE = DataSpec(input_shape=(13,), input_dtype="float32", num_classes=3, num_outputs=3)
CONTAINERS = ["sequential", "module_list", "module_dict", "shared", "branches", "parameter_list", "parameter_dict"]
IMAGE_MODELS = [*CONTAINERS, "mlp", "lenet", "resnet", "rnn", "transformer"]

Build = Callable[..., nn.Module]


@pytest.fixture(scope="module")
def digits() -> tuple[torch.Tensor, torch.Tensor]:
    images, classes = load_digits(return_X_y=True)
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(0))
    return (torch.tensor(images, dtype=torch.float32).reshape(-1, 1, 8, 8) / 6 - 0.8)[order], torch.tensor(classes)[
        order
    ]


def accuracy_after(network: nn.Module, data: tuple[torch.Tensor, torch.Tensor], *, epochs: int, lr: float) -> float:
    images, classes = data
    optimizer = torch.optim.AdamW(network.parameters(), lr=lr, fused=True)
    network.train()
    for _ in range(epochs):
        for index in torch.randperm(1400).split(64):
            optimizer.zero_grad()
            cross_entropy(network(images[index]), classes[index]).backward()
            optimizer.step()
    network.eval()
    with torch.no_grad():
        return (network(images[1400:]).argmax(1) == classes[1400:]).float().mean().item()


@pytest.mark.parametrize("name", CONTAINERS)
def test_each_container_learns_the_digits(name: str, build_model: Build, digits: tuple) -> None:
    torch.manual_seed(0)
    assert accuracy_after(build_model(name), digits, epochs=10, lr=3e-3) >= 0.95


@pytest.mark.parametrize("name", ["lenet", "mlp", "rnn", "resnet", "transformer"])
def test_each_ready_model_learns_half_the_digits_at_once(name: str, build_model: Build, digits: tuple) -> None:
    torch.manual_seed(0)
    assert accuracy_after(build_model(name), digits, epochs=2, lr=3e-3) >= 0.5


@pytest.mark.parametrize("name", [*CONTAINERS, "mlp"])
def test_models_of_vectors_take_tables(name: str, build_model: Build) -> None:
    assert build_model(name, spec=WINE)(torch.randn(5, 13)).shape == (5, 3)


@pytest.mark.parametrize("name", IMAGE_MODELS)
def test_the_head_follows_the_data(name: str, build_model: Build) -> None:
    spec = DataSpec(input_shape=(1, 12, 12), input_dtype="float32", num_classes=7, num_outputs=7)
    assert build_model(name, spec=spec)(torch.randn(3, 1, 12, 12)).shape == (3, 7)


def test_one_field_of_one_layer_may_be_overridden(build_model: Build) -> None:
    assert build_model("sequential", "model.layers.hidden.out_features=64").hidden2.in_features == 64
    assert build_model("rnn", "model.layers.recurrent._target_=torch.nn.LSTM")(torch.randn(2, 1, 8, 8)).shape == (2, 10)
    assert len(build_model("shared", "model.layers.linears.repeat=20").linears) == 20


def test_gpt_sees_only_the_past(build_model: Build) -> None:
    torch.manual_seed(0)
    network = build_model("gpt", spec=TEXT)
    text = torch.randint(30, (2, 16))
    changed = text.clone()
    changed[:, 10:] = 0
    before, after = network(text), network(changed)
    assert before.shape == (2, 16, 30)
    assert torch.allclose(before[:, :10], after[:, :10], atol=1e-6)
    assert not torch.allclose(before[:, 10:], after[:, 10:], atol=1e-3)
    assert network(text[:, :5]).shape == (2, 5, 30)


def test_gpt_starts_at_chance_and_learns(build_model: Build) -> None:
    torch.manual_seed(0)
    network = build_model("gpt", spec=TEXT)
    text = torch.arange(17).repeat(8, 1) * 7 % 30
    optimizer = torch.optim.AdamW(network.parameters(), lr=3e-3)
    losses = []
    for _ in range(30):
        optimizer.zero_grad()
        loss = cross_entropy(network(text[:, :-1]).flatten(0, 1), text[:, 1:].flatten())
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert losses[0] == pytest.approx(torch.tensor(30.0).log().item(), abs=0.1)
    assert losses[-1] < 1.0


def test_gpt_is_initialised_as_its_config_says(build_model: Build) -> None:
    torch.manual_seed(0)
    parameters = dict(build_model("gpt", spec=TEXT).named_parameters())
    assert parameters["blocks.0.query.weight"].std().item() == pytest.approx(0.02, rel=0.1)
    assert parameters["blocks.1.contract.weight"].std().item() == pytest.approx(0.01, rel=0.1)
    assert parameters["positions"].std().item() == pytest.approx(0.02, rel=0.1)
    assert torch.equal(parameters["blocks.0.norm1.weight"], torch.ones(64))
    assert not parameters["blocks.0.expand.bias"].any()
