"""Random forward programs return the same as a Python function with the same text."""

from __future__ import annotations

import textwrap

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from exp.models.containers import ModuleDictModel
from exp.models.syntax import ProgramError

WIDTH = 3


class Layers(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        generator = torch.Generator().manual_seed(0)
        self.linears = nn.ModuleList(nn.Linear(WIDTH, WIDTH) for _ in range(3))
        self.heads = nn.ModuleDict({"a": nn.Linear(WIDTH, WIDTH), "b": nn.Linear(WIDTH, WIDTH)})
        self.scale = nn.Parameter(torch.randn(WIDTH, generator=generator))
        for parameter in self.parameters():
            parameter.data = torch.randn(parameter.shape, generator=generator)


def plain(text: str, layers: Layers, x: torch.Tensor, *, training: bool) -> object:
    """Run the text as the body of a Python function with torch's names, and return its result."""
    space: dict[str, object] = {
        **vars(torch), "F": nn.functional, "gelu": nn.functional.gelu, "linears": layers.linears,
        "heads": layers.heads, "scale": layers.scale, "width": WIDTH, "names": ["a", "b"], "training": training,
        **{name: __builtins__[name] for name in ("range", "len", "enumerate", "zip", "reversed", "list")},
        "max": max, "sum": sum,
    }  # fmt: skip
    exec("def forward(x):\n" + textwrap.indent(text, "    "), space)
    return space["forward"](x)


NUMBERS = st.recursive(
    st.sampled_from(["1", "2", "-3", "width", "len(linears)", "len(names)", "n", "0.5"]),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*"]), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(parts, parts).map(lambda p: f"max({p[0]}, {p[1]})"),
        parts.map(lambda p: f"-{p}"),
    ),
    max_leaves=3,
)
CONDITIONS = st.one_of(
    st.sampled_from(["training", "not training", "'a' in names", "n is None", "names[0] == 'a' and training"]),
    st.tuples(NUMBERS, st.sampled_from(["<", ">=", "=="]), NUMBERS).map(lambda p: f"{p[0]} {p[1]} {p[2]}"),
    st.tuples(NUMBERS, NUMBERS).map(lambda p: f"{p[0]} < {p[1]} < 9 or training"),
)
TENSORS = st.recursive(
    st.sampled_from(["x", "y", "scale", "x[:1]", "y.flip(0)", "total"]),
    lambda parts: st.one_of(
        st.tuples(parts, st.sampled_from(["+", "-", "*", "<"]), parts).map(lambda p: f"({p[0]} {p[1]} {p[2]}) * 1.0"),
        st.tuples(parts, NUMBERS).map(lambda p: f"({p[0]} * {p[1]})"),
        st.tuples(
            st.sampled_from(["relu", "torch.tanh", "gelu", "F.softplus", "linears[0]", "linears[-1]"]), parts
        ).map(lambda p: f"{p[0]}({p[1]})"),
        parts.map(lambda p: f"heads['a']({p}).clamp(min=-5)"),
        parts.map(lambda p: f"sum([layer({p}) for layer in linears if training])"),
        parts.map(lambda p: f"cat([{p}, {p}], dim=0)[: x.shape[0]]"),
        parts.map(lambda p: f"stack([heads[name]({p}) for name in names]).mean(0)"),
        parts.map(lambda p: f"({p} @ linears[1].weight.T)"),
        st.tuples(parts, CONDITIONS, parts).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
    ),
    max_leaves=5,
)


def _block(statements: list[str]) -> str:
    return textwrap.indent("\n".join(statements), "    ")


def _statements(inner: st.SearchStrategy[list[str]]) -> st.SearchStrategy[list[str]]:
    loops = [
        "for n, layer in enumerate(linears):",
        "for n in range(3):",
        "for n, (name, layer) in enumerate(heads.items()):",
        "for layer, n in zip(linears[1:], [4, 5]):",
        "for n in reversed([1, 2]):",
    ]
    return st.lists(
        st.one_of(
            TENSORS.map(lambda t: f"y = {t}"),
            TENSORS.map(lambda t: f"total += {t}"),
            TENSORS.map(lambda t: f"a, b = ({t}), x\ny = a * b"),
            TENSORS.map(lambda t: f"a = b = {t}\ny = a - b"),
            NUMBERS.map(lambda t: f"n = {t}"),
            st.tuples(CONDITIONS, inner, inner).map(lambda p: f"if {p[0]}:\n{_block(p[1])}\nelse:\n{_block(p[2])}"),
            st.tuples(st.sampled_from(loops), inner).map(lambda p: f"{p[0]}\n{_block(p[1])}"),
            st.tuples(st.sampled_from(loops), inner, CONDITIONS).map(
                lambda p: f"{p[0]}\n{_block(p[1])}\n    if {p[2]}:\n        break\n    y = y * 0.5"
            ),
        ),
        min_size=1,
        max_size=3,
    )


PROGRAMS = st.recursive(TENSORS.map(lambda t: [f"y = {t}"]), _statements, max_leaves=6).map("\n".join)


@given(body=PROGRAMS, training=st.booleans())
def test_a_program_is_python(body: str, training: bool) -> None:
    text = "\n".join(
        ["y, total, n = x, x * 0, 2", body, "return {'y': y, 'total': total, 'all': [linears, heads, scale][2]}"]
    )
    layers, x = Layers(), torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(1))
    held = {"linears": layers.linears, "heads": layers.heads, "scale": layers.scale}
    try:
        # Run both modes, because a program must be valid in both: `sum` of no tensors is a number in one of them.
        expected = {mode: plain(text, layers, x, training=mode) for mode in (True, False)}[training]
    except (TypeError, RuntimeError, AttributeError):
        return  # the text itself has an error, such as a tensor with another number of rows
    network = ModuleDictModel(layers=held, forward=text, constants={"width": WIDTH, "names": ["a", "b"]})
    found = network.train(training)(x)
    for name, value in expected.items():
        torch.testing.assert_close(found[name], value, rtol=0, atol=0, equal_nan=True)


X = torch.arange(6.0).reshape(2, 3)


def model(text: str, **constants: object) -> ModuleDictModel:
    return ModuleDictModel(layers={}, forward=text, constants=constants)


def test_a_branch_may_ask_whether_the_network_trains() -> None:
    network = model(
        "if training:\n    x = x + 1\n    if width > 2 and not training:\n        x = x * 0\nreturn x", width=3
    )
    assert torch.equal(network(X), X + 1)
    assert torch.equal(network.eval()(X), X)
    exported = torch.export.export(network, (X,)).module()
    assert torch.equal(exported(X), X)


def test_an_error_in_a_branch_of_evaluation_is_told_before_the_run() -> None:
    with pytest.raises(ProgramError, match="line 4, column 13: `y` has no value yet"):
        model("if training:\n    x = x + 1\nelse:\n    x = x + y\nif training:\n    y = x\nreturn x")


def test_what_a_program_makes_belongs_to_one_call() -> None:
    network = model("sizes.append(4)\nparts = [x]\nparts.append(x)\nreturn x * len(sizes) * len(parts)", sizes=[1, 2])
    assert torch.equal(network(X), X * 6)
    assert torch.equal(network(X), X * 6)


def test_a_sequence_may_be_read_twice() -> None:
    sums = "sum(a for a, b in pairs) + sum(b for a, b in pairs) + len(pairs)"
    text = f"pairs = zip([1, 2], [3, 4])\nreturn x + {sums}"
    assert torch.equal(model(text)(X), X + 3 + 7 + 2)


def test_a_program_may_have_thousands_of_rounds() -> None:
    text = "for i in range(rounds):\n    if i % 2 == 0:\n        x = x + 0.5\n    else:\n        x = x - 0.25\nreturn x"
    assert torch.equal(model(text, rounds=2_000)(X), X + 250)


def test_a_layer_may_be_called_layers() -> None:
    network = ModuleDictModel(layers={"layers": torch.nn.Flatten(0), "other": torch.nn.ReLU()}, forward=CALLED)
    assert torch.equal(network(-X), torch.zeros(6))
    assert [*network.state_dict()] == []


CALLED = "return other(layers(x))"
ENDLESS = [
    "for part in parts:\n    parts.append(part)",
    "parts = [x]\nfor part in parts:\n    parts.append(part)",
    "for i in range(9000):\n    y = 'a' in range(9000)",
    "for a in range(200):\n    for b in range(200):\n        for c in range(200):\n            pass",
    "y = [[[a for a in range(99)] for b in range(99)] for c in range(99)]",
    "y = 1\nfor i in range(9000):\n    y = y * 2",
    "y = 10 ** 10 ** 10",
    "y = 0.5 ** -10 ** 10 ** 3",
    "y = -(2 ** 62) * 4",
    "y = str(10 ** 15) * 10 ** 9",
    "y = [x] * 10 ** 9",
    "y = (1, 2) * 2 ** 40",
    "y = 1 << 10 ** 9",
    "y = range(0, 10 ** 18, 3)",
    "y = [list(range(9000)) for i in range(9000)]",
    "y = sum([i for i in range(9000) for j in range(9000)])",
    "y = {}\nfor i in range(9000):\n    for j in range(9):\n        y[f'{i} {j}'] = [y, y]",
    "y = f'{[1]}'",
    "y = round(10 ** 400, -400)",
    "y = round(5, -10 ** 9)",
    "y = math.exp(10 ** 6)",
    "y = int(math.inf)",
    "for i in range(3000):\n    for j in range(3000):\n        y = [*3, ~'a']",
    "y = range(9000)\nfor i in range(9000):\n    y = tuple(enumerate(y))",
    "\n".join("    " * depth + f"for i{depth} in range(2):" for depth in range(25)) + "\n" + "    " * 25 + "pass",
]


@pytest.mark.parametrize("text", ENDLESS)
def test_no_program_runs_without_end(text: str) -> None:
    import time

    start = time.monotonic()
    with pytest.raises(ProgramError) as caught:
        ModuleDictModel(layers={}, forward=f"{text}\nreturn x", constants={"parts": [1]})
    assert caught.value.line >= 1
    assert time.monotonic() - start < 5


HIDDEN = [
    "[open for open in [1]]\nreturn open",
    "[__import__ for __import__ in [1]]\nreturn x + __import__",
    "a = x.register_hook\nreturn a",
    "return layer.to(x)",
    "return layer.forward(x)",
    "return layer.register_forward_hook(x)",
    "return [layer][0].state_dict()",
    "return x if training else layer.parameters()",
    "for part in [layer]:\n    x = part.apply(x)\nreturn x",
]


@pytest.mark.parametrize("text", HIDDEN)
def test_no_branch_reaches_what_is_not_listed(text: str) -> None:
    with pytest.raises(ProgramError):
        ModuleDictModel(layers={"layer": nn.Linear(3, 3)}, forward=f"x = layer(x)\n{text}")
