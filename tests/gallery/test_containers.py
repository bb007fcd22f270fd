"""Containers of torch.nn in YAML equal the same networks in Python. The site shows the docstrings of the tests."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import pytest
import torch
from torch import Tensor, nn

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]


def layers() -> list[nn.Module]:
    return [
        *(nn.Conv2d(1, 20, 5, padding=2), nn.ReLU(), nn.Conv2d(20, 64, 5), nn.ReLU()),
        *(nn.Flatten(), nn.Linear(1024, 10)),
    ]


def test_sequential(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of `nn.Sequential(...)` in a loop by hand to 1e-9."""
    gallery.descend("sequential", nn.Sequential(*layers()))


def test_sequential_ordered_dict(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of `nn.Sequential(OrderedDict(...))` to 1e-9."""
    names = ("conv1", "relu1", "conv2", "relu2", "flatten", "head")
    gallery.descend("sequential_ordered_dict", nn.Sequential(OrderedDict(zip(names, layers(), strict=True))))


class Linears(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 10), nn.Linear(10, 10)
        self.linears = nn.ModuleList([nn.Linear(10, 10) for _ in range(10)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for i, linear in enumerate(self.linears):
            x = self.linears[i // 2](x) + linear(x)
        return self.head(x)


def test_module_list(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of the ModuleList of torch's page to 1e-9."""
    gallery.descend("module_list", Linears())


class Choices(nn.Module):
    def __init__(self, choice: str, activation: str) -> None:
        super().__init__()
        self.choice, self.activation = choice, activation
        self.choices = nn.ModuleDict({"conv": nn.Conv2d(1, 10, 3), "pool": nn.MaxPool2d(3)})
        self.activations = nn.ModuleDict([["lrelu", nn.LeakyReLU()], ["prelu", nn.PReLU()]])
        self.head = nn.Linear(360 if choice == "conv" else 4, 10)

    def forward(self, x: Tensor) -> Tensor:
        x = self.choices[self.choice](x)
        return self.head(self.activations[self.activation](x).flatten(1))


@pytest.mark.parametrize(("choice", "activation"), [("conv", "prelu"), ("pool", "lrelu")])
def test_module_dict(gallery: Any, choice: str, activation: str) -> None:
    """After three steps in float64, the weights equal those of the ModuleDict in Python to 1e-9, for two choices."""
    chosen = (f"model.constants.choice={choice}", f"model.constants.activation={activation}")
    network = Choices(choice, activation)
    unused = network.choices["conv"].weight.clone()
    gallery.descend("module_dict", network, *chosen)
    assert torch.equal(network.choices["conv"].weight.float(), unused) == (choice == "pool")


class Params(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.stem, self.head = nn.Linear(64, 10), nn.Linear(10, 10)
        self.params = nn.ParameterList([nn.Parameter(torch.randn(10, 10) / 4) for _ in range(10)])

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x.flatten(1))
        for i, p in enumerate(self.params):
            x = x.mm(self.params[i // 2]) + x.mm(p)
        return self.head(x)


def test_parameter_list(gallery: Any) -> None:
    """After three SGD steps in float64, the weights equal those of the ParameterList of torch's page to 1e-9."""
    gallery.descend("parameter_list", Params())


class Sides(nn.Module):
    def __init__(self, choice: str) -> None:
        super().__init__()
        self.choice = choice
        self.params = nn.ParameterDict(
            {"left": nn.Parameter(torch.randn(64, 10)), "right": nn.Parameter(torch.randn(64, 10))}
        )

    def forward(self, x: Tensor) -> Tensor:
        return x.flatten(1).mm(self.params[self.choice])


@pytest.mark.parametrize("choice", ["left", "right"])
def test_parameter_dict(gallery: Any, choice: str) -> None:
    """After three SGD steps in float64, the chosen matrix equals that of a loop by hand to 1e-9. The other one is
    unchanged.
    """
    network = Sides(choice)
    other = network.params["right" if choice == "left" else "left"]
    before = other.detach().clone()
    gallery.descend("parameter_dict", network, f"model.constants.choice={choice}")
    assert torch.equal(other.float(), before)
