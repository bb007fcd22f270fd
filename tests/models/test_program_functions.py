"""Functions that a config lists for a forward program: the allow list, the check, and a run."""

from __future__ import annotations

import copy
import pickle
import sys
import textwrap
from pathlib import Path

import pytest
import torch
from torch import Tensor, fx, nn

from exp.check.parameters import target_errors
from exp.config.targets import TargetError, resolve_function
from exp.construct import construct
from exp.errors import ConfigError
from exp.extras.audit.audit import audit
from exp.models.containers import ModuleDictModel
from exp.models.graphs import graph_of
from exp.models.syntax import ProgramError

X = torch.arange(6.0).reshape(2, 3)
CODE = """
    import os
    import torch
    from torch import Tensor

    def halves(x: Tensor, parts: int = 2):
        return x.chunk(parts, -1)

    class Doubled(torch.autograd.Function):
        @staticmethod
        def forward(x):
            return 2 * x

        @staticmethod
        def setup_context(ctx, inputs, output):
            pass

        @staticmethod
        def backward(ctx, gradient):
            return 3 * gradient

    class Block(torch.nn.Module):
        pass
"""


def swapped(x: Tensor, *, sign: float = 1.0) -> Tensor:
    return sign * x.flip(-1)


@pytest.fixture
def mine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    """A module next to a user's ./conf, with a new name for each test because Python caches imports."""
    name = f"functions_of_{tmp_path.name.replace('-', '_')}"
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / f"{name}.py").write_text(textwrap.dedent(CODE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    return name


def node(forward: str, **functions: object) -> dict[str, object]:
    target = "exp.models.containers.ModuleDictModel"
    return {"_target_": target, "layers": {}, "forward": forward, "functions": functions}


def test_a_program_calls_the_functions_that_the_config_lists(mine: str) -> None:
    forward = "a, b = halves(doubled(x), parts=3)[:2]\nreturn a + b"
    model = node(forward, halves=f"{mine}.halves", doubled=f"{mine}.Doubled")
    assert target_errors({"model": model}, allow=()) == []
    network = construct(model, key="model", allow=())
    x = X.clone().requires_grad_()
    output = network(x)
    assert torch.equal(output, 2 * (X[:, :1] + X[:, 1:2]))
    (gradient,) = torch.autograd.grad(output.sum(), x)
    assert torch.equal(gradient, torch.tensor([[3.0, 3.0, 0.0]] * 2))


@pytest.mark.parametrize(
    ("dotted", "words"),
    [
        ("os.system", "os.system, outside the allowed packages"),
        ("builtins.eval", "builtins.eval, outside the allowed packages"),
        ("torch.load", "torch.load, outside the allowed packages"),
        ("torch.nn.functional.gelu", "torch.nn.functional.gelu, a function of torch"),
        ("torch.nn.init.normal_", "torch.nn.init.normal_, a function of torch"),
        ("torch.nn.Linear", "torch.nn.Linear, which is not a torch.autograd.Function"),
        ("exp.functions.identities.gradient_reversal", "exp.functions.identities.gradient_reversal, a function"),
        ("{mine}.Block", "which is not a torch.autograd.Function"),
        ("{mine}.os.system", "no module"),
        ("{mine}.os", "a module"),
        ("{mine}.halfs", "which does not exist"),
        (3, "3; expected the dotted name"),
    ],
)
def test_the_wall_of_targets_stands_before_functions(mine: str, dotted: object, words: str) -> None:
    dotted = dotted.format(mine=mine) if isinstance(dotted, str) else dotted
    (error,) = target_errors({"model": node("return f(x)", f=dotted)}, allow=())
    assert error.key == "model.functions.f"
    assert words in f"{error.got}; expected {error.expected}"
    with pytest.raises(TargetError):
        resolve_function(dotted)
    with pytest.raises(ConfigError):
        construct(node("return f(x)", f=dotted), key="model", allow=())


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("return swapped, head(x)", "is used as a value"),
        ("return swapped(head)", "`head` is a layer"),
        ("swapped = x\nreturn swapped", "`swapped` would be overwritten"),
        ("return swapped(x).__class__", "`.__class__` is not allowed in a program"),
        ("return swapped.__globals__, head(x)", "`.__globals__` is not allowed in a program"),
        ("return swaped(x)", "expected `swapped`"),
    ],
)
def test_a_function_is_called_and_nothing_else(text: str, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        ModuleDictModel(layers={"head": nn.Linear(3, 3)}, forward=text, functions={"swapped": swapped})


def test_names_that_clash_are_refused() -> None:
    with pytest.raises(ProgramError, match="two values or layers are called `x`"):
        ModuleDictModel(layers={}, forward="return x(x)", functions={"x": swapped})
    with pytest.raises(ConfigError, match="a function, or a torch"):
        ModuleDictModel(layers={}, forward="return f(x)", functions={"f": nn.Linear(2, 2)})


def test_the_network_is_copied_pickled_and_drawn_as_a_graph() -> None:
    network = ModuleDictModel(layers={}, forward="return swapped(relu(x), sign=-1.0)", functions={"swapped": swapped})
    expected = -X.flip(-1)
    for one in (network, copy.deepcopy(network), fx.GraphModule(network, graph_of(network))):
        assert torch.equal(one(X), expected)
    assert torch.equal(pickle.loads(pickle.dumps(network))(X), expected)
    assert torch.equal(torch.export.export(network, (X,)).module()(X), expected)


def test_the_audit_shows_the_functions_of_programs(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "a.yaml").write_text("# a\nfunctions: {rearrange: einops.rearrange, run: os.system}\n")
    found = {one.what: one.is_outside for one in audit(tmp_path)}
    assert found == {"einops.rearrange": True, "os.system": True}
