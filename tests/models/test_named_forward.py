"""Further programs of a model, which are methods by name with the same layers, and views of the network."""

from __future__ import annotations

import copy
import pickle

import pytest
import torch
from torch import nn

from exp.errors import ConfigError
from exp.models.containers import ModuleDictModel, forward_name, forward_names, with_forward
from exp.models.inference import materialise
from exp.models.syntax import ProgramError

PROGRAMS = {
    "twice": "return head(body(body(x)))",
    "both": 'return {"a": body(x), "b": dropout(head(x), 1.0, training=training)}',
}


def model(**settings: object) -> ModuleDictModel:
    torch.manual_seed(0)
    layers = {"body": nn.Linear(3, 3), "head": nn.LazyLinear(2)}
    network = ModuleDictModel(layers=layers, **{"forward": "return body(x)", "programs": PROGRAMS, **settings})
    materialise(network, {"x": torch.zeros(2, 3)})
    return network


def test_programs_are_methods_of_the_same_layers() -> None:
    network = model()
    x = torch.randn(4, 3)
    # The size of head is inferred from a program, because forward does not call it.
    assert torch.equal(network.twice(x), network.head(network.body(network.body(x))))
    assert torch.equal(network(x), network.body(x))
    assert not network.both(x)["b"].any()
    assert torch.equal(network.eval().both(x)["b"], network.head(x))
    assert list(network.state_dict()) == ["body.weight", "body.bias", "head.weight", "head.bias"]


@pytest.mark.parametrize("clone", [copy.deepcopy, lambda network: pickle.loads(pickle.dumps(network))])
def test_a_copy_runs_its_own_layers(clone: object) -> None:
    network = model()
    other = clone(network)
    with torch.no_grad():
        other.body.weight.zero_()
        other.body.bias.zero_()
    x = torch.randn(4, 3)
    assert torch.equal(other.twice(x), other.head.bias.expand(4, 2))
    assert not torch.equal(network.twice(x), other.twice(x))


def test_a_view_shares_everything_with_its_network() -> None:
    network = model()
    view = with_forward(network, "twice")
    x = torch.randn(4, 3)
    assert isinstance(view, nn.Module)
    assert forward_name(view) == "twice"
    assert forward_name(network) is None
    assert all(mine is theirs for mine, theirs in zip(view.parameters(), network.parameters(), strict=True))
    called: list[str] = []
    network.register_forward_hook(lambda *_: called.append("network"))
    network.body.register_forward_hook(lambda *_: called.append("body"))
    network.double()
    view(x.double()).sum().backward()
    assert called == ["body", "body", "network"]
    assert network.body.weight.grad is not None
    network.load_state_dict({name: torch.zeros_like(value) for name, value in network.state_dict().items()})
    assert not view(x.double()).any()


def test_a_module_of_ones_own_offers_its_methods() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layer = nn.Linear(2, 2)

        def judge(self, x: torch.Tensor) -> torch.Tensor:
            return -self.layer(x)

        def _private(self) -> None: ...

    network = Net()
    assert forward_names(network) == ["judge"]
    x = torch.randn(1, 2)
    assert torch.equal(with_forward(network, "judge")(x), -network.layer(x))
    assert forward_names(model()) == ["twice", "both"]


@pytest.mark.parametrize("name", ["body", "forward", "state_dict", "_mine", "two words", "lambda"])
def test_a_program_needs_a_free_name(name: str) -> None:
    with pytest.raises(ConfigError) as caught:
        model(programs={name: "return head(body(x))"})
    assert caught.value.errors[0].key == f"programs.{name}"


def test_an_error_says_which_program_and_where() -> None:
    with pytest.raises(ProgramError) as caught:
        model(programs={"good": "return head(x)", "bad": "y = body(x)\nreturn hed(y)"})
    error = caught.value
    assert (error.place, error.line, error.column) == ("programs.bad", 2, 8)


def test_each_layer_is_used_somewhere() -> None:
    with pytest.raises(ProgramError, match="never uses `head`"):
        model(programs={"again": "return body(x)"})
