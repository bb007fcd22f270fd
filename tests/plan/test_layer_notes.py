"""Layers without gradients get a note with their key, and other networks get no note."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from exp.check.meta_forward import run_on_meta
from exp.check.training_notes import without_gradient
from exp.models.containers import ModuleDictModel, SequentialModel
from exp.objectives.objective import Objective, Term
from exp.objectives.terms import CrossEntropy
from exp.shared_types import DataSpec

IMAGES = DataSpec(input_shape=(3, 8, 8), input_dtype="float32", num_classes=10, num_outputs=10)
CLASSES = Objective(terms={"cross_entropy": CrossEntropy()})


def notes(build: Callable[[], nn.Module], objective: Objective = CLASSES) -> list[str]:
    seen = run_on_meta(network_factory=build, spec=IMAGES, objective=objective)
    assert seen.network is not None
    found = without_gradient(seen.network, seen.traces, {None: objective})
    return [f"{note.key} {note.text}" for note in found]


def network(*, forward: str | None = None, **layers: nn.Module) -> Callable[[], nn.Module]:
    if forward is None:
        return lambda: SequentialModel(layers=layers)
    return lambda: ModuleDictModel(layers=layers, forward=forward)


def head() -> nn.Module:
    return nn.LazyLinear(10)


class Torchs(nn.Module):
    """Network of a user with an unused layer, and with layers declared in another order than they are called."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.BatchNorm2d(4)
        self.conv = nn.Conv2d(3, 4, 3)
        self.spare = nn.Linear(3, 3)
        self.head = nn.Linear(4, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.conv(x)).mean((2, 3)))


class Detached(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body, self.head = nn.Linear(192, 5), nn.Linear(5, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1)).detach())


WRONG = {
    "by_the_forward": (
        lambda: Torchs,
        ["model.spare (spare) has parameters without a gradient"],
    ),
    "detached": (
        lambda: Detached,
        ["model.body (body) has parameters without a gradient, because no output that the objective reads",
         "freeze.param"],
    ),
    "an_element_of_a_list": (
        lambda: network(
            blocks=nn.ModuleList([nn.Linear(192, 10), nn.Linear(192, 10)]), forward="return blocks[0](x.flatten(1))"
        ),
        ["model.layers.blocks.layer (blocks.1) has parameters without a gradient"],
    ),
    "a_statement": (
        lambda: network(a=nn.LazyLinear(4), head=head(), forward="x = x.flatten(1)\ny = a(x)\nreturn head(x)"),
        ["model.layers.a (a) has parameters without a gradient"],
    ),
    "a_parameter": (
        lambda: lambda: Scaled(uses=False),
        ["model (Scaled) has parameters without a gradient"],
    ),
}  # fmt: skip


class Scaled(nn.Module):
    """Network with two parameters, and a linear layer that is not called and lends its weight to F.linear."""

    def __init__(self, *, uses: bool) -> None:
        super().__init__()
        self.scale, self.shift = nn.Parameter(torch.ones(10)), nn.Parameter(torch.ones(10))
        self.head = nn.Linear(192, 10, bias=False)
        self.uses = uses

    def forward(self, x: Tensor) -> Tensor:
        y = F.linear(x.flatten(1), self.head.weight) + self.shift
        return y * self.scale if self.uses else y


@pytest.mark.parametrize("name", WRONG)
def test_a_layer_without_effect_is_noted_once(name: str) -> None:
    make, words = WRONG[name]
    with torch.device("meta"):
        found = notes(make())
    for word in words:
        assert sum(word in note for note in found) == 1, found
    assert len(found) <= len(words)


class Attention(nn.Module):
    """Network with torch's encoder, whose attention reads the weights of a layer without a call of the layer."""

    def __init__(self) -> None:
        super().__init__()
        layer = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True)
        self.body, self.head = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), nn.Linear(8, 10)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x.flatten(1, 2)).mean(1))


RIGHT = {
    "used_twice": lambda: network(
        c=nn.Conv2d(3, 3, 1), n=nn.BatchNorm2d(3), h=head(), forward="y = c(x)\nreturn h((y + n(y)).flatten(1))"
    ),
    "loop": lambda: network(
        b=nn.ModuleList([nn.Linear(192, 192) for _ in range(2)]), h=head(),
        forward="x = x.flatten(1)\nfor layer in b:\n    x = x + layer(x)\nreturn h(x)",
    ),
    "attention": lambda: Attention,
    "by_its_weight": lambda: lambda: Scaled(uses=True),
}  # fmt: skip


@pytest.mark.parametrize("name", RIGHT)
def test_a_healthy_network_has_no_note(name: str) -> None:
    with torch.device("meta"):
        assert notes(RIGHT[name]()) == []


def test_a_frozen_layer_needs_no_gradient() -> None:
    def build() -> nn.Module:
        made = Torchs()
        made.spare.requires_grad_(False)
        return made

    assert notes(build) == []


def test_a_head_that_no_term_reads_is_noted() -> None:
    with torch.device("meta"):
        program = "x = f(x)\nreturn {'output': kind(x), 'other': other(x)}"
        build = network(f=nn.Flatten(), kind=head(), other=head(), forward=program)
    (note,) = notes(build)
    assert note.startswith("model.layers.other (other) has parameters without a gradient, because no output that")
    both = {name: Term(loss=CrossEntropy(), output=name) for name in ("output", "other")}
    assert notes(build, Objective(terms=both)) == []
