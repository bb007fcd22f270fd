"""Networks that return a mapping, a dataclass, a namedtuple or a tuple: terms, metrics and hooks find parts by name."""

from __future__ import annotations

import sys
from collections import OrderedDict, namedtuple
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.check.plan import plan, resolve
from exp.engine.forward import forward_by_name
from exp.errors import ConfigError
from exp.nested import mapped, named_parts, tensors_in

NETS = '''
from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import torch
from torch import Tensor, nn

Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass(frozen=True)
class Scores:
    logits: Tensor
    hidden: Tensor
    loss: Tensor | None = None


class ModelOutput(OrderedDict):
    """As transformers have it: a mapping that is made from a mapping, and read by attribute."""

    def __getattr__(self, name):
        return self[name]


class Net(nn.Module):
    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.body, self.head = nn.Linear(64, 8), nn.Linear(8, 10)

    def forward(self, x):
        hidden = self.body(x.flatten(1)).relu()
        logits = self.head(hidden)
        made = {
            "dict": lambda: ModelOutput({"logits": logits, "hidden": hidden}),
            "namedtuple": lambda: Pair(logits, hidden),
            "dataclass": lambda: Scores(logits=logits, hidden=hidden),
            "tuple": lambda: (logits, hidden),
        }
        return made[self.kind]()
'''
Pair = namedtuple("Pair", ["logits", "hidden"])


@dataclass(frozen=True)
class Scores:
    logits: Tensor
    hidden: Tensor | None = None


@pytest.fixture(autouse=True)
def place(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    monkeypatch.delitem(sys.modules, "named_nets", raising=False)
    Path("conf/model").mkdir(parents=True)
    Path("named_nets.py").write_text(NETS)


A, B = torch.zeros(3, 2), torch.ones(3, 4)


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (OrderedDict(logits=A, hidden=B), {"logits": A, "hidden": B}),
        (Pair(A, B), {"logits": A, "hidden": B}),
        (Scores(A, B), {"logits": A, "hidden": B}),
        (Scores(A), {"logits": A}),
        ((A, B), {"output_0": A, "output_1": B}),
        ([A], {"output_0": A}),
        (A, {}),
        (torch.Size([3]), {}),
    ],
)
def test_the_parts_of_an_output_have_names(output, expected):
    found = named_parts(output)
    assert list(found) == list(expected)
    assert all(found[name] is expected[name] for name in expected)
    values = forward_by_name(nn.Identity())(lambda x: output, (A, B))
    assert values["output"] is output
    assert values["input"] is A


def test_dataclasses_are_walked_and_built_again():
    output = Scores(A, B)
    assert list(tensors_in({"x": [output]})) == [A, B]
    found = mapped(output, lambda tensor: tensor + 1)
    assert type(found) is Scores
    assert found.logits.tolist() == (A + 1).tolist()
    assert output.logits is A
    assert mapped(output, lambda tensor: tensor) is output


LOGITS = (
    "objective.cross_entropy={_target_: exp.objectives.objective.Term, output: NAME, "
    "loss: {_target_: exp.objectives.terms.CrossEntropy}}"
)


def typed(kind: str, name: str) -> list[str]:
    return [f"model={{_target_: named_nets.Net, kind: {kind}}}", LOGITS.replace("NAME", name)]


def test_a_term_that_compares_the_whole_is_told_the_names():
    with pytest.raises(ConfigError, match=r"Set objective\.cross_entropy\.output to one of logits, hidden"):
        plan(resolve(exp.compose(["hydra.run.dir=run", typed("dataclass", "x")[0]])))


@pytest.mark.parametrize(("kind", "name"), [("dict", "logits"), ("namedtuple", "logits"), ("tuple", "output_0")])
def test_a_term_finds_a_part_by_its_name(kind, name):
    decided = plan(resolve(exp.compose(["hydra.run.dir=run", "metrics=[]", *typed(kind, name)])))
    assert not decided.shapes.faults


def test_a_dataclass_trains_over_ranks_as_a_tuple_does_alone(ranks):
    short = ["metrics=[]", "trainer.max_epochs=1", "trainer.limit_train_batches=3", "test=false"]
    hooks = "hooks=[gradients,memory,activations,samples]"
    both = ["strategy=ddp", "launch.devices=2", hooks, "hooks.samples.output=logits"]
    found = ranks.train(*typed("dataclass", "logits"), *short, *both, ranks=2)
    expected = ranks.train(*typed("tuple", "output_0"), *short, "strategy=single")
    assert found.losses == pytest.approx(expected.losses, abs=1e-6)
