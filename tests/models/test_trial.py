"""Trial runs of programs: loops, branches, functions, and errors for values that are unknown before a run."""

from __future__ import annotations

import contextlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from exp.models.containers import ModuleDictModel, ModuleListModel, ParameterListModel
from exp.models.syntax import ProgramError


def run(text: str, x: torch.Tensor, *, constants: dict | None = None, **layers: object) -> object:
    return ModuleDictModel(layers=layers, forward=text, constants=constants)(x)


X = torch.arange(24.0).reshape(2, 3, 4) / 7

EXPRESSIONS = {
    "x[:, -1]": lambda x: x[:, -1],
    "x[..., None, 1:3]": lambda x: x[..., None, 1:3],
    "x[:, ::2]": lambda x: x[:, ::2],
    "x[0]": lambda x: x[0],
    "x[x > 1].sum()": lambda x: x[x > 1].sum(),
    "(x > 1) & ~(x < 2)": lambda x: (x > 1) & ~(x < 2),
    "-x ** 2 / (x + 1) // 0.25 % 3": lambda x: -(x**2) / (x + 1) // 0.25 % 3,
    "2 ** x - (-1.5)": lambda x: 2**x - (-1.5),
    "x @ x.mT": lambda x: x @ x.mT,
    "x.flatten(1).softmax(dim=-1)": lambda x: x.flatten(1).softmax(dim=-1),
    "einsum('bij,bkj->bik', x, x)": lambda x: torch.einsum("bij,bkj->bik", x, x),
    "where(x > 1, x, zeros_like(x))": lambda x: torch.where(x > 1, x, torch.zeros_like(x)),
    "masked_fill(x, x > 1, -math.inf)": lambda x: x.masked_fill(x > 1, -torch.inf),
    "cat([x, x * 2], dim=1)": lambda x: torch.cat([x, x * 2], dim=1),
    "stack([x[i] for i in range(2)])": lambda x: torch.stack([x[i] for i in range(2)]),
    "F.gelu(x, approximate='tanh')": lambda x: functional.gelu(x, approximate="tanh"),
    "gelu(x)": functional.gelu,
    "x.to(torch.float64)": lambda x: x.double(),
    "x.view(x.shape[0], -1)": lambda x: x.view(2, -1),
    "x / math.sqrt(x.shape[-1])": lambda x: x / 2,
    "x * math.sqrt(4)": lambda x: x * 2,
    "arange(x.shape[1], device=x.device)": lambda x: torch.arange(3),
    "max(x, 1)[0] + max(1, 2)": lambda x: x.max(1)[0] + 2,
    "sum([x, x])": lambda x: x + x,
    "sum(x, 1)": lambda x: x.sum(1),
    "x if 1 < 2 < 3 else y": lambda x: x,
    "x * len('abc')": lambda x: x * 3,
    "x.ndim * x": lambda x: 3 * x,
}


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_an_expression_is_pythons_and_torchs(expression: str) -> None:
    text = f"y = 1\nreturn {expression}"
    assert torch.equal(run(text, X), EXPRESSIONS[expression](X))


def test_a_function_without_tensors_is_called_at_run_time() -> None:
    model = ModuleDictModel(layers={}, forward="return x + rand(3, 4)")
    assert not torch.equal(model(X), model(X))


def test_statements_unroll() -> None:
    text = """
    parts, total = [], 0
    for i, (name, layer) in enumerate(heads.items()):
        if i == 1:
            continue
        if name == 'head3':
            break
        parts.append(layer(x))
        total += i
    outputs = {}
    for part, key in zip(parts, ['a', 'b']):
        outputs[key] = part
    outputs['total'] = outputs['a'] * total
    first, *_ = [1] if False else [2],
    return outputs
    """.replace("first, *_ = [1] if False else [2],", "first, second = reversed([1, 2])")
    heads = {f"head{i}": nn.Linear(4, 1) for i in range(4)}
    outputs = run(text, X, heads=heads)
    assert list(outputs) == ["a", "b", "total"]
    assert torch.equal(outputs["b"], heads["head2"](X))
    assert torch.equal(outputs["total"], heads["head0"](X) * 2)


def test_config_constants_choose_branches() -> None:
    text = "if gated and width > 2:\n    return x * widths[-1]\nreturn x"
    constants = {"gated": True, "width": 3, "widths": [1, 5]}
    assert torch.equal(run(text, X, constants=constants), X * 5)
    assert torch.equal(run(text, X, constants={**constants, "gated": False}), X)


def test_unpacking_checks_the_number_of_values() -> None:
    model = ModuleDictModel(layers={"gru": nn.GRU(4, 4)}, forward="a, b, c = gru(x)\nreturn a")
    with pytest.raises(ValueError, match="unpack"):
        model(X)


def test_an_augmented_assignment_leaves_the_input_alone() -> None:
    x = X.clone()
    run("y = x\nx += 1\nx *= y\nreturn x", x)
    assert torch.equal(x, X)


def test_training_is_known_while_it_runs() -> None:
    model = ModuleDictModel(layers={}, forward="return dropout(x, 0.5, training=training)")
    assert not torch.equal(model(X), X)
    assert torch.equal(model.eval()(X), X)


def test_sublayers_and_their_parameters_are_reached_by_name() -> None:
    block = nn.ModuleDict({"a": nn.Linear(4, 4)})
    outer = ModuleDictModel(layers={"embedding": nn.Embedding(5, 4), "block": block}, forward=(
        "return embedding(x) @ embedding.weight.T + block['a'](embedding(x)) @ block.a.weight[:, :1]"
    ))  # fmt: skip
    tokens = torch.tensor([[1, 2]])
    e = outer.embedding(tokens)
    assert torch.equal(outer(tokens), e @ outer.embedding.weight.T + block["a"](e) @ block["a"].weight[:, :1])


def test_layers_is_a_list_or_a_dict() -> None:
    layers = {"a": nn.Linear(4, 4), "b": nn.Linear(4, 4)}
    listed = ModuleListModel(layers=layers, forward="for layer in layers[::-1]:\n    x = layer(x)\nreturn x")
    named = ModuleDictModel(layers=layers, forward="return layers['a'](layers['b'](x))")
    assert torch.equal(listed(X), named(X))


ERRORS = [
    ("return linears[3](x)", 1, "has 3 elements, and no element 3"),
    ("return linears(x)", 1, "(ModuleList) is called"),
    ("return relu(linears[0])", 1, "is a layer (Linear), not a tensor"),
    ("return linears[0](x) + relu", 1, "is used as a value"),
    ("if x.shape[0] > 1:\n    x = x + 1\nreturn x, linears[0](x)", 1, "known only while the network runs"),
    ("y = 1\nfor part in x:\n    y = y + part\nreturn y, layers", 2, "a loop over a tensor"),
    ("y = x and x\nreturn linears[0](y)", 1, "a condition that is known only"),
    ("return not x, linears[0](x)", 1, "~ instead of not"),
    ("return 0 < x < 1, linears[0](x)", 1, "a condition that is known only"),
    ("return x is 1, linears[0](x)", 1, "`is` with another value than None"),
    ("return linears[0](y)\ny = x", 1, "`y` has no value yet"),
    ("return linears[0].wight", 1, "has no layer or parameter `wight`"),
    ("return linears[0].training", 1, "has no layer or parameter `training`"),
    ("return linears.training", 1, "has no layer or parameter"),
    ("return int(linears[0](x).sum())", 1, "`int` of a value that is known only"),
    ("return x * len(linears[0](x))", 1, "`x.shape[0]`, the length"),
    ("return dropout(linears[0](x))", 1, "would drop values in evaluation, too"),
    ("a, b = 1, 2, 3\nreturn linears[0](x)", 1, "too many values to unpack"),
    ("return 1, len(linears)", 1, "the returned value contains no tensor"),
    ("linears[0](x)\nif False:\n    return x", 2, "ends without a return"),
    ("break\nreturn linears[0](x)", 1, "break or continue outside a loop"),
    ("return x[linears[0](x):'a'], {x: 1}", 1, "a dict key that is not a constant"),
    ("return linears[0](x) * (1 / 0)", 1, "division by zero"),
    ("return linears['a'](x)", 1, "indexed by something"),
    ("return linears[x](x)", 1, "indexed by something"),
]


@pytest.mark.parametrize(("text", "line", "words"), ERRORS)
def test_what_cannot_be_traced_is_refused_with_its_place(text: str, line: int, words: str) -> None:
    with pytest.raises(ProgramError) as caught:
        ModuleListModel(layers={"linears": [nn.Linear(4, 4) for _ in range(3)]}, forward=text)
    assert words in str(caught.value)
    assert caught.value.line == line


BOMBS = [
    "y = 9 ** 9 ** 9",
    "y = 2.0 ** 10 ** 6",
    "y = 1 << 10000000",
    "y = [0] * 10 ** 10",
    "y = 'a' * 10 ** 10",
    "y = '%1000000000d' % 1",
    "y = range(10 ** 12)",
    "y = list(range(9000)) + list(range(9000))",
    "for i in range(9000):\n    for j in range(9000):\n        y = i",
    "y = [i for i in range(9000) for j in range(9000)]",
    "y = []\nfor i in range(40):\n    y = [y, y]\nz = x + y",
    "y = []\ny.append(y)\nz = relu(y)",
    "y = []\nfor i in range(40):\n    y = [y, y]\nz = y == y",
    "y = []\nfor i in range(40):\n    y = [y, y]\nz = str(y)",
    "y = 'a'\nfor i in range(60):\n    y = y + y",
    "y = (-1) ** 0.5",
]


@pytest.mark.parametrize("text", BOMBS)
def test_a_program_cannot_eat_the_machine(text: str) -> None:
    with pytest.raises(ProgramError):
        ModuleListModel(layers={}, forward=f"{text}\nreturn x")


def test_all_errors_of_a_trial_are_found() -> None:
    text = "if training:\n    y = not x\nelse:\n    y = a + x\nfor z in x:\n    y = z\nreturn a(dropout(x))"
    with pytest.raises(ProgramError) as caught:
        ModuleDictModel(layers={"a": nn.Linear(4, 4)}, forward=text)
    found = [(one.line, one.column) for one in (caught.value, *caught.value.others)]
    assert found == [(2, 9), (4, 9), (5, 1), (7, 10)]


def test_the_traceback_of_a_run_shows_the_program(capsys: pytest.CaptureFixture) -> None:
    import traceback

    model = ModuleListModel(layers={"a": nn.Linear(4, 4)}, forward="y = a(x)\nz = y @ y\nreturn z")
    with pytest.raises(RuntimeError) as caught:
        model(X)
    shown = "".join(traceback.format_exception(caught.value))
    assert "line 2, in forward\n    z = y @ y" in shown


def test_a_parameter_list_is_a_list_of_tensors() -> None:
    weights = [nn.Parameter(torch.randn(4, 4)) for _ in range(3)]
    model = ParameterListModel(layers={"weights": weights}, forward="for w in weights[1:]:\n    x = x @ w\nreturn x")
    assert torch.equal(model(X), X @ weights[1] @ weights[2])
    assert list(model.state_dict()) == ["weights.0", "weights.1", "weights.2"]


# ruff: noqa: SIM905  (lists of words are read more easily as words)
LEAVES = st.sampled_from("x y linears layers scale training relu 1 -2 0.5 True None 'a' [] {} width".split())
OPERATORS = st.sampled_from("+ - * / // % ** @ << >> & | ^ == < in is and or".split())
CALLS = st.sampled_from("relu cat sum max len range list zip enumerate str int abs round dict tuple stack".split())
METHODS = st.sampled_from("flatten sum items values append view shape T weight mT".split())


def _larger(parts: st.SearchStrategy[str]) -> st.SearchStrategy[str]:
    return st.one_of(
        st.tuples(parts, OPERATORS, parts).map(lambda p: f"({p[0]} {p[1]} {p[2]})"),
        st.tuples(CALLS, parts).map(lambda p: f"{p[0]}({p[1]})"),
        st.tuples(parts, METHODS, parts).map(lambda p: f"{p[0]}.{p[1]}({p[2]})"),
        st.tuples(parts, METHODS).map(lambda p: f"{p[0]}.{p[1]}"),
        st.tuples(parts, parts).map(lambda p: f"{p[0]}[{p[1]}]"),
        st.tuples(parts, parts, parts).map(lambda p: f"{p[0]}[{p[1]}:{p[2]}]"),
        st.tuples(parts, parts).map(lambda p: f"{p[0]}({p[1]})"),
        st.tuples(parts, parts).map(lambda p: f"[{p[0]}, *{p[1]}]"),
        st.tuples(parts, parts).map(lambda p: "{" + f"{p[0]}: {p[1]}" + "}"),
        st.tuples(parts, parts, parts).map(lambda p: f"({p[0]} if {p[1]} else {p[2]})"),
        st.tuples(parts, parts).map(lambda p: f"[{p[0]} for y in {p[1]}]"),
        st.tuples(parts).map(lambda p: f"(not {p[0]})"),
    )


@given(st.lists(st.recursive(LEAVES, _larger, max_leaves=8), min_size=1, max_size=3))
def test_any_program_is_traced_or_is_a_program_error(expressions: list[str]) -> None:
    lines = [f"y = {expression}" for expression in expressions]
    layers = {"linears": [nn.Linear(4, 4) for _ in range(2)], "scale": nn.Parameter(torch.ones(4))}
    text = "\n".join([*lines, "[linears, scale]", "return y"])
    with contextlib.suppress(ProgramError):
        ModuleListModel(layers=layers, forward=text, constants={"width": 3})
