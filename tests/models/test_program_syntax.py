"""The syntax of forward programs: parsing without torch, and errors with line, column and nearest spelling."""

from __future__ import annotations

import ast
import pickle
import subprocess
import sys

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from exp.models.program import MAX_CHARACTERS, MAX_DEPTH, parse
from exp.models.syntax import ProgramError

LAYERS = ("linears", "head")

ESCAPES = [
    "__import__('os').system('true')",
    "x.__class__.__bases__[0].__subclasses__()",
    "().__class__.__base__",
    "head.__init__.__globals__['os']",
    "head._modules['a']",
    "head.forward.__globals__",
    "head(x).__reduce__()",
    "getattr(x, 'data')",
    "eval('1')",
    "exec('1')",
    "open('/etc/passwd')",
    "globals()",
    "vars(head)",
    "type(x)",
    "x.data",
    "x.grad_fn",
    "x.numpy()",
    "x.item()",
    "x.tolist()",
    "x.storage()",
    "x.register_hook(head)",
    "x.add_(1)",
    "x.requires_grad_(True)",
    "relu(x, out=x)",
    "torch.load('f')",
    "torch.save(x, 'f')",
    "torch.hub.load('a', 'b')",
    "torch.ops.load_library('f')",
    "torch.nn.functional.torch.os",
    "torch.__dict__",
    "torch.utils.data",
    "F.__builtins__",
    "F.os",
    "math.__loader__",
    "torch",
    "'{0.__class__}'.format(x)",
    "f'{x.__class__}'",
    "(lambda: x)()",
    "(yield x)",
    "(y := x)",
    "[y async for y in x]",
    "head(**{'a': 1})",
    "b'bytes'",
    "1j",
    "u'text'",
    str(10**30),
    "self.head(x)",
    "head(x)(x)[0](lambda: 1)",
]
STATEMENTS = [
    "import os",
    "from os import system",
    "def f(): return x",
    "class A: pass",
    "while True: pass",
    "with x: pass",
    "try: pass\nexcept: pass",
    "raise x",
    "del x",
    "global x",
    "x.data = x",
    "head = x",
    "training = x",
    "head.weight = x",
    "x: int = 1",
    "*a, b = x",
    "x[0] = 1",
    "for i in linears: pass\nelse: pass",
    "match x:\n  case 1: pass",
    "async def f(): pass",
    "type A = int",
]


def parse_body(text: str):
    return parse(text + "\nlayers\nreturn x", LAYERS)


@pytest.mark.parametrize("expression", ESCAPES)
def test_an_expression_that_leaves_the_list_is_refused(expression: str) -> None:
    with pytest.raises(ProgramError):
        parse_body(f"x = head(x)\ny = {expression}")


@pytest.mark.parametrize("statement", STATEMENTS)
def test_a_statement_that_leaves_the_list_is_refused(statement: str) -> None:
    with pytest.raises(ProgramError):
        parse_body(statement)


@pytest.mark.parametrize(
    ("text", "line", "column", "words"),
    [
        ("x = linears[0](x)\nreturn haed(x)", 2, 8, "`haed` is unknown; expected `head`"),
        ("return head(input)", 1, 13, "`input` is unknown; expected an input (`x`), a layer or a variable"),
        (
            "x = linears[0](x)\nx = head(x).flaten(1)\nreturn x",
            2,
            5,
            "`.flaten` is not allowed in a program; expected `flatten`",
        ),
        ("return head(torch.rellu(x)) + linears", 1, 13, "`torch.rellu` is not allowed in a program; expected `relu`"),
        ("return F.softmaxx(head(x), 1) * linears", 1, 8, "expected `softmax`"),
        ("x = head(linears)", 1, 1, "returns nothing"),
        ("x = head(x\nreturn linears", 1, 9, "never closed"),
        ("  x = 'ä' + head(xx, linears)\n  return x", 1, 18, "`xx` is unknown"),
        ("", 1, 1, "returns nothing"),
        ("return head(dropot(linears))", 1, 13, "`dropout`"),
    ],
)
def test_an_error_has_line_column_and_fix(text: str, line: int, column: int, words: str) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text, LAYERS)
    assert (caught.value.line, caught.value.column) == (line, column)
    assert words in str(caught.value)


def test_the_message_points_at_the_place() -> None:
    with pytest.raises(ProgramError) as caught:
        parse("x = linears[0](x)\nreturn haed(x)", LAYERS)
    assert str(caught.value) == (
        "forward program, line 2, column 8: `haed` is unknown; expected `head`\n    return haed(x)\n           ^"
    )


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("x = haed(x)\ny = x.foo(z)\nreturn torch.rellu(y) + z", [(1, 5), (2, 5), (2, 11), (3, 8)]),
        ("x = lineaars(x)\nx.y = head(x, out=x)\nbreak\nlambda a: a", [(1, 5), (2, 1), (2, 15), (3, 1), (4, 1)]),
        ("return head(a(b(c)), **{d: 1}) + linears", [(1, 13), (1, 15), (1, 17), (1, 22), (1, 25)]),
    ],
)
def test_all_errors_of_a_program_are_found(text: str, found: list[tuple[int, int]]) -> None:
    with pytest.raises(ProgramError) as caught:
        parse(text, LAYERS)
    assert [(one.line, one.column) for one in (caught.value, *caught.value.others)] == found


def test_an_error_survives_pickling() -> None:
    error = ProgramError(line=1, column=2, message="a", expected="b", source_line="c")
    assert str(pickle.loads(pickle.dumps(error))) == str(error)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        ({"inputs": ["head"]}, "two values or layers are called `head`"),
        ({"inputs": ["a b"]}, "an input is called `a b`"),
        ({"inputs": ["self"]}, "an input is called `self`"),
        ({"constants": ["linears"]}, "two values or layers are called `linears`"),
    ],
)
def test_names_that_clash_are_refused(names: dict, words: str) -> None:
    with pytest.raises(ProgramError, match=words):
        parse("return head(linears)", LAYERS, **names)


@pytest.mark.parametrize(
    "text",
    [
        "x = " + "(" * 250 + "x" + ")" * 250,
        "x = " + "-" * 5000 + "x",
        "x = x" + ".T" * 2000,
        "x = x" + " + x" * 3000,
        "\n".join("x = x + 1" for _ in range(2000)),
        "x" * (MAX_CHARACTERS + 1),
        "x = " + "[" * (MAX_DEPTH + 1) + "]" * (MAX_DEPTH + 1),
        "x = '\\d'",
        "x = '\0'",
        "x = '\ud800' + y",
        "x = " + "9" * 5000,
    ],
)
def test_a_program_out_of_bounds_is_refused(text: str) -> None:
    with pytest.raises(ProgramError):
        parse_body(text)


def test_parsing_imports_no_torch() -> None:
    code = (
        "import sys; from exp.models.program import parse; parse('return head(x)', ['head']);"
        "assert not {'torch', 'lightning', 'hydra'} & set(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


WORDS = """
x head linears relu cat torch F math layers training self . ( ) [ ] { } , : = == + - * ** @ // % < in not and or is for
if else elif return break continue pass lambda import class def while with yield await async := -> ... None 0 1 2.5 'a'
f'{x}' \\ # ! ? $ ` __class__ _ zip enumerate range items shape T
"""
TOKENS = st.sampled_from([*WORDS.split(), "\n", "\n    ", "\n        ", "\t", " "])


@given(st.lists(TOKENS, max_size=40).map(" ".join))
@example("return x if x else")
@example("\x0creturn x")
@example("return x\r\n  y")
@example("for x in linears: return head")
def test_any_words_parse_or_are_a_program_error(text: str) -> None:
    _parses_or_is_a_program_error(text)


@given(st.text(max_size=80))
def test_any_text_parses_or_is_a_program_error(text: str) -> None:
    _parses_or_is_a_program_error(text)


def _parses_or_is_a_program_error(text: str) -> None:
    try:
        program = parse(text, LAYERS)
    except ProgramError as error:
        placed = error.line >= 1 and error.column >= 1
    else:
        placed = True
        attributes = {node.attr for node in ast.walk(program.tree) if isinstance(node, ast.Attribute)}
        assert not any(name.startswith("_") for name in attributes)
    assert placed
