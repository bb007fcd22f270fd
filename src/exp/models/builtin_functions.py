"""Python's builtins in a forward program, on what is known before the run. Each is bounded as constants.py says.

Every function takes (evaluator, node, args, kwargs) and raises ValueError for what it cannot do.
"""

from __future__ import annotations

import ast
from collections.abc import Callable
from typing import Any

from exp.models import constants
from exp.models.evaluation import Evaluation
from exp.models.recorder import is_dynamic

Builtin = Callable[[Evaluation, ast.Call, tuple, dict], Any]


def mathematics(function: Callable, args: tuple, kwargs: dict) -> float:
    """A function of Python's math on constants."""
    _only_numbers(function.__name__, args, kwargs)
    try:
        return function(*args)
    except (ArithmeticError, TypeError) as fault:
        raise ValueError(str(fault)) from None


def _only_numbers(name: str, args: tuple, kwargs: dict) -> None:
    if any(map(is_dynamic, args)):
        raise ValueError(f"`{name}` of a value that is known only while the network runs")
    if kwargs or not all(isinstance(value, int | float) for value in args):
        raise ValueError(f"`{name}` of these arguments")


def _range(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> list:
    if any(map(is_dynamic, args)):
        raise ValueError("`range` of a size that is known only while the network runs")
    if kwargs or not 1 <= len(args) <= 3 or not all(isinstance(value, int) for value in args):
        raise ValueError("`range` of these arguments")
    numbers = range(*args)
    if len(numbers) > constants.MAX_LENGTH:
        raise ValueError(f"a range of over {constants.MAX_LENGTH} numbers")
    return list(numbers)


def _length(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> int:
    (value,) = _exactly(1, "len", args, kwargs)
    if is_dynamic(value):
        raise ValueError("`len` of a tensor; `x.shape[0]` is its length")
    return len(value) if isinstance(value, str) else len(evaluator.iterate(value, node))


def _enumerate(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> list:
    start = kwargs.pop("start", args[1] if len(args) == 2 else 0)
    (value,) = _exactly(1, "enumerate", args[:1], kwargs)
    if len(args) > 2 or not isinstance(start, int):
        raise ValueError("`enumerate` of these arguments")
    return list(enumerate(evaluator.iterate(value, node), start))


def _zip(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> list:
    strict = kwargs.pop("strict", False)
    if kwargs:
        raise ValueError("`zip` of these arguments")
    return list(zip(*(evaluator.iterate(value, node) for value in args), strict=constants.truth(strict)))


def _reversed(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> list:
    (value,) = _exactly(1, "reversed", args, kwargs)
    return evaluator.iterate(value, node)[::-1]


def _list(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> list:
    return evaluator.iterate(*_exactly(1, "list", args, kwargs), node) if args or kwargs else []


def _tuple(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> tuple:
    return tuple(_list(evaluator, node, args, kwargs))


def _dict(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> dict:
    if args:
        raise ValueError("`dict` of these arguments; `dict(name=value)` or {name: value}")
    return dict(kwargs)


def _sum(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> Any:
    start = kwargs.pop("start", args[1] if len(args) == 2 else 0)
    (value,) = _exactly(1, "sum", args[:1], kwargs)
    for element in evaluator.iterate(value, node):
        start = evaluator.binary(ast.Add(), start, element, node)
    return start


def _extreme(function: Callable) -> Builtin:
    def extreme(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> float:
        values = tuple(evaluator.iterate(args[0], node)) if len(args) == 1 else args
        _only_numbers(function.__name__, values, kwargs)
        return function(values)

    return extreme


def _of_numbers(function: Callable) -> Builtin:
    def apply(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> float:
        return mathematics(function, args, kwargs)

    return apply


def _scalar(function: type) -> Builtin:
    def convert(evaluator: Evaluation, node: ast.Call, args: tuple, kwargs: dict) -> Any:
        (value,) = _exactly(1, function.__name__, args, kwargs)
        if is_dynamic(value):
            raise ValueError(f"`{function.__name__}` of a value that is known only while the network runs")
        if not constants.is_scalar(value):
            raise ValueError(f"`{function.__name__}` of a {type(value).__name__}")
        try:
            return function(value)
        except (ArithmeticError, TypeError) as fault:
            raise ValueError(str(fault)) from None

    return convert


def _exactly(count: int, name: str, args: tuple, kwargs: dict) -> tuple:
    if kwargs or len(args) != count:
        raise ValueError(f"`{name}` of {len(args) + len(kwargs)} arguments; it takes {count}")
    return args


BUILTINS: dict[str, Builtin] = {
    "abs": _of_numbers(abs),
    "bool": _scalar(bool),
    "dict": _dict,
    "enumerate": _enumerate,
    "float": _scalar(float),
    "int": _scalar(int),
    "len": _length,
    "list": _list,
    "max": _extreme(max),
    "min": _extreme(min),
    "range": _range,
    "reversed": _reversed,
    "round": _of_numbers(round),
    "str": _scalar(str),
    "sum": _sum,
    "tuple": _tuple,
    "zip": _zip,
}
