"""Terms, metrics and hooks find the named parts of an output that is a mapping, dataclass, namedtuple or tuple."""

from __future__ import annotations

from collections import OrderedDict, namedtuple
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor, nn

import exp
from exp.check.examination import plan
from exp.check.resolution import resolve
from exp.engine.forward import forward_by_name
from exp.errors import ConfigError
from exp.nested import map_tensors, named_parts, tensors_in

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
    """A mapping with attributes, as in transformers."""

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
def nets(write):
    write("named_nets.py", NETS)
    write("conf/model/.empty", "")


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


def test_dataclasses_are_traversed_and_rebuilt():
    output = Scores(A, B)
    assert list(tensors_in({"x": [output]})) == [A, B]
    found = map_tensors(output, lambda tensor: tensor + 1)
    assert type(found) is Scores
    assert found.logits.tolist() == (A + 1).tolist()
    assert output.logits is A
    assert map_tensors(output, lambda tensor: tensor) is output


LOGITS = (
    "objective.cross_entropy={_target_: exp.objectives.objective.Term, output: NAME, "
    "loss: {_target_: exp.objectives.terms.CrossEntropy}}"
)


def typed(kind: str, name: str) -> list[str]:
    return [f"model={{_target_: named_nets.Net, kind: {kind}}}", LOGITS.replace("NAME", name)]


def test_a_term_without_an_output_name_is_refused():
    with pytest.raises(ConfigError, match=r"Set objective\.cross_entropy\.output to one of logits, hidden"):
        plan(resolve(exp.compose(["hydra.run.dir=run", typed("dataclass", "x")[0]])))


@pytest.mark.parametrize(("kind", "name"), [("dict", "logits"), ("namedtuple", "logits"), ("tuple", "output_0")])
def test_a_term_finds_its_output_by_name(kind, name):
    plan(resolve(exp.compose(["hydra.run.dir=run", "metrics=[]", *typed(kind, name)])))


def test_a_dataclass_over_ranks_trains_as_a_tuple(ranks):
    short = ["precision=fp64", "metrics=[]", "trainer.max_epochs=1", "trainer.limit_train_batches=3", "test=false"]
    hooks = "hooks=[gradients,memory,activations,samples]"
    both = ["strategy=ddp", "launch.devices=2", hooks, "hooks.samples.output=logits"]
    found = ranks.train(*typed("dataclass", "logits"), *short, *both, ranks=2)
    expected = ranks.train(*typed("tuple", "output_0"), *short, "strategy=single")
    assert found.losses == pytest.approx(expected.losses, rel=1e-9)
