"""Layers that return a subclass of Tensor or an object of a class with __torch_function__."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

import exp
from exp.errors import ConfigError

LIKES = """
import torch
from torch import nn


class Tagged(torch.Tensor):
    pass


class Quantity:
    def __init__(self, tensor, unit):
        self.tensor, self.unit = tensor, unit

    @classmethod
    def __torch_function__(cls, func, types, args=(), kwargs=None):
        return cls(func(*[getattr(one, "tensor", one) for one in args], **(kwargs or {})), "kelvin")


class Tag(nn.Module):
    def __init__(self, kind):
        super().__init__()
        self.kind = kind

    def forward(self, x):
        if self.kind == "tagged":
            return x.as_subclass(Tagged)
        return Quantity(x, "kelvin") if self.kind == "quantity" else x


class Net(nn.Module):
    def __init__(self, inside: str = "none", last: str = "none") -> None:
        super().__init__()
        self.body, self.inside, self.head, self.last = nn.Linear(64, 8), Tag(inside), nn.Linear(8, 10), Tag(last)

    def forward(self, x):
        x = torch.relu(self.inside(self.body(x.flatten(1))))
        return self.last(self.head(getattr(x, "tensor", x)))
"""


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "tensor_likes", raising=False)
    Path("conf/model").mkdir(parents=True)
    Path("tensor_likes.py").write_text(LIKES)


def fit(directory: str, **kinds: str) -> dict[str, torch.Tensor]:
    options = "".join(f", {name}: {kind}" for name, kind in kinds.items())
    exp.fit(
        exp.compose([
            f"hydra.run.dir={directory}", f"model={{_target_: tensor_likes.Net{options}}}", "trainer.max_epochs=1",
            "trainer.limit_train_batches=3", "trainer.enable_progress_bar=false", "launch.accelerator=cpu",
            "test=false", "hooks=[gradients,memory,activations,dtypes]", "logger=[]", "optimizer=sgd",
        ])
    )  # fmt: skip
    found: dict[str, torch.Tensor] = torch.load(f"{directory}/checkpoints/last.ckpt", weights_only=True)["state_dict"]
    return found


@pytest.mark.any_processor
def test_a_tensor_of_a_class_of_ones_own_trains_as_a_plain_one():
    plain = fit("plain")
    for kinds in ({"inside": "tagged", "last": "tagged"}, {"inside": "quantity"}):
        found = fit("-".join(kinds), **kinds)
        assert all(torch.equal(found[name], value) for name, value in plain.items()), kinds


def test_an_output_that_is_no_tensor_is_told_in_one_sentence():
    with pytest.raises(ConfigError) as caught:
        fit("refused", last="quantity")
    assert (
        "objective.cross_entropy: the network returns a tensor_likes.Quantity, which is not a torch.Tensor; expected "
        "one tensor for the loss. Return a tensor from the network, or a mapping of names to tensors"
    ) in str(caught.value)
