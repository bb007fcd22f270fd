"""python -m exp.gradcheck: right and wrong derivatives of Functions and functions of users."""

from __future__ import annotations

import sys

import pytest

from exp.cli.gradcheck import main

pytestmark = [pytest.mark.numeric, pytest.mark.any_processor]

OWN = """
import torch
from torch.autograd.function import once_differentiable


class Cube(torch.autograd.Function):
    factor = 3

    @staticmethod
    def forward(ctx, x):  # the style without setup_context
        ctx.save_for_backward(x)
        return x ** 3

    @staticmethod
    def backward(ctx, gradient):
        (x,) = ctx.saved_tensors
        return gradient * 3 * x ** 2


class Once(Cube):
    @staticmethod
    @once_differentiable
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0] ** 2


class Detached(Cube):  # the gradient is right and the second gradient is wrong
    @staticmethod
    def backward(ctx, gradient):
        return gradient * 3 * ctx.saved_tensors[0].detach() ** 2


class Scale(torch.autograd.Function):
    @staticmethod
    def forward(x, factor):
        return x * factor

    @staticmethod
    def setup_context(ctx, inputs, output):
        ctx.factor = inputs[1]

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.factor, None


class OnePlaceOff(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, y):
        ctx.save_for_backward(x, y)
        return x.sin() * y

    @staticmethod
    def backward(ctx, gradient):
        x, y = ctx.saved_tensors
        of_y = gradient * x.sin()
        wrong = torch.zeros_like(of_y)
        wrong[1, 2] = 0.5
        return gradient * x.cos() * y, of_y + wrong


def looked_up(index, table):
    return table[index].exp()
"""


@pytest.fixture(autouse=True)
def own(tmp_path, monkeypatch):
    (tmp_path / "conf" / "model").mkdir(parents=True)
    (tmp_path / "conf" / "model" / "mine.yaml").write_text("_target_: own_derivatives.Cube\n")
    (tmp_path / "own_derivatives.py").write_text(OWN)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.delitem(sys.modules, "own_derivatives", raising=False)


def rows_of(capsys, *command: str) -> tuple[int, dict[str, str]]:
    status = main(command)
    rows = capsys.readouterr().out.splitlines()
    return status, {row[:16].strip(): row[17:] for row in rows}


@pytest.mark.parametrize(
    "command",
    [
        ("own_derivatives.Cube",),
        ("own_derivatives.Scale", "factor=2.5", "--input", "2x2"),
        ("own_derivatives.looked_up", "--input", "4:5", "--input", "5x2"),
        ("exp.extras.gallery.custom_functions.Linear", "bias=null", "--input", "4x3", "--input", "2x3"),
        ("own_derivatives.Cube", "--input", ""),
    ],
)
def test_right_derivatives_pass(command, capsys) -> None:
    status, rows = rows_of(capsys, *command)
    assert status == 0
    assert rows["gradient"] == rows["second gradient"] == "right"


def test_a_wrong_input_is_named(capsys) -> None:
    assert main(["own_derivatives.OnePlaceOff", "--input", "2x3", "--input", "2x3"]) == 1
    shown = capsys.readouterr().out
    assert "input 0 is x, input 1 is y. Jacobian mismatch for output 0 with respect to input 1" in shown
    assert "0.5000" in shown  # the analytical Jacobian of torch's message


@pytest.mark.parametrize(
    ("command", "row", "word"),
    [
        (("own_derivatives.Detached",), "second gradient", "WRONG; input 0 is x. Jacobian mismatch"),
        (("own_derivatives.Once",), "second gradient", "not compared; "),
    ],
)
def test_second_gradients_are_compared(command, row, word, capsys) -> None:
    status, rows = rows_of(capsys, *command)
    assert status == (1 if word.startswith("WRONG") else 0)
    assert rows["gradient"] == "right"
    assert rows[row].startswith(word)


@pytest.mark.parametrize(
    ("command", "message"),
    [
        (("os.system",), "_target_: os.system, outside the allowed packages"),
        (("own_derivatives.Cubed",), "Did you mean own_derivatives.Cube?"),
        (("own_derivatives.Scale", "facto=2"), "facto: no parameter of its forward; expected one of x, factor"),
        (("own_derivatives.Cube", "--input", "2", "--input", "3"), "--input: 2 of them; expected at most one"),
        (("own_derivatives.looked_up", "--input", "4", "--input", "4"), "--input: 4, 4, with which the forward failed"),
        (("own_derivatives.Cube", "--input", "4x"), "--input: '4x'; expected sizes with x between them"),
        (("own_derivatives.Cube", "--input", "4:3"), "of which no floating output depends on"),
        (("torch.optim.SGD",), "TARGET: torch.optim.SGD, another class"),
        (("torch.nn.functional.gelu",), "TARGET: torch.nn.functional.gelu, which does not name its parameters"),
        (("own_derivatives.Cube", "x:1"), "NAME=VALUE: 'x:1'"),
    ],
)
def test_wrong_commands_are_errors(command, message, capsys) -> None:
    assert main(command) == 2
    error = capsys.readouterr().err
    assert message in error
    assert "Traceback" not in error
